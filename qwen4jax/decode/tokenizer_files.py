"""The files of a Hugging Face tokenizer directory, read and checked against each other."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from qwen4jax.decode.chat import ChatTemplate, TokenizerError, template_sources

_NAMED = "bos_token eos_token unk_token sep_token pad_token cls_token mask_token".split()


@dataclasses.dataclass(frozen=True)
class TokenizerFiles:
    """What a tokenizer directory says; the attributes are those of `text.Tokenizer`."""

    backend: tokenizers.Tokenizer = dataclasses.field(repr=False)
    eos_ids: tuple[int, ...]
    special_ids: frozenset[int]
    special_tokens: Mapping[str, str]
    chat_template: ChatTemplate | None


def read_tokenizer_files(directory: Path) -> TokenizerFiles:
    """Reads `tokenizer.json` and, where they exist, the files beside it.

    Raises:
        TokenizerError: a file is missing, broken, or contradicts another; names the file.
    """
    backend = _read_backend(directory / "tokenizer.json")
    config_file = directory / "tokenizer_config.json"
    config = _read_json(config_file)
    special = {i for i, token in backend.get_added_tokens_decoder().items() if token.special}
    special |= _declared_special(backend, config, config_file)
    if "added_tokens_decoder" not in config:
        # the older of two places; transformers too reads it only then
        config |= _read_json(directory / "special_tokens_map.json")
    texts = token_texts(config)
    named: dict[str, int] = {}
    for role in _NAMED:
        if role in texts:
            found = backend.token_to_id(texts[role])
            if found is None:
                raise TokenizerError(
                    f"{directory}: {role} {texts[role]!r} is not in tokenizer.json"
                )
            named[role] = found
    eos_ids = _generation_eos(directory / "generation_config.json")
    if not eos_ids and "eos_token" in named:
        eos_ids = (named["eos_token"],)
    return TokenizerFiles(
        backend=backend,
        eos_ids=eos_ids,
        special_ids=frozenset(special | set(named.values())),
        special_tokens=texts,
        chat_template=_read_templates(directory, config, config_file),
    )


def _read_backend(file: Path) -> tokenizers.Tokenizer:
    if not file.is_file():
        raise TokenizerError(f"{file}: no such file; a tokenizer's directory has one")
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    # the package raises no narrower class
    except Exception as e:
        raise TokenizerError(f"{file}: cannot be read as a tokenizer: {e}") from e


def _read_json(file: Path) -> dict[str, Any]:
    """The object in `file`, or an empty one where there is no such file."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (ValueError, OSError) as e:
        raise TokenizerError(f"{file}: cannot be read as JSON: {e}") from e
    if not isinstance(value, dict):
        raise TokenizerError(f"{file}: a JSON object is expected, found {type(value).__name__}")
    return value


def token_texts(fields: Mapping[str, Any]) -> dict[str, str]:
    """The fields called `*_token`: each a string, or an object that has it as `content`."""
    texts = {
        name: value.get("content") if isinstance(value, dict) else value
        for name, value in fields.items()
        if name.endswith("_token")
    }
    # others are switches, like add_bos_token, or null
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _declared_special(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], file: Path
) -> set[int]:
    """Special ids by `added_tokens_decoder`, which must agree with `tokenizer.json`."""
    declared = config.get("added_tokens_decoder", {})
    if not isinstance(declared, dict):
        raise TokenizerError(f"{file}: added_tokens_decoder: a JSON object is expected")
    special = set()
    for key, token in declared.items():
        text = token.get("content") if isinstance(token, dict) else None
        if not (key.isdecimal() and isinstance(text, str)):
            raise TokenizerError(f"{file}: added_tokens_decoder: {key!r}: {token!r} is no token")
        found = backend.token_to_id(text)
        if found != int(key):
            raise TokenizerError(
                f"{file}: added_tokens_decoder: {text!r} has id {key}, "
                f"but {found} in tokenizer.json"
            )
        if token.get("special"):
            special.add(int(key))
    return special


def _generation_eos(file: Path) -> tuple[int, ...]:
    eos = _read_json(file).get("eos_token_id")
    ids = () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,)
    for i in ids:
        if isinstance(i, bool) or not isinstance(i, int) or i < 0:
            raise TokenizerError(f"{file}: eos_token_id: {i!r} is not a token id")
    return ids


def _read_templates(
    directory: Path, config: Mapping[str, Any], config_file: Path
) -> ChatTemplate | None:
    main = directory / "chat_template.jinja"
    others = sorted((directory / "additional_chat_templates").glob("*.jinja"))
    try:
        files = {path.stem: path.read_text(encoding="utf-8") for path in others}
        if main.exists():
            files["default"] = main.read_text(encoding="utf-8")
    except (ValueError, OSError) as e:
        raise TokenizerError(f"{main}: a chat template cannot be read: {e}") from e
    if files:
        return ChatTemplate(files, str(main if main.exists() else main.parent))
    if config.get("chat_template") is None:
        return None
    return ChatTemplate(
        template_sources(config["chat_template"], str(config_file)), str(config_file)
    )
