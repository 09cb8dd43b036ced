"""Chat prompts: Hugging Face's template conventions, the sandbox, malformed messages."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qwen4jax.decode.chat import TokenizerError
from qwen4jax.decode.text import Tokenizer
from tests.decode.sample_tokenizers import HELLO, qwen_style, write


def test_qwen_style():
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Bonjour "}] * 2},
        {"role": "assistant", "content": None, "tool_calls": [{"name": "é<", "n": 1}]},
    ]
    expected = (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nBonjour Bonjour<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>{"name": "é<", "n": 1}</tool_call><|im_end|>\n'
    )
    assert qwen_style().chat(messages, add_generation_prompt=False) == expected
    assert qwen_style().chat(messages) == expected + "<|im_start|>assistant\n"
    thoughtless = qwen_style().chat(HELLO, enable_thinking=False)
    assert thoughtless.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    ids = qwen_style().chat_ids(HELLO)
    assert ids.count(401) == 2
    assert qwen_style().decode(ids) == qwen_style().chat(HELLO)


def test_messages_are_not_changed():
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}], "name": None}]
    before = json.dumps(messages)
    qwen_style().chat(messages)
    assert json.dumps(messages) == before


def test_where_templates_are_found(tmp_path: Path):
    named = [
        {"name": "default", "template": "D{{ eos_token }}"},
        {"name": "tool_use", "template": "T{{ tools[0].name }}"},
        {"name": "rag", "template": "R{{ documents is none }}"},
    ]
    config = {"eos_token": "<|im_end|>", "chat_template": named}
    tokenizer = Tokenizer.load(write(tmp_path, tokenizer_config=config, chat_template=None))
    assert tokenizer.chat(HELLO) == "D<|im_end|>"
    assert tokenizer.chat(HELLO, eos_token="!") == "D!"
    assert tokenizer.chat(HELLO, tools=[{"name": "f"}]) == "Tf"
    assert tokenizer.chat(HELLO, template="rag") == "RTrue"
    with pytest.raises(TokenizerError, match="'x'; pass template= one of default, rag, tool_"):
        tokenizer.chat(HELLO, template="x")
    # a file comes before the field
    folder = tmp_path / "additional_chat_templates"
    folder.mkdir()
    (folder / "short.jinja").write_text("S")
    with pytest.raises(TokenizerError, match="'default'; pass template= one of short"):
        Tokenizer.load(tmp_path).chat(HELLO)
    assert Tokenizer.load(write(tmp_path, tokenizer_config=config)).chat(HELLO)[0] == "<"
    config["chat_template"] = "one"
    (folder / "short.jinja").unlink()
    write(tmp_path, tokenizer_config=config).joinpath("chat_template.jinja").unlink()
    assert Tokenizer.load(tmp_path).chat(HELLO) == "one"


@pytest.mark.parametrize(
    ("template", "rendered"),
    [
        ("  {% if true %}\nx\n  {% endif %}\ny\n", "x\ny"),
        ("{{ {'b': '<é>', 'a': 1} | tojson }}", '{"b": "<é>", "a": 1}'),
        ("{{ [1] | tojson(indent=2) }}", "[\n  1\n]"),
        (
            "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}",
            "01",
        ),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{{ tools is none }}{{ never_given }}", "True"),
    ],
)
def test_conventions_of_hugging_face(tmp_path: Path, template: str, rendered: str):
    assert Tokenizer.load(write(tmp_path, chat_template=template)).chat(HELLO) == rendered


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''['__class__'] }}",
        "{{ ''|attr('__class__') }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='system') }}",
        "{{ raise_exception.__globals__ }}",
        "{{ cycler.__init__.__globals__.os }}",
    ],
)
def test_the_sandbox_holds(tmp_path: Path, template: str):
    tokenizer = Tokenizer.load(write(tmp_path, chat_template=template))
    with pytest.raises(TokenizerError, match=r"chat_template\.jinja: .*SecurityError"):
        tokenizer.chat(HELLO)
    assert tokenizer.encode("still works")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("\n{% if %}", r"chat_template\.jinja: line 2: Expected an expression"),
        ("{{ raise_exception('no way') }}", r"chat_template\.jinja: .*no way"),
        ("{{ 1 + 'a' }}", r"chat_template\.jinja: .*TypeError"),
    ],
)
def test_a_broken_template_is_named(tmp_path: Path, template: str, message: str):
    with pytest.raises(TokenizerError, match=message):
        Tokenizer.load(write(tmp_path, chat_template=template)).chat(HELLO)


@pytest.mark.parametrize(
    ("message", "where"),
    [
        (3, r"messages\[1\]: a mapping with role and content is expected, not int"),
        ({"content": "a"}, r"messages\[1\]\.role: is missing"),
        ({"role": 1, "content": "a"}, r"messages\[1\]\.role: 1 is not a string"),
        ({"role": "user"}, r"messages\[1\]\.content: is missing"),
        ({"role": "user", "content": None}, r"messages\[1\]\.content: is missing"),
        ({"role": "user", "content": 5}, r"messages\[1\]\.content: .* not int"),
        ({"role": "user", "content": ["a"]}, r"messages\[1\]\.content\[0\]: .*'a'"),
        (
            {"role": "user", "content": [{"type": "text"}]},
            r"messages\[1\]\.content\[0\]\.text: None is not a string",
        ),
        (
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "poem"}]},
            r"messages\[1\]\.content\[1\]\.type: 'poem' is not 'text'",
        ),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            r"messages\[1\]\.content\[0\]: images are not supported",
        ),
        (
            {"role": "user", "content": [{"image": "x"}]},
            r"messages\[1\]\.content\[0\]: images are not supported",
        ),
        (
            {"role": "user", "content": [{"type": "video", "video": "x"}]},
            r"messages\[1\]\.content\[0\]: videos are not supported",
        ),
        (
            {"role": "user", "content": "a", "extra": {"k": [object()]}},
            r"messages\[1\]\.extra\.k\[0\]: .*JSON values only.*not object",
        ),
        ({"role": "user", "content": "a", 4: 5}, r"messages\[1\]: the key 4 is not a string"),
    ],
)
def test_a_bad_message_is_named(message: Any, where: str):
    with pytest.raises((TypeError, ValueError), match=where):
        qwen_style().chat([*HELLO, message])


def test_bad_arguments():
    with pytest.raises(TypeError, match="messages: a list of messages is expected, not str"):
        qwen_style().chat("Hello")
    with pytest.raises(ValueError, match="messages: the list is empty"):
        qwen_style().chat([])
    with pytest.raises(TypeError, match=r"tools\[0\]: .*of a function its schema"):
        qwen_style().chat(HELLO, tools=[len])
    with pytest.raises(TokenizerError, match="System message must be at the beginning"):
        qwen_style().chat([*HELLO, {"role": "system", "content": "late"}])


def test_a_template_sees_plain_values(tmp_path: Path):
    class Name(str):
        def shout(self):
            return "reached"

    template = "{{ name.shout is defined }} {{ name }} {{ heat }}"
    tokenizer = Tokenizer.load(write(tmp_path, chat_template=template))
    assert tokenizer.chat(HELLO, name=Name("Ada"), heat=np.float64(0.5)) == "False Ada 0.5"
