"""Decides the life of a near-real-time request: how long it may take, what an answer to it means, when it is tried
again. Pure. A request ends once, in exactly one of four ways; until then it is tried again as long as that can help.
"""

import json
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

from kernel.tones import Tone


class AsyncState(StrEnum):
    """`sending`: a sender has it, until its lease ends."""

    QUEUED = "queued"
    SENDING = "sending"
    DONE = "done"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"


OPEN = frozenset({AsyncState.QUEUED, AsyncState.SENDING})
ENDED = frozenset(AsyncState) - OPEN
ASYNC_TONE: dict[AsyncState, Tone] = {
    AsyncState.QUEUED: Tone.IDLE,
    AsyncState.SENDING: Tone.MOVING,
    AsyncState.DONE: Tone.OK,
    AsyncState.FAILED: Tone.BAD,
    AsyncState.EXPIRED: Tone.WARN,
    AsyncState.CANCELLED: Tone.IDLE,
}


@dataclass(frozen=True, slots=True)
class AsyncSettings:
    """Every bound of near-real-time requests. Seconds unless the name says otherwise."""

    default_limit_s: float = 900.0
    """Near-real-time work has its SLO in minutes (docs/design/applications.md#serving-classes)."""
    longest_limit_s: float = 86_400.0
    kept_s: float = 86_400.0
    """How long an outcome can be fetched, from its end."""
    max_body_bytes: int = 1024 * 1024
    """Some 250,000 tokens of text."""
    max_answer_bytes: int = 4 * 1024 * 1024
    max_open_per_tenant: int = 1000
    max_sending_per_tenant: int = 16
    """By all senders together; a key's own limit of concurrency counts where it is lower."""
    max_sending: int = 64
    lease_s: float = 15.0
    """A sender that died is noticed after this; a living one renews three times meanwhile."""
    renew_every_s: float = 3.0
    poll_s: float = 0.25
    """How soon a sender sees what is new or was cancelled."""
    quiet_after_s: float = 60.0
    quiet_poll_s: float = 1.0
    """How soon a sender sees the first request, once there has been none for `quiet_after_s`."""
    first_retry_s: float = 0.5
    longest_retry_s: float = 30.0
    max_failures: int = 5
    """Attempts that an engine may have begun and not finished; a request that kills engines must not kill them all."""


@dataclass(frozen=True, slots=True)
class AttemptResponse:
    """What an attempt brought. `status` None: no answer; `sent` False: no engine can have begun it.

    `retry_after_s`: when to come back, by the one who answered. `reason`: why there is no answer.
    """

    status: int | None
    body: bytes = b""
    sent: bool = True
    retry_after_s: float | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What an attempt means. `state` QUEUED: try again at `due_at`; else it is how the request ends."""

    state: AsyncState
    reason: str = ""
    due_at: datetime | None = None
    counts: bool = False


UNSENT = frozenset({401, 408, 409, 425, 429, 503})
"""Nobody began it: a key that the ingress has not heard of yet, a time-out on the way in, too much at once."""
MOVED = 300


def judge(received: AttemptResponse, *, attempts: int, failures: int, deadline_at: datetime, now: datetime,
          settings: AsyncSettings) -> Verdict:  # fmt: skip
    """What an attempt means: the `attempts`th, after `failures` that counted."""
    if is_complete_answer(received):
        return Verdict(AsyncState.DONE)
    reason = received.reason or _said(received)
    if now >= deadline_at:
        return Verdict(AsyncState.EXPIRED, f"the deadline passed; the last attempt: {reason}")
    if received.status is not None and MOVED <= received.status < 500 and received.status not in UNSENT:
        return Verdict(AsyncState.FAILED, reason)
    counts = received.sent and received.status not in UNSENT
    if counts and failures + 1 >= settings.max_failures:
        return Verdict(AsyncState.FAILED, f"{failures + 1} attempts failed; the last: {reason}", counts=True)
    wait_s = max(retry_after_s(attempts, settings), min(received.retry_after_s or 0.0, settings.longest_retry_s))
    return Verdict(AsyncState.QUEUED, reason, now + timedelta(seconds=wait_s), counts)


def is_complete_answer(received: AttemptResponse) -> bool:
    """Whether this is an engine's whole answer. One that is cut short, or no JSON, is none."""
    if received.status is None or not 200 <= received.status < MOVED:
        return False
    try:
        return isinstance(json.loads(received.body), dict)
    except ValueError:
        return False


def retry_after_s(attempts: int, settings: AsyncSettings) -> float:
    """Seconds until the next attempt after so many."""
    return float(min(settings.first_retry_s * 2.0 ** min(attempts - 1, 20), settings.longest_retry_s))


def limit_of(asked_ms: str | None, settings: AsyncSettings) -> float:
    """Seconds that a request may take, of what its header says.

    Raises:
        ValueError: no whole number of milliseconds, or out of range; the text says what would be right.
    """
    if asked_ms is None:
        return settings.default_limit_s
    longest_ms = round(settings.longest_limit_s * 1000)
    if not asked_ms.isascii() or not asked_ms.isdecimal() or not 0 < int(asked_ms[:12]) <= longest_ms:
        raise ValueError(f"must be milliseconds from now, a whole number from 1 to {longest_ms}, not {asked_ms[:40]!r}")
    return int(asked_ms) / 1000


class Window:
    """How many requests for one model one region is asked to answer at once: one more for each that it answers, half as
    many when it says that it has too much (additive increase, multiplicative decrease; RFC 5681)."""

    FIRST = 8.0
    MOST = 64.0

    def __init__(self) -> None:
        self._size = self.FIRST
        self.sending = 0

    @property
    def is_full(self) -> bool:
        return self.sending >= int(self._size)

    def ended(self, received: AttemptResponse) -> None:
        """One of those that were sent has ended."""
        self.sending -= 1
        if received.status in {429, 503}:
            self._size = max(1.0, self._size / 2)
        elif received.status is not None and received.status < MOVED:
            self._size = min(self.MOST, self._size + 1 / self._size)


def _said(received: AttemptResponse) -> str:
    """What an error answer says, in short."""
    try:
        message = str(json.loads(received.body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = received.body[:200].decode("utf-8", "replace")
    return f"answered {received.status}" + (f": {message[:500]}" if message else "")
