"""Structured logs: one line per event with its fields, as JSON or for the eye."""

import datetime
import json
import logging
import sys
from typing import Any

log = logging.getLogger("qwen4jax.serve")


def event(name: str, *, level: int = logging.INFO, trace: bool = False, **fields: Any) -> None:
    """Logs an event.

    Args:
        name: what happened, in a few words.
        level: of the line.
        trace: whether to add the traceback of the exception in flight.
        **fields: what belongs to it (`request_id`, `code`, `seconds`); JSON values.
    """
    log.log(level, name, extra={"fields": fields}, exc_info=trace)


def set_up(level: str, form: str | None) -> None:
    """Sends the package's log to standard error.

    Args:
        level: least level of a line.
        form: `json`, `text`, or None: text on a terminal.
    """
    if form is None:
        form = "text" if sys.stderr.isatty() else "json"
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if form == "json" else _Text())
    root = logging.getLogger("qwen4jax")
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    root.propagate = False


def _time_of(record: logging.LogRecord) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(record.created, datetime.UTC)


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _time_of(record).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class _Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = getattr(record, "fields", {})
        parts = [f"{_time_of(record):%H:%M:%S}", record.getMessage()]
        parts += [f"{name}={value}" for name, value in fields.items()]
        if record.exc_info:
            parts.append("\n" + self.formatException(record.exc_info))
        return " ".join(parts)
