"""Small tokenizers for tests, trained or made on the spot, and directories that hold one."""

import functools
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from qwen4jax.decode.text import Tokenizer

# Latin, CJK, emojis (some of several code points), combining marks, right-to-left, a tab
PARAGRAPH = (
    "The quick brown fox — naïve café, cafe\u0301, n\u0303 — jumps over 42 lazy dogs.\n\t"
    "你好世界、今天天气很好。日本語のテキストです。 😀😃😄 👩‍👩‍👧‍👦 🏳️‍🌈 שלום, नमस्ते, 안녕하세요. "
    "def f(x):\n    return x + 1\n"
)
CHATML = """\
{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- if tools %}
    {{- '<|im_start|>system\\n' + (tools | tojson) + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {%- if not loop.first %}
            {{- raise_exception('System message must be at the beginning.') }}
        {%- endif %}
        {%- continue %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- generation %}
        {{- message.content | default('', true) | trim }}
    {%- endgeneration %}
    {%- for call in message.tool_calls | default([], true) %}
        {{- '<tool_call>' + (call | tojson) + '</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
HELLO = [{"role": "user", "content": "Hello"}]


@functools.cache
def byte_level() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    backend.train_from_iterator([PARAGRAPH] * 3, trainer)
    backend.add_special_tokens(list(SPECIAL))
    backend.add_tokens(["<think>", "</think>"])
    return backend


def with_tokens(decoder: decoders.Decoder, pieces: Sequence[str]) -> tokenizers.Tokenizer:
    """A tokenizer whose tokens are `pieces`, to decode with."""
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token=pieces[0]))
    backend.decoder = decoder
    backend.add_special_tokens(["<s>"])
    return backend


WORDS = "▁ ▁▁ ▁Hello ▁world llo , . ▁你好 � ▁� e\u0301".split(" ")


@functools.cache
def decoders_by_name() -> dict[str, Tokenizer]:
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    llama = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backends = {
        "byte level": byte_level(),
        "metaspace": with_tokens(decoders.Metaspace(), WORDS),
        "byte fallback": with_tokens(llama, [*WORDS, *byte_tokens]),
        "word pieces": with_tokens(decoders.WordPiece(), ["un", "##able", ".", "n't", "word"]),
    }
    return {name: Tokenizer.from_object(backend) for name, backend in backends.items()}


class HubObject:
    """Has the methods of a Hugging Face tokenizer, over the byte-level one."""

    all_special_ids = (402,)
    special_tokens_map = {"eos_token": "<|im_end|>"}  # noqa: RUF012
    eos_token_id = 402
    clean_up_tokenization_spaces = True
    chat_template = "{{ messages[0].content }}{% if add_generation_prompt %}>{% endif %}{{ tone }}"

    @property
    def added_tokens_decoder(self):
        return byte_level().get_added_tokens_decoder()

    def get_vocab(self):
        return byte_level().get_vocab()

    def encode(self, text, add_special_tokens=True, split_special_tokens=False):
        if split_special_tokens:
            return [token for char in text for token in byte_level().encode(char).ids]
        return byte_level().encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids, skip_special_tokens=False, clean_up_tokenization_spaces=True):
        text = byte_level().decode(ids, skip_special_tokens=skip_special_tokens)
        return text.replace(" .", ".") if clean_up_tokenization_spaces else text

    def apply_chat_template(self, messages, tokenize=True, chat_template=None, **values):
        assert not tokenize
        template = jinja2.Template(chat_template or self.chat_template)
        return template.render(messages=messages, **values)


def write(directory: Path, **files: Any) -> Path:
    """A tokenizer directory; a file is given by its name without the ending, None leaves it out."""
    defaults: dict[str, Any] = dict(
        tokenizer=byte_level().to_str(),
        tokenizer_config={"eos_token": "<|im_end|>", "pad_token": None, "add_bos_token": False},
        chat_template=CHATML,
    )
    for name, content in (defaults | files).items():
        if content is not None:
            path = directory / f"{name}.{'jinja' if name == 'chat_template' else 'json'}"
            path.write_text(content if isinstance(content, str) else json.dumps(content))
    return directory


@functools.cache
def qwen_style() -> Tokenizer:
    with tempfile.TemporaryDirectory() as directory:
        return Tokenizer.load(write(Path(directory)))
