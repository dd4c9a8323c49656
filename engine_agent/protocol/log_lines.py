"""One form of log lines for all processes: plain text, or JSON with the numbers by which lines of one request are found
in all of them. Pure but for the clock of the record; it opens nothing."""

import json
import logging
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

VARIABLE = "SWITCHYARD_LOG_FORMAT"
CARRIED = ("request_id", "trace_id", "task", "node", "cell")
"""What code may give with a line as `extra`, beside what the context says."""


class LogFormat(StrEnum):
    """How lines are written."""

    LINE = "line"
    JSON = "json"


def log_format(environment: Mapping[str, str]) -> LogFormat:
    """What the environment asks for.

    Raises:
        ValueError: something else; the text says what there is.
    """
    text = environment.get(VARIABLE) or LogFormat.LINE
    try:
        return LogFormat(text)
    except ValueError:
        raise ValueError(f"{VARIABLE} is {text!r}; it must be one of {', '.join(LogFormat)}") from None


class JsonLines(logging.Formatter):
    """One JSON object a line: `at` (UTC), `level`, `logger`, `message`, `service`, and what `context` adds."""

    def __init__(self, service: str = "", context: Callable[[], Mapping[str, str]] = dict) -> None:
        super().__init__()
        self._service = service
        self._context = context

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **({"service": self._service} if self._service else {}),
            **{name: value for name, value in self._context().items() if value},
            **{name: getattr(record, name) for name in CARRIED if getattr(record, name, "")},
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def configure_logging(environment: Mapping[str, str], service: str) -> None:
    """Send lines of INFO and above to standard error, in the form that the environment asks for.

    Raises:
        ValueError: see `log_format`.
    """
    handler = logging.StreamHandler()
    if log_format(environment) is LogFormat.JSON:
        handler.setFormatter(JsonLines(service))
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
