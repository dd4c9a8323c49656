"""Decides what share of all clients DNS brings to each region's entry. Pure.

Which region's entry a client reaches is one thing, which region serves its request another: the latter is the region
autopilot's, every 2 s, and nothing of it is looked at here. Only what no ingress can do moves clients: an entry that is
dead, a region that is evacuated for real, and shares that an operator planned.

The records by which Route 53 brings clients to regions, and the batch that puts new ones in the place of old ones.

Pure. A batch deletes each record exactly as it was read and creates all anew, the text with the revision among them: it
changes nothing at all if anything of it is not as it was, whoever changed it.

Decides which ingresses a load balancer sends connections to. Pure.

An ingress is registered once it reports a table, and taken out before it drains. One that falls silent stays: the load
balancer's own checks know better. Addresses are used again, so a target is known by its ingress, too.
"""

import hashlib
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any

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


TEXT_TTL_S = 10
RECORD_TYPE = "A"
"""An alias to a load balancer; it has a time to live of its own, 60 s."""
_TEXT = re.compile(r'"switchyard rev=([0-9]{1,15}) token=([0-9a-f]{32})"')

RecordSet = Mapping[str, Any]
"""As Route 53's API has it."""


@dataclass(frozen=True, slots=True)
class EntryTargetName:
    """A load balancer: its DNS name and the hosted zone in which that lies."""

    dns_name: str
    zone: str


@dataclass(frozen=True, slots=True)
class Standing:
    """What was read: the records of the entry's name, and the text with its revision, exactly."""

    records: tuple[RecordSet, ...] = ()
    text: RecordSet | None = None

    @property
    def value(self) -> str:
        values = (self.text or {}).get("ResourceRecords") or ()
        return " ".join(str(each["Value"]) for each in values)

    @property
    def weights(self) -> dict[str, int]:
        """Set identifier -> weight."""
        return {each["SetIdentifier"]: int(each["Weight"]) for each in self.records if "Weight" in each}

    @property
    def fingerprint(self) -> str:
        """The same for the same records, in any order."""
        whole = [sorted(json.dumps(_plain(each), sort_keys=True) for each in self.records), self.value]
        return hashlib.sha256(json.dumps(whole).encode()).hexdigest()[:16]


def text_name(name: str) -> str:
    """Where the revision of an entry's records stands."""
    return f"_switchyard.{name}"


def text_value(revision: int, token: str) -> str:
    """As the text states it. `token`: 32 hexadecimal digits, of this attempt alone."""
    return f'"switchyard rev={revision} token={token}"'


def token_of(value: str) -> str:
    """The token that a text states; "" if it is none of ours."""
    match = _TEXT.fullmatch(value)
    return match.group(2) if match else ""


def records_of(name: str, weights: Mapping[str, int], targets: Mapping[str, EntryTargetName]) -> tuple[RecordSet, ...]:
    """One weighted record for each region."""
    return tuple(
        {
            "Name": name,
            "Type": RECORD_TYPE,
            "SetIdentifier": region,
            "Weight": weight,
            "AliasTarget": {
                "HostedZoneId": targets[region].zone,
                "DNSName": targets[region].dns_name,
                "EvaluateTargetHealth": True,
            },
        }
        for region, weight in sorted(weights.items())
    )


def is_same(one: Iterable[RecordSet], other: Iterable[RecordSet]) -> bool:
    """Whether records say the same, however Route 53 spells names."""
    return _sorted(one) == _sorted(other)


def swap(
    name: str, standing: Standing, records: Sequence[RecordSet], revision: int, token: str
) -> list[dict[str, Any]]:
    """The changes of the batch. Deletions come first: a name may not be weighted and unweighted in between."""
    text = {
        "Name": text_name(name),
        "Type": "TXT",
        "TTL": TEXT_TTL_S,
        "ResourceRecords": [{"Value": text_value(revision, token)}],
    }
    old = [*([standing.text] if standing.text else []), *standing.records]
    return [
        *({"Action": "DELETE", "ResourceRecordSet": dict(each)} for each in old),
        {"Action": "CREATE", "ResourceRecordSet": text},
        *({"Action": "CREATE", "ResourceRecordSet": dict(each)} for each in records),
    ]


def _sorted(records: Iterable[RecordSet]) -> list[str]:
    return sorted(json.dumps(_plain(each), sort_keys=True) for each in records)


def _plain(record: RecordSet) -> dict[str, Any]:
    plain = {key: value for key, value in record.items() if value not in (None, [], "")}
    plain["Name"] = _spelt(str(record["Name"]))
    if "Weight" in plain:
        plain["Weight"] = int(plain["Weight"])
    if "AliasTarget" in plain:
        alias = dict(plain["AliasTarget"])
        alias["DNSName"] = _spelt(alias["DNSName"])
        alias["EvaluateTargetHealth"] = str(alias.get("EvaluateTargetHealth", "")).lower() == "true"
        plain["AliasTarget"] = alias
    return plain


def _spelt(name: str) -> str:
    return name.lower().rstrip(".")


@dataclass(frozen=True, slots=True)
class TargetIngress:
    """`ready`: it runs a table. `leaving`: it is to take nothing new."""

    id: str
    address: str
    port: int
    ready: bool = False
    leaving: bool = False


@dataclass(frozen=True, slots=True)
class Target:
    """What was registered for an ingress, in one group. `draining`: it was taken out, and may still have streams."""

    ingress: str
    group: str
    address: str
    port: int
    draining: bool = False


@dataclass(frozen=True, slots=True)
class TargetPlan:
    """`forget`: targets whose address is another ingress's by now, so that nothing is to be said about them."""

    register: tuple[Target, ...] = ()
    deregister: tuple[Target, ...] = ()
    forget: tuple[Target, ...] = ()


def plan_targets(groups: Collection[str], ingresses: Sequence[TargetIngress], targets: Sequence[Target]) -> TargetPlan:
    """What to say to the load balancer. The last target of a group that serves stays until another one does, unless its
    ingress is no more."""
    there = {(each.ingress, each.group): each for each in targets}
    by_id = {each.id: each for each in ingresses}
    register = tuple(
        Target(each.id, group, each.address, each.port)
        for group in sorted(groups)
        for each in ingresses
        if each.ready and not each.leaving and each.address and not _is_registered(there.get((each.id, group)), each)
    )
    claimed = {(each.group, each.address, each.port) for each in register} | {
        (each.group, each.address, each.port)
        for each in targets
        if not each.draining and _is_wanted(by_id.get(each.ingress), each)
    }
    deregister, forget = [], []
    for target in targets:
        ingress = by_id.get(target.ingress)
        if target.draining or _is_wanted(ingress, target):
            continue
        if (target.group, target.address, target.port) in claimed:
            forget.append(target)
        elif ingress is None or ingress.address != target.address or any(g == target.group for g, _, _ in claimed):
            deregister.append(target)
    return TargetPlan(register, tuple(deregister), tuple(forget))


def _is_registered(target: Target | None, ingress: TargetIngress) -> bool:
    """Also while it still drains under another address: first that one ends."""
    if target is None:
        return False
    return not target.draining or (target.address, target.port) != (ingress.address, ingress.port)


def _is_wanted(ingress: TargetIngress | None, target: Target) -> bool:
    if ingress is None or ingress.leaving:
        return False
    return (ingress.address, ingress.port) == (target.address, target.port)
