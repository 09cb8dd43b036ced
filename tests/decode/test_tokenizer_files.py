"""Tokenizer directories: what is read from which file, and what a bad file is called."""

from pathlib import Path
from typing import Any

import pytest
import tokenizers

from qwen4jax.decode.chat import TokenizerError
from qwen4jax.decode.text import Tokenizer
from tests.decode.sample_tokenizers import HELLO, PARAGRAPH, byte_level, qwen_style, write


def test_text_and_ids_agree_with_the_file():
    ids = qwen_style().encode(PARAGRAPH)
    assert ids == byte_level().encode(PARAGRAPH).ids
    assert qwen_style().decode(ids) == PARAGRAPH
    assert qwen_style().vocab_size == 405
    assert qwen_style().special_ids == {400, 401, 402}
    assert qwen_style().special_tokens == {"eos_token": "<|im_end|>"}


def test_eos_of_the_generation_config_comes_first(tmp_path: Path):
    assert qwen_style().eos_ids == (402,)
    write(tmp_path, generation_config={"eos_token_id": [402, 400]})
    assert Tokenizer.load(tmp_path).eos_ids == (402, 400)
    write(tmp_path, generation_config={"eos_token_id": 400})
    assert Tokenizer.load(tmp_path).eos_ids == (400,)


def test_tokenizer_json_is_enough(tmp_path: Path):
    alone = Tokenizer.load(write(tmp_path, tokenizer_config=None, chat_template=None))
    assert alone.eos_ids == ()
    assert alone.decode(alone.encode("é 你")) == "é 你"
    with pytest.raises(TokenizerError, match=r"no chat template .*pass the prompt as text"):
        alone.chat(HELLO)


def test_special_tokens_map_serves_where_the_config_lists_no_tokens(tmp_path: Path):
    eos = {"eos_token": {"content": "<|endoftext|>", "lstrip": False}}
    write(tmp_path, special_tokens_map=eos)
    assert Tokenizer.load(tmp_path).eos_ids == (400,)
    listed = {"added_tokens_decoder": {"403": {"content": "<think>", "special": True}}}
    write(tmp_path, special_tokens_map=eos, tokenizer_config=listed)
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.eos_ids == ()
    assert tokenizer.decode([403], skip_special=True) == ""


def test_a_token_with_a_role_is_special(tmp_path: Path):
    write(tmp_path, tokenizer_config={"eos_token": {"content": "</think>", "special": False}})
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.eos_ids == (404,)
    assert tokenizer.decode([403, 404], skip_special=True) == "<think>"


def test_settings_of_the_training_do_not_cut_or_pad(tmp_path: Path):
    backend = tokenizers.Tokenizer.from_str(byte_level().to_str())
    backend.enable_truncation(3)
    backend.enable_padding(length=7)
    text = "a longer text than three"
    for tokenizer in (
        Tokenizer.load(write(tmp_path, tokenizer=backend.to_str())),
        Tokenizer.from_object(backend),
    ):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(backend.encode(text)) == 7  # the caller's own is left as it was


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer": None}, r"tokenizer\.json: no such file"),
        ({"tokenizer": '{"model": '}, r"tokenizer\.json: cannot be read as a tokenizer"),
        ({"tokenizer": {"model": {}}}, r"tokenizer\.json: cannot be read as a tokenizer"),
        ({"tokenizer_config": '{"a": '}, r"tokenizer_config\.json: cannot be read as JSON"),
        ({"tokenizer_config": []}, r"tokenizer_config\.json: a JSON object is expected.*list"),
        ({"special_tokens_map": "x"}, r"special_tokens_map\.json: cannot be read as JSON"),
        ({"generation_config": "x"}, r"generation_config\.json: cannot be read as JSON"),
        (
            {"generation_config": {"eos_token_id": [1, "2"]}},
            r"generation_config\.json: eos_token_id: '2' is not a token id",
        ),
        (
            {"tokenizer_config": {"eos_token": "<eos>"}},
            r"eos_token '<eos>' is not in tokenizer\.json",
        ),
        (
            {"tokenizer_config": {"added_tokens_decoder": {"7": {"content": "<think>"}}}},
            r"tokenizer_config\.json: added_tokens_decoder: '<think>' has id 7, but 403",
        ),
        (
            {"tokenizer_config": {"added_tokens_decoder": {"x": "<think>"}}},
            r"added_tokens_decoder: 'x': '<think>' is no token",
        ),
        (
            {"tokenizer_config": {"added_tokens_decoder": 3}},
            "added_tokens_decoder: a JSON object is expected",
        ),
        (
            {"tokenizer_config": {"chat_template": 3}, "chat_template": None},
            r"tokenizer_config\.json: chat_template: neither a string nor a list",
        ),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, files: dict[str, Any], message: str):
    with pytest.raises(TokenizerError, match=message):
        Tokenizer.load(write(tmp_path, **files))


def test_a_template_that_is_no_text_is_named(tmp_path: Path):
    (write(tmp_path) / "chat_template.jinja").write_bytes(b"\xff\xfe{{")
    with pytest.raises(TokenizerError, match=r"chat_template\.jinja: .*cannot be read"):
        Tokenizer.load(tmp_path)


def test_a_missing_directory(tmp_path: Path):
    with pytest.raises(TokenizerError, match=r"nowhere/tokenizer\.json: no such file"):
        Tokenizer.load(tmp_path / "nowhere")
