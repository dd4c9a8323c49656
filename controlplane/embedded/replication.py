"""What a database of two hosts does: which one may start as the one that takes writes, whether commits wait for the
standby, and what a promotion would lose. Pure.

Two hosts have no majority, so no program may promote: it could not tell a host that burned from one that is cut off.
What programs do is keep the promise that a person needs to decide: while commits wait, both have all that was
acknowledged.
"""

from dataclasses import dataclass
from enum import StrEnum

CAUGHT_UP_BYTES = 16 * 1024 * 1024
"""One segment of the log: the rest arrives while the first commit waits for it."""
HOST_SILENT_S = 10.0
"""A standby whose launcher says nothing for so long is not waited for: it may be a copy that is only being made."""


class Role(StrEnum):
    """What a database is at the moment."""

    PRIMARY = "primary"
    STANDBY = "standby"


class Commits(StrEnum):
    """Whether the primary acknowledges only what the standby has, too."""

    SYNCHRONOUS = "synchronous"
    ASYNCHRONOUS = "asynchronous"


class Start(StrEnum):
    """What the launcher does with the database of its host."""

    START = "start"
    WAIT = "wait"
    FENCED = "fenced"


@dataclass(frozen=True, slots=True)
class Database:
    """A database that answers. `timeline`: of two primaries the one with the higher one was promoted later."""

    role: Role
    timeline: int = 0


@dataclass(frozen=True, slots=True)
class Standby:
    """The standby as its primary sees it. `silent_s`: since its host last said that it lives."""

    lag_bytes: int
    lag_s: float
    is_synchronous: bool
    silent_s: float


def may_start(
    *, is_standby: bool, other_joined: bool, other: Database | None, is_confirmed: bool, stood_down: bool = False
) -> Start:
    """Whether a database may start. A standby may always; one that took writes only if it is certain that the other one
    does not: the other says so, has never been able to, or a person does (`is_confirmed`). One that stopped so that the
    other may take over (`stood_down`) waits for no answer."""
    if is_standby or not other_joined:
        return Start.START
    if stood_down and not is_confirmed:
        return Start.FENCED
    if other is not None:
        return Start.START if other.role is Role.STANDBY else Start.FENCED
    return Start.START if is_confirmed else Start.WAIT


def must_stop(own: Database, other: Database | None) -> bool:
    """Whether this database took writes and was replaced: the other one does, too, and was promoted later."""
    both = other is not None and own.role is Role.PRIMARY and other.role is Role.PRIMARY
    return both and other is not None and other.timeline > own.timeline


def wanted_commits(now: Commits, standby: Standby | None, *, missing_s: float, alone_after_s: float | None) -> Commits:
    """Whether commits should wait for the standby. `missing_s`: for how long there has been none; `alone_after_s`:
    after how long the primary goes on alone, None for never."""
    if standby is not None and standby.silent_s <= HOST_SILENT_S and standby.lag_bytes <= CAUGHT_UP_BYTES:
        return Commits.SYNCHRONOUS
    if now is Commits.SYNCHRONOUS and (alone_after_s is None or missing_s <= alone_after_s):
        return Commits.SYNCHRONOUS
    return Commits.ASYNCHRONOUS


def why_promotion_may_lose(
    primary: str, commits: Commits | None, *, contact_s: float | None, alone_after_s: float | None
) -> str:
    """Why something that was acknowledged, or will be, may be missing here; "" if it is certain that nothing is: the
    primary waits for this host for ever, so that one which is only cut off acknowledges nothing.

    `commits`: as the primary last said it, to whom it was still in contact; `contact_s`: how long ago that was.
    """
    if commits is not Commits.SYNCHRONOUS:
        return f"{primary} did not wait for this host when it was last heard: its last writes may be missing here"
    if alone_after_s is None:
        return ""
    heard = (
        "it is not known when it was last heard" if contact_s is None else f"it was last heard {contact_s:.0f} s ago"
    )
    return (
        f"{primary} does not answer, and may only be cut off: power it off first. If it runs, it goes on alone after"
        f" {alone_after_s:.0f} s without this host, and what it acknowledges then is missing here ({heard})"
    )
