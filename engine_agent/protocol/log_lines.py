"""The log format of all processes: plain text, or JSON with the ids that find the lines of one request everywhere. A
record is one line of bounded length, whatever clients send: control characters, line separators and marks that change
the direction of text are escaped, so that a path or message cannot imitate another line. Errors that were answered with
a status below 500 have no traceback."""

import json
import logging
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

VARIABLE = "SWITCHYARD_LOG_FORMAT"
CARRIED = ("request_id", "trace_id", "task", "node", "cell")
"""Names that code may pass as `extra`, in addition to those of the context."""


MESSAGE_CHARS, TRACEBACK_CHARS = 4_000, 12_000

_ESCAPES = {
    **{code: f"\\u{code:04x}" for code in (*range(0x20), *range(0x7F, 0xA0), *range(0xD800, 0xE000))},
    **{code: f"\\u{code:04x}" for code in (0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A))},
    **{ord(character): escape for character, escape in (("\n", r"\n"), ("\r", r"\r"), ("\t", r"\t"))},
}
"""All of them are valid within a JSON string."""


class LogFormat(StrEnum):
    LINE = "line"
    JSON = "json"


def log_format(environment: Mapping[str, str]) -> LogFormat:
    """The format that the environment selects. Raises ValueError for an unknown format; the text lists the formats."""
    text = environment.get(VARIABLE) or LogFormat.LINE
    try:
        return LogFormat(text)
    except ValueError:
        raise ValueError(f"{VARIABLE} is {text!r}; it must be one of {', '.join(LogFormat)}") from None


class PlainLines(logging.Formatter):
    """One line of text per record, including its traceback."""

    def format(self, record: logging.LogRecord) -> str:
        record.message = shortened(record.getMessage(), MESSAGE_CHARS)
        if self.usesTime():
            record.asctime = self.formatTime(record, self.datefmt)
        lines = [self.formatMessage(record), _traceback(self, record)]
        return "\n".join(filter(None, lines)).translate(_ESCAPES)


class JsonLines(logging.Formatter):
    """One JSON object per line: `at` (UTC), `level`, `logger`, `message`, `service`, and the fields of `context`."""

    def __init__(self, service: str = "", context: Callable[[], Mapping[str, str]] = dict) -> None:
        super().__init__()
        self._service = service
        self._context = context

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": shortened(record.getMessage(), MESSAGE_CHARS),
            **({"service": self._service} if self._service else {}),
            **{name: value for name, value in self._context().items() if value},
            **{name: getattr(record, name) for name in CARRIED if getattr(record, name, "")},
        }
        if traceback := _traceback(self, record):
            line["exception"] = traceback
        return json.dumps(line, ensure_ascii=False, default=str).translate(_ESCAPES)


def shortened(text: str, most: int) -> str:
    """A text longer than `most` characters, without its middle."""
    if len(text) <= most:
        return text
    cut = len(text) - most
    return f"{text[: most // 2]} [{cut} characters cut] {text[-(most - most // 2) :]}"


def _traceback(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    """Django adds `status_code` to the record of an answered request."""
    if not record.exc_info or getattr(record, "status_code", 500) < 500:
        return ""
    return shortened(formatter.formatException(record.exc_info), TRACEBACK_CHARS)


def configure_logging(environment: Mapping[str, str], service: str) -> None:
    """Sends lines of INFO and above to standard error, in the format that the environment selects. Raises ValueError as
    for `log_format`."""
    handler = logging.StreamHandler()
    if log_format(environment) is LogFormat.JSON:
        handler.setFormatter(JsonLines(service))
    else:
        handler.setFormatter(PlainLines("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
