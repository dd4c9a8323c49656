"""The last lines of a node's logs, for somebody who wants to read them now: bounded, and without secrets.

What is sent is state: the same lines are said again from time to time while they are wished for, and never after.
"""

from pathlib import Path
from time import monotonic, time

from engine_agent.protocol.messages import Assignment, Desired, LogTail
from engine_agent.runtime.logs import last_lines
from engine_agent.runtime.redaction import redacted

LOGS = ("agent", "engine", "proxy")
MOST_LINES = 200
"""Of each log. `runtime.logs` reads 16 KiB of one, so that three stay far below the limit of a frame."""
AGAIN_AFTER_S = 10.0
"""Unchanged lines are said again this often, so that a reader can tell silence from an end."""
LONGEST_REQUEST_S = 120.0
"""A wish for longer, or a clock that is wrong, does not make a node talk for ever."""


class LogTailSender:
    """Remembers what was said last to whom it matters: nothing is sent without a wish, and nothing twice at once."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._until = 0.0
        self._sending_since_s = 0.0
        self._last_sent: LogTail | None = None
        self._sent_at_s = 0.0

    def due(self, order: Desired | None) -> LogTail | None:
        """What to send now, if anything. `order` is the one in force."""
        now_s = monotonic()
        wish = order.logs if order is not None else None
        if order is None or wish is None or wish.until <= time():
            self._last_sent = None
            return None
        if wish.until != self._until:
            self._until, self._sending_since_s = wish.until, now_s
        if now_s - self._sending_since_s > LONGEST_REQUEST_S:
            return None
        tail = log_tail(self._home, order.assignment, min(wish.lines, MOST_LINES))
        if tail == self._last_sent and now_s - self._sent_at_s < AGAIN_AFTER_S:
            return None
        self._last_sent, self._sent_at_s = tail, now_s
        return tail


def log_tail(home: Path, assignment: Assignment | None, lines: int) -> LogTail:
    """The last lines of each log in a node's folder."""
    secrets = (assignment.secret,) if assignment is not None else ()
    found = {name: last_lines(home / f"{name}.log", lines) for name in LOGS}
    return LogTail(
        cell=assignment.cell if assignment is not None else None,
        generation=assignment.generation if assignment is not None else 0,
        logs={name: tuple(_plain(redacted(line, secrets)) for line in tail) for name, tail in found.items() if tail},
    )


def _plain(line: str) -> str:
    """Control characters, which a terminal would obey and JSON would make longer, as dots."""
    return "".join(letter if letter.isprintable() else "." for letter in line)
