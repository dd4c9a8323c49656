"""Log files of a node's processes: kept short, quoted in reports, and sent to an operator who reads them, without
secrets. The processes append to their logs, so truncating a log loses no later line. The last lines are state: they are
sent again from time to time while a request for them is in force. Redaction recognizes formats, not meanings: a secret
in another format passes, so secrets do not belong in logs."""

import contextlib
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from time import monotonic, time

from engine_agent.protocol.messages import Assignment, Desired, LogTail

MAX_LOG_BYTES = 16 * 1024 * 1024
"""A longer log replaces the one earlier log that is kept: at most twice this per kind of process."""
TAIL_BYTES = 16 * 1024
"""How far back the last lines are read."""
MAX_LINE_CHARS = 500


def set_aside(path: Path) -> None:
    """Renames the log to the earlier log, so that its next writer starts a new one. Raises OSError if the disk
    failed."""
    with contextlib.suppress(FileNotFoundError):
        path.replace(_earlier(path))


def bound(path: Path, max_bytes: int = MAX_LOG_BYTES) -> bool:
    """Moves the content of the log to `<path>.1` if it is longer than `max_bytes`; returns whether it did. Raises
    OSError if the disk failed."""
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return False
    if size <= max_bytes:
        return False
    shutil.copyfile(path, _earlier(path))
    os.truncate(path, 0)
    return True


def last_lines(path: Path, count: int = 20) -> list[str]:
    """The last lines that are not empty, oldest first; none if there is no log."""
    try:
        with path.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - TAIL_BYTES))
            tail = log.read(TAIL_BYTES)
    except OSError:
        return []
    lines = [line.strip()[:MAX_LINE_CHARS] for line in tail.decode(errors="replace").splitlines()]
    return [line for line in lines if line][-count:]


def _earlier(path: Path) -> Path:
    return path.with_name(f"{path.name}.1")


LOGS = ("agent", "engine", "proxy")
MOST_LINES = 200
"""Of each log. At most 16 KiB of a log are read, so that three stay far below the limit of a frame."""
AGAIN_AFTER_S = 10.0
"""Unchanged lines are sent again at this interval, so that a reader can tell a quiet log from a lost agent."""
LONGEST_REQUEST_S = 120.0
"""Limits a longer request, or one under a wrong clock."""

REDACTED = "[taken out]"
SHORTEST_SECRET = 8
"""A shorter text identifies little and occurs in many harmless places."""

_NAMED = re.compile(
    r"""(?ix)
    (?P<name> [\w-]{0,64} (?: secret | password | passwd | token | api[_-]?key | access[_-]?key | credential )
    [\w-]{0,64}
        ["']? \s{0,8} [=:] \s{0,8} ["']?)
    (?P<value> (?!\d{1,9}\b) [^\s"',;&}]{4,})
    """
)
"""`password=…`, `"api_key": "…"`. Plain numbers are kept: `max_tokens=128` is not a secret."""
_FORMS = re.compile(
    r"""(?x)
    (?: sw_[0-9a-f]{4,}_[\w-]{8,} | sk-[\w-]{8,} | hf_[A-Za-z0-9]{8,} | gh[pousr]_[A-Za-z0-9]{16,}
      | (?:AKIA|ASIA)[A-Z0-9]{16} | eyJ[\w-]{8}[\w.-]* )
    """
)
"""Credentials of this fleet, keys of OpenAI, Hugging Face, GitHub and AWS, JSON web tokens."""
_HEADER = re.compile(r"(?i)(authorization[\"']?\s*[:=]\s*[\"']?(?:bearer|basic)\s+|\bbearer\s+)[\w.~+/=-]{4,}")
_USER_INFO = re.compile(r"(?i)(\b[a-z][a-z0-9+.-]{0,31}://)[^\s/@:]{0,256}:[^\s/@]{1,1024}@")


class LogTailSender:
    """Decides when lines are sent: only while requested, and unchanged lines only from time to time."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._until = 0.0
        self._sending_since_s = 0.0
        self._last_sent: LogTail | None = None
        self._sent_at_s = 0.0

    def due(self, order: Desired | None) -> LogTail | None:
        """The lines to send now, or None. `order` is the one in force."""
        now_s = monotonic()
        request = order.logs if order is not None else None
        if order is None or request is None or request.until <= time():
            self._last_sent = None
            return None
        if request.until != self._until:
            self._until, self._sending_since_s = request.until, now_s
        if now_s - self._sending_since_s > LONGEST_REQUEST_S:
            return None
        tail = log_tail(self._home, order.assignment, min(request.lines, MOST_LINES))
        if tail == self._last_sent and now_s - self._sent_at_s < AGAIN_AFTER_S:
            return None
        self._last_sent, self._sent_at_s = tail, now_s
        return tail


def log_tail(home: Path, assignment: Assignment | None, lines: int) -> LogTail:
    secrets = (assignment.secret,) if assignment is not None else ()
    tails = {name: last_lines(home / f"{name}.log", lines) for name in LOGS}
    return LogTail(
        cell=assignment.cell if assignment is not None else None,
        generation=assignment.generation if assignment is not None else 0,
        logs={
            name: tuple(_printable(redacted(line, secrets)) for line in tail) for name, tail in tails.items() if tail
        },
    )


def _printable(line: str) -> str:
    """Replaces control characters, which terminals obey and JSON lengthens, by dots."""
    return "".join(letter if letter.isprintable() else "." for letter in line)


def redacted(line: str, secrets: Iterable[str] = ()) -> str:
    """The line without credentials of known formats and without each of `secrets`."""
    for secret in secrets:
        if len(secret) >= SHORTEST_SECRET:
            line = line.replace(secret, REDACTED)
    line = _HEADER.sub(rf"\1{REDACTED}", line)
    line = _USER_INFO.sub(rf"\1{REDACTED}@", line)
    line = _FORMS.sub(REDACTED, line)
    return _NAMED.sub(rf"\g<name>{REDACTED}", line)
