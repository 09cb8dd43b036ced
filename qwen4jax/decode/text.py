"""Text to token ids and back: a checkpoint's tokenizer, and text from a growing stream of ids.

Reads what a Hugging Face directory holds (`tokenizer.json` and the small files beside it) without
transformers or torch.
"""

import dataclasses
import functools
import json
import operator
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol, Self

import tokenizers

from qwen4jax.decode.chat import (
    ChatTemplate,
    Messages,
    TokenizerError,
    check_messages,
    plain_value,
    template_sources,
)

_NAMED = "bos_token eos_token unk_token sep_token pad_token cls_token mask_token".split()


class _Codec(Protocol):
    """What turns text into ids and back."""

    def encode(self, text: str, add_special: bool, parse_special: bool) -> list[int]: ...

    def decode(self, ids: list[int], skip_special: bool) -> str: ...


@dataclasses.dataclass(frozen=True, eq=False)
class Tokenizer:
    """A tokenizer and the chat template that goes with it.

    Made by `load` or `from_object`. Has no state that a call could change: threads may share it.

    Attributes:
        vocab_size: one more than the highest id. The model's table may have more rows (padding).
        eos_ids: ids that end generation, from `generation_config.json` where there is one. The
            n-gram hash resets at the model configuration's `eos_token_id`, which may differ.
        special_ids: ids that `skip_special` leaves out.
        special_tokens: text by role (`eos_token`, ...); chat templates read them.
        chat_template: None where the checkpoint has none, or where an object brings its own.
    """

    codec: _Codec = dataclasses.field(repr=False)
    vocab_size: int
    eos_ids: tuple[int, ...]
    special_ids: frozenset[int] = dataclasses.field(repr=False)
    special_tokens: Mapping[str, str] = dataclasses.field(repr=False)
    chat_template: ChatTemplate | None = dataclasses.field(repr=False)
    byte_fallback_ids: frozenset[int] = dataclasses.field(repr=False)
    origin: str

    @classmethod
    def load(cls, directory: str | Path) -> Self:
        """Reads the tokenizer of a Hugging Face checkpoint directory.

        `tokenizer.json` must be there. Read where they exist: `tokenizer_config.json`,
        `special_tokens_map.json`, `chat_template.jinja` (before the field `chat_template`),
        `additional_chat_templates/*.jinja`, `generation_config.json`.

        Raises:
            TokenizerError: a file is missing, broken, or contradicts another; names the file.
        """
        directory = Path(directory)
        backend = _read_backend(directory / "tokenizer.json")
        config_file = directory / "tokenizer_config.json"
        config = _read_json(config_file)
        special_ids = {i for i, t in backend.get_added_tokens_decoder().items() if t.special}
        special_ids |= _declared_special(backend, config, config_file)
        if "added_tokens_decoder" not in config:
            # the older of two places; transformers too reads it only then
            config |= _read_json(directory / "special_tokens_map.json")
        special_tokens = _token_texts(config)
        named_ids: dict[str, int] = {}
        for role in special_tokens.keys() & set(_NAMED):
            found = backend.token_to_id(special_tokens[role])
            if found is None:
                raise TokenizerError(
                    f"{config_file}: {role}: {special_tokens[role]!r} is not in tokenizer.json"
                )
            named_ids[role] = found
        eos_ids = _generation_eos(directory / "generation_config.json")
        if not eos_ids and "eos_token" in named_ids:
            eos_ids = (named_ids["eos_token"],)
        return cls(
            codec=_TokenizersCodec(backend),
            eos_ids=eos_ids,
            special_ids=frozenset(special_ids | set(named_ids.values())),
            special_tokens=special_tokens,
            chat_template=_read_templates(directory, config, config_file),
            origin=str(directory),
            **_vocabulary(backend.get_vocab()),
        )

    @classmethod
    def from_object(cls, tokenizer: Any) -> "Tokenizer":
        """Wraps a tokenizer object: Hugging Face's, one like it, or a `tokenizers.Tokenizer`.

        It needs `encode`, `decode` and `get_vocab`, and `apply_chat_template` for chat prompts.

        Raises:
            TypeError: the object is no such thing; the message says what it lacks.
        """
        if isinstance(tokenizer, Tokenizer):
            return tokenizer
        kind = type(tokenizer).__name__
        for method in ("encode", "decode", "get_vocab"):
            if not callable(getattr(tokenizer, method, None)):
                raise TypeError(f"tokenizer: {kind} has no method {method}")
        if isinstance(tokenizer, tokenizers.Tokenizer):
            codec: _Codec = _TokenizersCodec(tokenizer)
            added = tokenizer.get_added_tokens_decoder()
            special_ids = {i for i, token in added.items() if token.special}
        else:
            codec = _ObjectCodec(tokenizer)
            special_ids = set(getattr(tokenizer, "all_special_ids", ()))
        eos = getattr(tokenizer, "eos_token_id", None)
        return cls(
            codec=codec,
            eos_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
            special_ids=frozenset(special_ids),
            special_tokens=_token_texts(getattr(tokenizer, "special_tokens_map", {})),
            chat_template=None,
            origin=kind,
            **_vocabulary(tokenizer.get_vocab()),
        )

    def encode(
        self, text: str, *, add_special: bool = True, parse_special: bool = True
    ) -> list[int]:
        """The ids of `text`, never truncated or padded.

        Args:
            text: any string.
            add_special: adds what the tokenizer puts around a text (for Qwen nothing).
            parse_special: reads the text of a special token as that token. False reads it as
                ordinary text, for input that must not end a turn; added tokens that are not
                special (Qwen's `<think>`) are read as tokens in either case.
        """
        if not isinstance(text, str):
            raise TypeError(f"text: a string is expected, not {type(text).__name__}")
        try:
            text.encode()
        except UnicodeEncodeError as e:
            raise ValueError(f"text: a lone surrogate at character {e.start}") from e
        return self.codec.encode(text, add_special, parse_special)

    def decode(self, ids: Iterable[Any], *, skip_special: bool = False) -> str:
        """The text of `ids`. Bytes that are no UTF-8 become U+FFFD.

        Ids from `vocab_size` on (rows that pad the model's table) have no text, as in transformers.

        Raises:
            TypeError, ValueError: an id is no integer, or negative; the message names its index.
        """
        return self.codec.decode(self.visible(ids, skip_special=skip_special), skip_special)

    def visible(self, ids: Iterable[Any], *, skip_special: bool = False) -> list[int]:
        """Those of `ids` that have a text, as Python integers; raises as `decode` does."""
        kept = []
        for index, value in enumerate(ids):
            try:
                token = operator.index(value)
            except TypeError:
                raise TypeError(f"ids[{index}]: {value!r} is not an integer") from None
            if token < 0:
                raise ValueError(f"ids[{index}]: {token} is negative")
            if token < self.vocab_size and not (skip_special and token in self.special_ids):
                kept.append(token)
        return kept

    def chat(
        self,
        messages: Messages,
        *,
        add_generation_prompt: bool = True,
        template: str | None = None,
        **template_kwargs: Any,
    ) -> str:
        """The prompt text of a conversation.

        Args:
            messages: `[{"role": ..., "content": ...}, ...]`, see `chat.check_messages`.
            add_generation_prompt: ends with the opening of the assistant's turn.
            template: the name of one of several chat templates.
            **template_kwargs: JSON values that the template may read (`tools`, `enable_thinking`).

        Raises:
            TypeError, ValueError: a message or an argument is malformed; names index and field.
            TokenizerError: there is no template, or it cannot be rendered.
        """
        checked = check_messages(messages)
        variables = {name: plain_value(value, name) for name, value in template_kwargs.items()}
        variables["add_generation_prompt"] = add_generation_prompt
        if isinstance(self.codec, _ObjectCodec):
            return self.codec.chat(checked, variables, template, self.origin)
        if self.chat_template is None:
            raise TokenizerError(
                f"{self.origin}: has no chat template: put one into chat_template.jinja there, "
                "or pass the prompt as text"
            )
        return self.chat_template.render(checked, {**self.special_tokens, **variables}, template)

    def chat_ids(self, messages: Messages, **arguments: Any) -> list[int]:
        """The ids of `chat(messages, **arguments)`.

        Special tokens are parsed in the whole prompt, as everywhere: those that a message spells
        out too.
        """
        # the template has written every special token there shall be
        return self.encode(self.chat(messages, **arguments), add_special=False)


class StreamDecoder:
    """Text of a stream of ids, piece by piece: the pieces joined are the `decode` of all ids.

    A piece never ends within a character. What cannot be known yet is held back: a character whose
    bytes are not complete and, in vocabularies with byte tokens (`<0xE4>`), a run of these. A
    U+FFFD at the end is held back too, for it may stand for an incomplete character.

    The cost of a burst does not grow with the stream: a bounded window of ids is decoded, which
    begins with ids whose text is out already. They keep the next id from being taken for the first
    of a text, where decoders drop a leading space.
    """

    # Ids kept as context when the window moves; it moves when it has twice as many.
    CONTEXT = 8

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = False):
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._window: list[int] = []
        self._sent = 0  # leading characters of the window's text that were handed out
        self._held = 0  # trailing byte tokens of the window: one bad byte spoils all their text

    def feed(self, ids: Iterable[Any]) -> str:
        """Takes the next ids, any number of them; returns the text that is certain by now.

        Raises:
            TypeError, ValueError: as `Tokenizer.decode`; the stream is unchanged then.
        """
        new = self._tokenizer.visible(ids, skip_special=self._skip_special)
        if not new:
            return ""
        self._window += new
        for token in new:
            self._held = self._held + 1 if token in self._tokenizer.byte_fallback_ids else 0
        ready = len(self._window) - self._held
        if not ready:
            return ""
        text = self._decode(self._window[:ready])
        # of the bytes decoded so far only the last character can still change
        certain = text.removesuffix("\ufffd")
        delta = certain[self._sent :]
        self._sent = len(certain)
        if ready >= 2 * self.CONTEXT:
            self._move(ready, text)
        return delta

    def flush(self) -> str:
        """Ends the stream: returns what was held back. The next `feed` begins a new text."""
        rest = self._decode(self._window)[self._sent :] if self._window else ""
        self._window, self._sent, self._held = [], 0, 0
        return rest

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special=self._skip_special)

    def _move(self, ready: int, text: str) -> None:
        """Drops ids from the window's front, up to a border between two characters.

        At a border within a character the two sides have more characters than the whole: the left
        one ends in U+FFFD for the bytes it has, the right one begins with U+FFFD for each byte it
        has. A character has at most four bytes, so that one of four successive borders will do.
        """
        for start in range(ready - self.CONTEXT, ready):
            left = self._decode(self._window[:start])
            right = self._decode(self._window[start:ready])
            if right and len(left) + len(right) <= len(text):
                self._sent = len(right) - (len(text) - self._sent)
                del self._window[:start]
                return


class _TokenizersCodec:
    """A tokenizer of the `tokenizers` package, of which no setting changes after this."""

    def __init__(self, backend: tokenizers.Tokenizer):
        self._backend = backend

    @functools.cached_property
    def _without_special(self) -> tokenizers.Tokenizer:
        # a copy: the setting belongs to the tokenizer, not to the call
        copy = tokenizers.Tokenizer.from_str(self._backend.to_str())
        copy.encode_special_tokens = True
        return copy

    def encode(self, text: str, add_special: bool, parse_special: bool) -> list[int]:
        backend = self._backend if parse_special else self._without_special
        return backend.encode(text, add_special_tokens=add_special).ids

    def decode(self, ids: list[int], skip_special: bool) -> str:
        return self._backend.decode(ids, skip_special_tokens=skip_special)


class _ObjectCodec:
    """An object with the methods of a Hugging Face tokenizer."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        # taking spaces out before punctuation makes the text of an id depend on what follows
        cleans = hasattr(tokenizer, "clean_up_tokenization_spaces")
        self._exactly = {"clean_up_tokenization_spaces": False} if cleans else {}

    def encode(self, text: str, add_special: bool, parse_special: bool) -> list[int]:
        split = {} if parse_special else {"split_special_tokens": True}
        return list(self._tokenizer.encode(text, add_special_tokens=add_special, **split))

    def decode(self, ids: list[int], skip_special: bool) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special, **self._exactly)

    def chat(
        self, messages: list[dict[str, Any]], variables: dict[str, Any], name: Any, origin: str
    ) -> str:
        apply = getattr(self._tokenizer, "apply_chat_template", None)
        if apply is None:
            raise TokenizerError(
                f"{origin}: has no method apply_chat_template; pass the prompt as text"
            )
        chosen = {} if name is None else {"chat_template": name}
        try:
            return apply(messages, tokenize=False, **chosen, **variables)
        # whatever a template may raise
        except Exception as e:
            raise TokenizerError(f"{origin}: apply_chat_template: {e}") from e


def _vocabulary(ids: Mapping[str, int]) -> dict[str, Any]:
    """The fields of `Tokenizer` that follow from its vocabulary."""
    byte_tokens = [ids.get(f"<0x{byte:02X}>") for byte in range(256)]
    # all or nothing: one such name alone is a word like any other
    fallback = () if None in byte_tokens else byte_tokens
    return dict(vocab_size=max(ids.values(), default=-1) + 1, byte_fallback_ids=frozenset(fallback))


def _read_backend(file: Path) -> tokenizers.Tokenizer:
    if not file.is_file():
        raise TokenizerError(f"{file}: no such file; a tokenizer's directory has one")
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    # the package raises no narrower class
    except Exception as e:
        raise TokenizerError(f"{file}: cannot be read as a tokenizer: {e}") from e
    # a file may carry the settings of its training
    backend.no_truncation()
    backend.no_padding()
    return backend


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


def _token_texts(fields: Mapping[str, Any]) -> dict[str, str]:
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
        if not (key.isdecimal() and isinstance(token, dict) and "content" in token):
            raise TokenizerError(f"{file}: added_tokens_decoder: {key!r}: {token!r} is no token")
        in_backend = backend.id_to_token(int(key))
        if in_backend != token["content"]:
            raise TokenizerError(
                f"{file}: added_tokens_decoder: id {key} is {token['content']!r}, but "
                f"{in_backend!r} in tokenizer.json"
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
