"""Decides which machines' power meters lie, from the readings that were refused of them. Pure.

A meter that restarts once is no liar: the driver under it was loaded anew. One of which reading after reading is
refused is. What was refused is in no sum, and the time is estimated; nothing else follows here.
"""

from collections.abc import Mapping
from dataclasses import dataclass

POWER_METER = "power-meter"
REFUSED_MOST = 2
"""So many may be wrong for once: a restart, and a device that is seen late after it."""
QUIET_MS = 600_000
"""Without a refusal for so long, a meter is believed again."""


@dataclass(frozen=True, slots=True)
class MeterLook:
    """One look at a node's meters. `refused`: readings that were not believed since the last look; `counted`: whether
    any was believed; `is_there`: whether it has a meter at all."""

    refused: int
    counted: bool
    is_there: bool = True


@dataclass(frozen=True, slots=True)
class Suspicion:
    """Readings of a node that were refused, one after another: from when to when, in milliseconds since 1970."""

    refused: int
    first_ms: int
    last_ms: int


@dataclass(frozen=True, slots=True)
class MeterPlan:
    """`suspicions`: what is remembered of nodes; `opened`: nodes whose meters lie, with the sentence of the incident;
    `closed`: nodes with why theirs is over."""

    suspicions: Mapping[str, Suspicion]
    opened: tuple[tuple[str, str], ...] = ()
    closed: tuple[tuple[str, str], ...] = ()


def plan_power_meters(
    looks: Mapping[str, MeterLook], before: Mapping[str, Suspicion], open_about: frozenset[str], now_ms: int
) -> MeterPlan:
    """What to remember, open and close. `looks`: of every node that there is. A node that says nothing new of its
    meter keeps its incident."""
    kept: dict[str, Suspicion] = {}
    closed: list[tuple[str, str]] = []
    for node in sorted(before.keys() | open_about | {name for name, look in looks.items() if look.refused}):
        look, was = looks.get(node), before.get(node)
        if look is None:
            over = "the node is no more"
        elif not look.is_there:
            over = "it reports no meter any more"
        else:
            now = _suspicion(look, was, now_ms)
            over = "" if now is not None and not _is_over(look, now, now_ms) else "its readings are believed again"
            if now is not None and not over:
                kept[node] = now
        if over and node in open_about:
            closed.append((node, over))
    opened = [
        (node, _sentence(node, one))
        for node, one in kept.items()
        if one.refused > REFUSED_MOST and node not in open_about
    ]
    return MeterPlan(kept, tuple(opened), tuple(closed))


def _suspicion(look: MeterLook, was: Suspicion | None, now_ms: int) -> Suspicion | None:
    if not look.refused:
        return was
    if was is None or now_ms - was.last_ms > QUIET_MS:
        return Suspicion(look.refused, now_ms, now_ms)
    return Suspicion(was.refused + look.refused, was.first_ms, now_ms)


def _is_over(look: MeterLook, one: Suspicion, now_ms: int) -> bool:
    return look.counted and now_ms - one.last_ms >= QUIET_MS


def _sentence(node: str, one: Suspicion) -> str:
    return (
        f"{one.refused} readings of {node}'s power meter were refused: its counter went back, stood still, or grew by"
        " more than the machine can draw; its energy is estimated meanwhile"
    )
