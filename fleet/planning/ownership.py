"""Whether this control plane holds its clouds, by an object in the install's bucket that only one can go on
writing. Pure.

A copied database has the same names and the same tags. What it cannot have is the object's next version: each writes it
only if it is still the one that it wrote itself. Who finds another's version there changes nothing in the clouds until
a person says that it is the one.
"""

from datetime import datetime, timedelta
from enum import StrEnum

STALE_AFTER = timedelta(minutes=15)
"""Without a beat for so long nothing is changed: somebody else may have taken over meanwhile."""


class Verdict(StrEnum):
    """`again`: nothing is known, ask again."""

    OWNER = "owner"
    LOST = "lost"
    AGAIN = "again"


def judge_beat(*, was_written: bool | None, nonce_there: str | None, nonce_tried: str) -> Verdict:
    """What an attempt to write the object shows. `was_written`: None if its answer was lost. `nonce_there`: what the
    object has in it, read after it was not written; None: it could not be read. `nonce_tried`: what was to be written,
    and was noted before, so that a write whose answer was lost is known again."""
    if was_written:
        return Verdict.OWNER
    if was_written is None or nonce_there is None:
        return Verdict.AGAIN
    return Verdict.OWNER if nonce_there == nonce_tried else Verdict.LOST


def stale_reason(beat_at: datetime | None, now: datetime) -> str:
    """Why nothing may be changed although nobody else is known to hold the clouds; "" if it may. An install without a
    bucket never beats, and is trusted."""
    if beat_at is None or now - beat_at <= STALE_AFTER:
        return ""
    return f"its object in the bucket was last written at {beat_at:%Y-%m-%d %H:%M} UTC"
