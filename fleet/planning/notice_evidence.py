"""What several sources said of one kind of announcement about one machine: when it counts, until when, and when it is
over. Pure.

The same thing is heard several times, late and out of order. The first word counts at once, the others confirm it. A
machine speaks of itself alone and may be somebody else's by now: what it says ends nothing that the cloud said.
"""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

import msgspec

from fleet.planning.states import NoticeSource

LISTED = frozenset({NoticeSource.STATUS, NoticeSource.BLOCK})
"""Whose answers are lists of all there is: what they say now goes before what was announced of it once."""
NODE_SPEAKS_EVERY = timedelta(seconds=60)
"""A machine is heard at once, and whatever else it says of the same so much later."""
LATEST = timedelta(days=60)


class Said(msgspec.Struct, frozen=True):
    """`key`: the same as long as the same is said. `over`: it was taken back."""

    key: str
    at: datetime
    ends_at: datetime | None = None
    over: bool = False


Evidence = Mapping[NoticeSource, Said]
"""The last word of each source."""


def heard(evidence: Evidence, source: NoticeSource, said: Said) -> Evidence | None:
    """With one word more; None: it is known, or older than what that source said since."""
    return None if _is_known(evidence.get(source), said) else {**evidence, source: said}


def _is_known(before: Said | None, said: Said) -> bool:
    if before is None:
        return said.over
    if said.at < before.at:
        return True
    if before.over:
        return said.over or said.at == before.at
    return not said.over and said.key == before.key


def stands(evidence: Evidence) -> bool:
    """Whether it is still to be acted upon: a list that had it has it no more, or everybody took it back."""
    listed = [said for source, said in evidence.items() if source in LISTED]
    return not all(said.over for said in listed or evidence.values())


def end_of(evidence: Evidence) -> datetime | None:
    """The earliest end that somebody stands by; None: nobody names one."""
    counts = {source: said for source, said in evidence.items() if not said.over}
    if LISTED & counts.keys():
        counts.pop(NoticeSource.EVENTS, None)
    return min((said.ends_at for said in counts.values() if said.ends_at is not None), default=None)


def bounded_end(seconds: float | None, now: datetime) -> datetime | None:
    """The end that a machine named, in seconds since 1970: never in the past, and in no time that nobody plans for."""
    if seconds is None:
        return None
    ahead_s = seconds - now.timestamp()
    if 0.0 <= ahead_s <= LATEST.total_seconds():
        return datetime.fromtimestamp(seconds, UTC)
    return now if ahead_s < 0.0 else now + LATEST
