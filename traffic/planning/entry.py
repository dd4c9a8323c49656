"""Decides what share of all clients DNS brings to each region's entry. Pure.

Which region's entry a client reaches is one thing, which region serves its request another: the latter is the region
autopilot's, every 2 s, and nothing of it is looked at here. Only what no ingress can do moves clients: an entry that is
dead, a region that is evacuated for real, and shares that an operator planned.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from kernel.ages import age_text

WHOLE = 255
"""Weights sum to it: the greatest of a Route 53 record."""

Weights = Mapping[str, int]
"""Region -> weight; those with 0 get nobody."""


class RevisionState(StrEnum):
    """Of one attempt to publish weights. `SENDING`: whether it was carried out is not known. `PENDING`: it was, and not
    every server has it. `LOST`: something else stands there, or it was refused."""

    SENDING = "sending"
    PENDING = "pending"
    IN_FORCE = "in_force"
    REPLACED = "replaced"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class EntrySettings:
    """`pause_s`, `least_points`: between two changes that nobody is in a hurry for, and how large one must be, in
    points of the clients: resolvers keep an answer for up to a minute, so finer steps are only noise.

    `dead_after_s`: without a word of any of its ingresses, or with none that runs a table. `alive_after_s`: how long it
    must then have been well. `together_s`: entries that die within it die rather in our view than in the world.
    `pending_limit_s`: usually 60 s; a change that takes longer keeps nobody in a hurry waiting.
    """

    pause_s: float = 60.0
    least_points: float = 5.0
    dead_after_s: float = 30.0
    alive_after_s: float = 60.0
    together_s: float = 60.0
    pending_limit_s: float = 120.0


@dataclass(frozen=True, slots=True)
class EntryRegion:
    """A region with an entry. `share`: of all clients, as planned; shares need not sum to 1. One of `alive_since` and
    `dead_since` is set: since when at least one of its ingresses answers, or none does. `moved`: its entry has another
    address than was published."""

    name: str
    share: float
    alive_since: datetime | None = None
    dead_since: datetime | None = None
    evacuated: bool = False
    moved: bool = False


@dataclass(frozen=True, slots=True)
class EntryView:
    """`weights`: as published last, with `revision`, 0 before the first; `numbered`: the greatest number that any
    attempt had. `pending_since`: not every server has them yet. `foreign`: what stands there instead is not of this
    control plane; "" while it is."""

    regions: tuple[EntryRegion, ...]
    weights: Weights
    revision: int
    numbered: int = 0
    changed_at: datetime | None = None
    pending_since: datetime | None = None
    foreign: str = ""


@dataclass(frozen=True, slots=True)
class PublishEntry:
    """Put these weights in place of revision `seen`, as `revision`."""

    weights: Weights
    seen: int
    revision: int
    reason: str


@dataclass(frozen=True, slots=True)
class HoldEntry:
    """Leave what is there, though it is not what is wanted. `needs_person`: until somebody does something. `passing`:
    nothing could be learned this time."""

    reason: str
    needs_person: bool = False
    passing: bool = False


def plan_entry(view: EntryView, settings: EntrySettings, now: datetime) -> PublishEntry | HoldEntry | None:
    """What to do about the entry of all clients; None: it is as wanted."""
    if not view.regions:
        return None
    if view.foreign:
        return HoldEntry(view.foreign, needs_person=True)
    dead = _dead(view, settings, now)
    if isinstance(dead, HoldEntry):
        return dead
    wanted = weights_of(_shares(view, dead))
    if wanted == view.weights and not any(region.moved for region in view.regions):
        return None
    reason = _reason(view, dead, wanted)
    urgent = any(
        view.weights.get(region.name, 0) and not wanted[region.name] and (region.evacuated or region.name in dead)
        for region in view.regions
    )
    held = "" if not view.revision else _held(view, wanted, urgent, settings, now)
    if held:
        return HoldEntry(f"{reason}; {held}")
    return PublishEntry(wanted, view.revision, max(view.revision, view.numbered) + 1, reason)


def weights_of(shares: Mapping[str, float]) -> dict[str, int]:
    """Whole weights that sum to 255, by largest remainder: the greater share never has the lesser weight.

    Raises:
        ValueError: there is nobody to give them to. To Route 53 all zero means all alike.
    """
    total = sum(shares.values())
    if total <= 0:
        raise ValueError("no region is left to send clients to")
    exact = {name: WHOLE * share / total for name, share in shares.items()}
    weights = {name: int(value) for name, value in exact.items()}
    # Of remainders that are equal once rounded, the greater share's comes first.
    by_remainder = sorted(exact, key=lambda name: (weights[name] - exact[name], -shares[name], name))
    for name in by_remainder[: WHOLE - sum(weights.values())]:
        weights[name] += 1
    return weights


def _dead(view: EntryView, settings: EntrySettings, now: datetime) -> frozenset[str] | HoldEntry:
    """Regions whose entries count as dead; or why that is not believed."""
    dead = {region.name for region in view.regions if _is_dead(region, view, settings, now)}
    if len(dead) == len(view.regions):  # better one that has only just come back than nobody
        dead = {region.name for region in view.regions if region.alive_since is None}
    if len(dead) == len(view.regions):
        return HoldEntry("no region's entry answers: rather nothing is seen than nothing is there")
    died = [
        region.dead_since
        for region in view.regions
        if region.name in dead and region.dead_since is not None and _is_in_use(view, region.name)
    ]
    if len(died) > 1 and (now - max(died)).total_seconds() < settings.dead_after_s + settings.together_s:
        names = ", ".join(sorted(name for name in dead if _is_in_use(view, name)))
        return HoldEntry(f"the entries of {names} fell silent together: waiting for a minute whether that is so")
    return frozenset(dead)


def _is_in_use(view: EntryView, name: str) -> bool:
    return not view.revision or view.weights.get(name, 0) > 0


def _is_dead(region: EntryRegion, view: EntryView, settings: EntrySettings, now: datetime) -> bool:
    """By the clock of what it was: one in use is dead after a while, one out of use is alive after a while."""
    if region.dead_since is not None:
        is_new = view.revision > 0 and not view.weights.get(region.name, 0)
        return is_new or (now - region.dead_since).total_seconds() >= settings.dead_after_s
    if region.alive_since is None:
        return True
    comes_back = view.revision > 0 and not view.weights.get(region.name, 0)
    return comes_back and (now - region.alive_since).total_seconds() < settings.alive_after_s


def _shares(view: EntryView, dead: frozenset[str]) -> dict[str, float]:
    """What each is to get: of those that live nobody evacuated; if all are, all that live; all alike if none of them
    was planned to get any."""
    live = [region for region in view.regions if region.name not in dead]
    serving = [region for region in live if not region.evacuated] or live
    planned = {region.name: region.share for region in serving}
    if not any(planned.values()):
        planned = dict.fromkeys(planned, 1.0)
    return {region.name: planned.get(region.name, 0.0) for region in view.regions}


def _held(view: EntryView, wanted: Weights, urgent: bool, settings: EntrySettings, now: datetime) -> str:
    """Why now is not the time; "" if it is."""
    pending_s = (now - view.pending_since).total_seconds() if view.pending_since else None
    if pending_s is not None and (not urgent or pending_s < settings.pending_limit_s):
        return f"revision {view.revision} is not yet known to all servers"
    if urgent:
        return ""
    since_s = (now - view.changed_at).total_seconds() if view.changed_at else settings.pause_s
    if since_s < settings.pause_s:
        return f"the last change was {age_text(since_s)} ago, and {settings.pause_s:.0f} s lie between two"
    points = max(100 * abs(weight - view.weights.get(name, 0)) / WHOLE for name, weight in wanted.items())
    is_same = wanted.keys() == view.weights.keys() and not any(region.moved for region in view.regions)
    if points < settings.least_points and is_same:
        return f"{points:.1f} points are too few for a change: from {settings.least_points:g} on"
    return ""


def _reason(view: EntryView, dead: frozenset[str], wanted: Weights) -> str:
    if not view.revision:
        return "the first weights"
    why = [f"the entry of {region.name} is dead" for region in view.regions if region.name in dead]
    why += [f"{region.name} is evacuated" for region in view.regions if region.evacuated and region.name not in dead]
    why += [f"{name} has no entry any more" for name in sorted(view.weights) if name not in wanted]
    back = [name for name, weight in sorted(wanted.items()) if weight and not view.weights.get(name, 0)]
    why += [f"{name} gets clients" for name in back]
    why += [f"the entry of {region.name} moved" for region in view.regions if region.moved]
    return "; ".join(why) or "shares as planned"
