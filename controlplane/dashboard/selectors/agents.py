"""Releases of the agent for the page of nodes: who runs which, and how far the newest upgrade is."""

from dataclasses import dataclass
from datetime import datetime

from fleet.models import AgentMove, AgentRelease, AgentRollout
from fleet.selectors.agents import agents_by_release

RELEASES_SHOWN = 10
NAMES_SHOWN = 12
UNKNOWN = ""


@dataclass(frozen=True, slots=True)
class ReleaseRow:
    """A release, and how many agents run it. `names`: the first of them, `more`: how many others."""

    release: AgentRelease
    count: int
    names: tuple[str, ...]
    more: int


@dataclass(frozen=True, slots=True)
class RingRow:
    """One ring of the upgrade: who is in it, and how many of them are well with the new release."""

    number: int
    moves: tuple[AgentMove, ...]
    settled: int
    is_moving: bool


@dataclass(frozen=True, slots=True)
class AgentList:
    """`behind`: agents that run another release than the current one; `strange`: those of no release or an unknown
    one, with what they run."""

    rows: tuple[ReleaseRow, ...]
    behind: int
    strange: tuple[tuple[str, tuple[str, ...]], ...]
    rollout: AgentRollout | None
    rings: tuple[RingRow, ...]
    others: tuple[AgentRelease, ...]
    """To which agents can go."""


def agent_list(*, now: datetime) -> AgentList:
    """Releases with who runs them, the current one first, and the newest upgrade."""
    running = agents_by_release(now)
    known = sorted(AgentRelease.objects.all(), key=lambda row: not row.is_current)
    shown = [row for row in known if row.is_current or row.id in running or not running][:RELEASES_SHOWN]
    current = next((row.id for row in known if row.is_current), UNKNOWN)
    ids = {row.id for row in known}
    rollout = AgentRollout.objects.select_related("source", "target").first()
    return AgentList(
        rows=tuple(_row(row, running.get(row.id, [])) for row in shown),
        behind=sum(len(names) for release, names in running.items() if release != current),
        strange=tuple(
            (release, tuple(names[:NAMES_SHOWN])) for release, names in running.items() if release not in ids
        ),
        rollout=rollout,
        rings=_rings(rollout) if rollout is not None else (),
        others=tuple(known),
    )


def _row(release: AgentRelease, names: list[str]) -> ReleaseRow:
    return ReleaseRow(release, len(names), tuple(names[:NAMES_SHOWN]), max(0, len(names) - NAMES_SHOWN))


def _rings(rollout: AgentRollout) -> tuple[RingRow, ...]:
    moves = list(rollout.moves.order_by("agent"))
    rings = []
    for number in range(rollout.rings):
        mine = tuple(move for move in moves if move.ring == number)
        settled = sum(move.settled_at is not None for move in mine)
        rings.append(RingRow(number + 1, mine, settled, rollout.is_active and rollout.ring == number))
    return tuple(rings)
