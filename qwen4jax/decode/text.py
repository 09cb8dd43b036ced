"""Text to token ids and back: a checkpoint's tokenizer, and text from a growing stream of ids.

Reads what a Hugging Face directory holds (`tokenizer.json` and the small files beside it) without
transformers or torch.
"""

import dataclasses
import functools
import operator
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import tokenizers

from qwen4jax.decode.chat import (
    ChatTemplate,
    Messages,
    TokenizerError,
    check_messages,
    plain_value,
)
from qwen4jax.decode.tokenizer_files import read_tokenizer_files, token_texts


class _TokenizersCodec:
    """A tokenizer of the `tokenizers` package, whose settings stay as they are."""

    def __init__(self, backend: tokenizers.Tokenizer):
        # saved with the settings of somebody's training, they would cut and pad prompts
        if backend.truncation or backend.padding:
            backend = tokenizers.Tokenizer.from_str(backend.to_str())
            backend.no_truncation()
            backend.no_padding()
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


@dataclasses.dataclass(frozen=True, eq=False)
class Tokenizer:
    """A tokenizer and the chat template that goes with it.

    Made by `load` or `from_object`. No call changes one that was loaded: threads may share it.
    (transformers' own objects change a setting where `parse_special` does.)

    Attributes:
        vocab_size: one more than the highest id. The model's table may have more rows (padding).
        eos_ids: ids that end generation, from `generation_config.json` where there is one. The
            n-gram hash resets at the model configuration's `eos_token_id`, which may differ.
        special_ids: ids that `skip_special` leaves out.
        special_tokens: text by role (`eos_token`, ...); chat templates read them.
        chat_template: None where the checkpoint has none, or where an object brings its own.
        known_ids: ids that have a text; all below `vocab_size`, but for vocabularies with gaps.
        byte_fallback_ids: ids of `<0x00>` to `<0xFF>` in vocabularies that have these.
        origin: the directory or the object's class, for messages.
    """

    codec: _TokenizersCodec | _ObjectCodec = dataclasses.field(repr=False)
    vocab_size: int
    eos_ids: tuple[int, ...]
    special_ids: frozenset[int] = dataclasses.field(repr=False)
    special_tokens: Mapping[str, str] = dataclasses.field(repr=False)
    chat_template: ChatTemplate | None = dataclasses.field(repr=False)
    known_ids: range | frozenset[int] = dataclasses.field(repr=False)
    byte_fallback_ids: frozenset[int] = dataclasses.field(repr=False)
    origin: str

    @classmethod
    def load(cls, directory: str | Path) -> "Tokenizer":
        """Reads the tokenizer of a Hugging Face checkpoint directory.

        `tokenizer.json` must be there. Read where they exist: `tokenizer_config.json`,
        `special_tokens_map.json`, `chat_template.jinja` (before the field `chat_template`),
        `additional_chat_templates/*.jinja`, `generation_config.json`.

        Raises:
            TokenizerError: a file is missing, broken, or contradicts another; names the file.
        """
        files = read_tokenizer_files(Path(directory))
        return cls(
            codec=_TokenizersCodec(files.backend),
            eos_ids=files.eos_ids,
            special_ids=files.special_ids,
            special_tokens=files.special_tokens,
            chat_template=files.chat_template,
            origin=str(directory),
            **_vocabulary(files.backend.get_vocab()),
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
            codec, added = _TokenizersCodec(tokenizer), tokenizer.get_added_tokens_decoder()
        else:
            codec, added = _ObjectCodec(tokenizer), getattr(tokenizer, "added_tokens_decoder", {})
        special_ids = {i for i, token in added.items() if token.special}
        special_ids |= set(getattr(tokenizer, "all_special_ids", ()))
        eos = getattr(tokenizer, "eos_token_id", None)
        return cls(
            codec=codec,
            eos_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
            special_ids=frozenset(special_ids),
            special_tokens=token_texts(getattr(tokenizer, "special_tokens_map", {})),
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

        Unknown ids (rows that pad the model's table) have no text, as in transformers.

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
            if token in self.known_ids and not (skip_special and token in self.special_ids):
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
                f"{self.origin}: has no chat template (a checkpoint keeps it in "
                "chat_template.jinja): pass the prompt as text, or load a directory that has one"
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

    # Ids kept when the window moves, which it does when it has twice as many. They must hold an
    # incomplete character whole: at most three bytes, each perhaps an id of its own. Where they
    # begin within a character, only the bytes of that one read differently.
    _CONTEXT = 8

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
        if ready >= 2 * self._CONTEXT:
            self._window = self._window[ready - self._CONTEXT :]
            context = self._decode(self._window[: self._CONTEXT])
            # both texts end alike: the same characters are held back
            self._sent = len(context) - (len(text) - len(certain))
        return delta

    def flush(self) -> str:
        """Ends the stream: returns what was held back. The next `feed` begins a new text."""
        rest = self._decode(self._window)[self._sent :] if self._window else ""
        self._window, self._sent, self._held = [], 0, 0
        return rest

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special=self._skip_special)


def _vocabulary(vocabulary: Mapping[str, int]) -> dict[str, Any]:
    """The fields of `Tokenizer` that follow from its vocabulary."""
    known = {i for token, i in vocabulary.items() if token}
    size = max(known, default=-1) + 1
    byte_tokens = [vocabulary.get(f"<0x{byte:02X}>") for byte in range(256)]
    # all or nothing: one such name alone is a word like any other
    fallback = () if None in byte_tokens else byte_tokens
    return dict(
        vocab_size=size,
        known_ids=range(size) if len(known) == size else frozenset(known),
        byte_fallback_ids=frozenset(fallback),
    )
