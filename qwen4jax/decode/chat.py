"""Chat messages to one prompt string, through the Jinja template of a checkpoint.

A template is somebody else's program: it runs in Jinja's immutable sandbox and sees plain JSON
values only, never an object with methods. Its environment follows Hugging Face's conventions, so
that a template written for `apply_chat_template` renders the same string here.
"""

import dataclasses
import datetime
import functools
import json
from collections.abc import Mapping
from typing import Any

import jinja2
import jinja2.ext
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

# Not Sequence[Mapping[str, Any]]: what is wrong with a message is said below, by index and field.
Messages = Any

_OTHER_MEDIA = {
    **dict.fromkeys(("image", "image_url", "input_image"), "images"),
    **dict.fromkeys(("video", "video_url", "input_video"), "videos"),
    **dict.fromkeys(("audio", "audio_url", "input_audio"), "audio"),
}


class TokenizerError(ValueError):
    """A tokenizer's files or its chat template cannot be used; the message names the file."""


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """The chat templates of one tokenizer.

    Attributes:
        sources: Jinja source by name; a tokenizer with one template calls it `default`.
        origin: where they come from, for messages.
    """

    sources: Mapping[str, str]
    origin: str

    def render(
        self, messages: list[dict[str, Any]], variables: Mapping[str, Any], name: str | None = None
    ) -> str:
        """The prompt for `messages` as `check_messages` returns them.

        Args:
            messages: the conversation.
            variables: what else the template may read.
            name: which template; by default `tool_use` where there are tools and such a template,
                else `default`.

        Raises:
            TokenizerError: there is no such template, it is no Jinja template, it does what the
                sandbox forbids, or it refuses these messages.
        """
        values = {"tools": None, "documents": None, **variables}
        name = self._chosen(name, bool(values["tools"]))
        where = self.origin if len(self.sources) == 1 else f"{self.origin}, template {name!r}"
        try:
            return _compiled(self.sources[name]).render(messages=messages, **values)
        except jinja2.TemplateSyntaxError as e:
            raise TokenizerError(f"{where}: line {e.lineno}: {e.message}") from e
        # a template is a program, and any of its expressions may fail in any way
        except Exception as e:
            raise TokenizerError(
                f"{where}: cannot be rendered for these messages: {type(e).__name__}: {e}"
            ) from e

    def _chosen(self, name: str | None, tools: bool) -> str:
        if name is None:
            name = "tool_use" if tools and "tool_use" in self.sources else "default"
        if name not in self.sources:
            raise TokenizerError(
                f"{self.origin}: no chat template is called {name!r}; "
                f"pass template= one of {', '.join(sorted(self.sources))}"
            )
        return name


def template_sources(field: Any, where: str) -> dict[str, str]:
    """Templates by name from a `chat_template` field: a string, or a list of {name, template}."""
    if isinstance(field, str):
        return {"default": field}
    if isinstance(field, list) and all(
        isinstance(entry, dict)
        and isinstance(entry.get("name"), str)
        and isinstance(entry.get("template"), str)
        for entry in field
    ):
        return {entry["name"]: entry["template"] for entry in field}
    raise TokenizerError(
        f"{where}: chat_template: neither a string nor a list of objects with name and template"
    )


def check_messages(messages: Messages) -> list[dict[str, Any]]:
    """Messages as a template gets them: plain copies in which `content` is one string.

    Fields that are None are left out, as Hugging Face does: a template tests for a missing field.
    A `content` of text parts is joined, so that a template for plain strings serves it too.

    Args:
        messages: a sequence of mappings with `role` and `content`: a string or a list of
            `{"type": "text", "text": ...}`. Only a message with `tool_calls` may lack `content`.

    Raises:
        TypeError, ValueError: a message is malformed or carries what this text model cannot read;
            the message names its index and field.
    """
    if not isinstance(messages, (list, tuple)):
        raise TypeError(f"messages: a list of messages is expected, not {type(messages).__name__}")
    if not messages:
        raise ValueError("messages: the list is empty")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise TypeError(
            f"{where}: a mapping with role and content is expected, not {type(message).__name__}"
        )
    fields = {name: value for name, value in message.items() if value is not None}
    if "role" not in fields:
        raise ValueError(f"{where}.role: is missing")
    if not isinstance(fields["role"], str):
        raise TypeError(f"{where}.role: {fields['role']!r} is not a string")
    if "content" in fields:
        fields["content"] = _text(fields["content"], f"{where}.content")
    elif not fields.get("tool_calls"):
        raise ValueError(f"{where}.content: is missing, and there are no tool_calls")
    return plain_value(fields, where)


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, (list, tuple)):
        raise TypeError(
            f"{where}: a string or a list of text parts is expected, not {type(content).__name__}"
        )
    return "".join(_part(part, f"{where}[{index}]") for index, part in enumerate(content))


def _part(part: Any, where: str) -> str:
    if not isinstance(part, Mapping):
        raise TypeError(f'{where}: {{"type": "text", "text": ...}} is expected, not {part!r}')
    kind = part.get("type")
    # a part may name its medium by type or, as some templates allow, by its field alone
    for medium in (kind, *part):
        if isinstance(medium, str) and medium in _OTHER_MEDIA:
            raise ValueError(f"{where}: {_OTHER_MEDIA[medium]} are not supported, only text")
    if kind != "text":
        raise ValueError(f"{where}.type: {kind!r} is not 'text'")
    if not isinstance(part.get("text"), str):
        raise TypeError(f"{where}.text: {part.get('text')!r} is not a string")
    return part["text"]


def plain_value(value: Any, where: str) -> Any:
    """A copy of `value` in plain JSON types; the sandbox cannot judge the methods of others.

    Raises:
        TypeError: something in it is no JSON value; the message says where.
    """
    if value is None or isinstance(value, bool):
        return value
    # of a subclass (an enum's member, a NumPy float) only the value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        wrong = next((key for key in value if not isinstance(key, str)), None)
        if wrong is not None:
            raise TypeError(f"{where}: the key {wrong!r} is not a string")
        return {
            str.__str__(key): plain_value(item, f"{where}.{key}") for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [plain_value(item, f"{where}[{index}]") for index, item in enumerate(value)]
    raise TypeError(
        f"{where}: a template gets JSON values only (of a function its schema), "
        f"not {type(value).__name__}"
    )


class _Generation(jinja2.ext.Extension):
    """`{% generation %}`, which marks what an assistant wrote; in a prompt it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 - Jinja declares it as an instance's attribute

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Sandbox(ImmutableSandboxedEnvironment):
    def unsafe_undefined(self, obj: Any, attribute: str) -> jinja2.Undefined:
        # Jinja's own answer is an undefined value, which prints as nothing
        raise SecurityError(
            f"access to attribute {attribute!r} of {type(obj).__name__!r} is unsafe"
        )


@functools.lru_cache(maxsize=32)
def _compiled(source: str) -> jinja2.Template:
    return _environment().from_string(source)


@functools.cache
def _environment() -> _Sandbox:
    environment = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
