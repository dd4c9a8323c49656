"""Decides each region's share of clients in DNS, the Route 53 records of it, and the load balancer targets of
ingresses. Pure.

The entry decides which region a client reaches; the region autopilot decides every 2 s which region serves its
requests. Only what ingresses cannot handle moves clients: a dead entry, a region that is evacuated for real, and
operators' planned shares.

A Route 53 batch deletes each record exactly as read, including the text record with the revision, and creates all anew,
so it fails as a whole if any record has changed.

An ingress is registered once it reports a table, and deregistered before it drains. A silent ingress stays, since the
load balancer's health checks know better. Addresses are reused, so a target is identified by its ingress as well."""

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
"""Sum of the weights: the maximum of a Route 53 record."""

Weights = Mapping[str, int]
"""Region -> weight; regions with 0 get no clients."""


class RevisionState(StrEnum):
    """State of an attempt to publish. `SENDING`: its outcome is unknown. `PENDING`: accepted, but not on every server
    yet. `LOST`: refused, or replaced by others."""

    SENDING = "sending"
    PENDING = "pending"
    IN_FORCE = "in_force"
    REPLACED = "replaced"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class EntrySettings:
    """`pause_s` and `least_points` (points of the clients) limit non-urgent changes: resolvers cache answers for up to
    a minute, so smaller steps have no effect. `dead_after_s`: time without reports or tables from any of its ingresses.
    `alive_after_s`: time that it must then be healthy. `together_s`: entries that die within it indicate a fault of
    observation. `pending_limit_s`: usually 60 s; longer changes do not delay urgent ones."""

    pause_s: float = 60.0
    least_points: float = 5.0
    dead_after_s: float = 30.0
    alive_after_s: float = 60.0
    together_s: float = 60.0
    pending_limit_s: float = 120.0


@dataclass(frozen=True, slots=True)
class EntryRegion:
    """A region with an entry. `share` of all clients as planned, in any unit. Either `alive_since` or `dead_since` is
    set: since when any of its ingresses responds, or none does. `moved`: the entry's address has changed since
    publication."""

    name: str
    share: float
    alive_since: datetime | None = None
    dead_since: datetime | None = None
    evacuated: bool = False
    moved: bool = False


@dataclass(frozen=True, slots=True)
class EntryView:
    """`weights` and `revision` (0 at first) are as published; `numbered` is the highest number of any attempt.
    `pending_since`: not on every server yet. `foreign`: describes records that this control plane did not write, or
    empty."""

    regions: tuple[EntryRegion, ...]
    weights: Weights
    revision: int
    numbered: int = 0
    changed_at: datetime | None = None
    pending_since: datetime | None = None
    foreign: str = ""


@dataclass(frozen=True, slots=True)
class PublishEntry:
    weights: Weights
    seen: int
    revision: int
    reason: str


@dataclass(frozen=True, slots=True)
class HoldEntry:
    """Leave the records although they are not as wanted. `needs_person`: until an operator acts. `passing`: the read
    failed this time."""

    reason: str
    needs_person: bool = False
    passing: bool = False


def plan_entry(view: EntryView, settings: EntrySettings, now: datetime) -> PublishEntry | HoldEntry | None:
    """Returns what to do about the entry, or None if it is as wanted."""
    if not view.regions:
        return None
    if view.foreign:
        return HoldEntry(view.foreign, needs_person=True)
    dead = _dead_regions(view, settings, now)
    if isinstance(dead, HoldEntry):
        return dead
    wanted = weights_of(_wanted_shares(view, dead))
    if wanted == view.weights and not any(region.moved for region in view.regions):
        return None
    reason = _change_reason(view, dead, wanted)
    urgent = any(
        view.weights.get(region.name, 0) and not wanted[region.name] and (region.evacuated or region.name in dead)
        for region in view.regions
    )
    held = "" if not view.revision else _reason_to_wait(view, wanted, urgent, settings, now)
    if held:
        return HoldEntry(f"{reason}; {held}")
    return PublishEntry(wanted, view.revision, max(view.revision, view.numbered) + 1, reason)


def weights_of(shares: Mapping[str, float]) -> dict[str, int]:
    """Returns whole weights that sum to 255, by largest remainder: a larger share never gets a smaller weight. Raises
    ValueError if no region has a share, because Route 53 treats all-zero weights as equal."""
    total = sum(shares.values())
    if total <= 0:
        raise ValueError("no region is left for clients")
    exact = {name: WHOLE * share / total for name, share in shares.items()}
    weights = {name: int(value) for name, value in exact.items()}
    # Of remainders that are equal after rounding, the larger share's comes first.
    by_remainder = sorted(exact, key=lambda name: (weights[name] - exact[name], -shares[name], name))
    for name in by_remainder[: WHOLE - sum(weights.values())]:
        weights[name] += 1
    return weights


def _dead_regions(view: EntryView, settings: EntrySettings, now: datetime) -> frozenset[str] | HoldEntry:
    """Returns regions whose entries count as dead, or why that is implausible."""
    dead = {region.name for region in view.regions if _is_dead(region, view, settings, now)}
    if len(dead) == len(view.regions):  # better one that has just returned than none
        dead = {region.name for region in view.regions if region.alive_since is None}
    if len(dead) == len(view.regions):
        return HoldEntry("no region's entry answers, which is probably a fault of observation")
    died = [
        region.dead_since
        for region in view.regions
        if region.name in dead and region.dead_since is not None and _is_in_use(view, region.name)
    ]
    if len(died) > 1 and (now - max(died)).total_seconds() < settings.dead_after_s + settings.together_s:
        names = ", ".join(sorted(name for name in dead if _is_in_use(view, name)))
        return HoldEntry(f"the entries of {names} fell silent together; waiting a minute for confirmation")
    return frozenset(dead)


def _is_in_use(view: EntryView, name: str) -> bool:
    return not view.revision or view.weights.get(name, 0) > 0


def _is_dead(region: EntryRegion, view: EntryView, settings: EntrySettings, now: datetime) -> bool:
    """Hysteresis: a region in use is dead after a while; one out of use is alive after a while."""
    if region.dead_since is not None:
        is_new = view.revision > 0 and not view.weights.get(region.name, 0)
        return is_new or (now - region.dead_since).total_seconds() >= settings.dead_after_s
    if region.alive_since is None:
        return True
    comes_back = view.revision > 0 and not view.weights.get(region.name, 0)
    return comes_back and (now - region.alive_since).total_seconds() < settings.alive_after_s


def _wanted_shares(view: EntryView, dead: frozenset[str]) -> dict[str, float]:
    """Returns each region's share: of living regions that are not evacuated, or else of all living ones; equal if none
    has a planned share."""
    live = [region for region in view.regions if region.name not in dead]
    serving = [region for region in live if not region.evacuated] or live
    planned = {region.name: region.share for region in serving}
    if not any(planned.values()):
        planned = dict.fromkeys(planned, 1.0)
    return {region.name: planned.get(region.name, 0.0) for region in view.regions}


def _reason_to_wait(view: EntryView, wanted: Weights, urgent: bool, settings: EntrySettings, now: datetime) -> str:
    pending_s = (now - view.pending_since).total_seconds() if view.pending_since else None
    if pending_s is not None and (not urgent or pending_s < settings.pending_limit_s):
        return f"revision {view.revision} is not on all servers yet"
    if urgent:
        return ""
    since_s = (now - view.changed_at).total_seconds() if view.changed_at else settings.pause_s
    if since_s < settings.pause_s:
        return f"the last change was {age_text(since_s)} ago, and {settings.pause_s:.0f} s must lie between two"
    points = max(100 * abs(weight - view.weights.get(name, 0)) / WHOLE for name, weight in wanted.items())
    is_same = wanted.keys() == view.weights.keys() and not any(region.moved for region in view.regions)
    if points < settings.least_points and is_same:
        return f"{points:.1f} points are too few for a change; the minimum is {settings.least_points:g}"
    return ""


def _change_reason(view: EntryView, dead: frozenset[str], wanted: Weights) -> str:
    if not view.revision:
        return "the first weights"
    why = [f"the entry of {region.name} is dead" for region in view.regions if region.name in dead]
    why += [f"{region.name} is evacuated" for region in view.regions if region.evacuated and region.name not in dead]
    why += [f"{name} no longer has an entry" for name in sorted(view.weights) if name not in wanted]
    back = [name for name, weight in sorted(wanted.items()) if weight and not view.weights.get(name, 0)]
    why += [f"{name} gets clients" for name in back]
    why += [f"the entry of {region.name} moved" for region in view.regions if region.moved]
    return "; ".join(why) or "shares as planned"


TEXT_TTL_S = 10
RECORD_TYPE = "A"
"""An alias to a load balancer; its TTL is 60 s."""
_TEXT = re.compile(r'"switchyard rev=([0-9]{1,15}) token=([0-9a-f]{32})"')

RecordSet = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class EntryTargetName:
    dns_name: str
    zone: str


@dataclass(frozen=True, slots=True)
class PublishedRecords:
    """The records of the entry's name and the text record with its revision, exactly as read."""

    records: tuple[RecordSet, ...] = ()
    text: RecordSet | None = None

    @property
    def value(self) -> str:
        values = (self.text or {}).get("ResourceRecords") or ()
        return " ".join(str(each["Value"]) for each in values)

    @property
    def weights(self) -> dict[str, int]:
        return {each["SetIdentifier"]: int(each["Weight"]) for each in self.records if "Weight" in each}

    @property
    def fingerprint(self) -> str:
        """Independent of the order of records."""
        whole = [sorted(json.dumps(_plain_record(each), sort_keys=True) for each in self.records), self.value]
        return hashlib.sha256(json.dumps(whole).encode()).hexdigest()[:16]


def text_name(name: str) -> str:
    return f"_switchyard.{name}"


def text_value(revision: int, token: str) -> str:
    """Content of the text record. `token`: 32 hexadecimal digits, unique to the attempt."""
    return f'"switchyard rev={revision} token={token}"'


def token_of(value: str) -> str:
    """Returns the token of a text record, or "" if it is not this control plane's."""
    match = _TEXT.fullmatch(value)
    return match.group(2) if match else ""


def records_of(name: str, weights: Mapping[str, int], targets: Mapping[str, EntryTargetName]) -> tuple[RecordSet, ...]:
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
    """Compares records regardless of Route 53's spelling of names."""
    return _sorted_records(one) == _sorted_records(other)


def swap(
    name: str, standing: PublishedRecords, records: Sequence[RecordSet], revision: int, token: str
) -> list[dict[str, Any]]:
    """Returns the changes of the batch. Deletions come first, since a name cannot be weighted and unweighted at
    once."""
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


def _sorted_records(records: Iterable[RecordSet]) -> list[str]:
    return sorted(json.dumps(_plain_record(each), sort_keys=True) for each in records)


def _plain_record(record: RecordSet) -> dict[str, Any]:
    plain = {key: value for key, value in record.items() if value not in (None, [], "")}
    plain["Name"] = _normal_name(str(record["Name"]))
    if "Weight" in plain:
        plain["Weight"] = int(plain["Weight"])
    if "AliasTarget" in plain:
        alias = dict(plain["AliasTarget"])
        alias["DNSName"] = _normal_name(alias["DNSName"])
        alias["EvaluateTargetHealth"] = str(alias.get("EvaluateTargetHealth", "")).lower() == "true"
        plain["AliasTarget"] = alias
    return plain


def _normal_name(name: str) -> str:
    return name.lower().rstrip(".")


@dataclass(frozen=True, slots=True)
class TargetIngress:
    """`ready`: it runs a table. `leaving`: it must get nothing new."""

    id: str
    address: str
    port: int
    ready: bool = False
    leaving: bool = False


@dataclass(frozen=True, slots=True)
class Target:
    """A registration of an ingress in one group. `draining`: deregistered, possibly with open streams."""

    ingress: str
    group: str
    address: str
    port: int
    draining: bool = False


@dataclass(frozen=True, slots=True)
class TargetPlan:
    """`forget`: targets whose address now belongs to another ingress, so no call may be made about them."""

    register: tuple[Target, ...] = ()
    deregister: tuple[Target, ...] = ()
    forget: tuple[Target, ...] = ()


def plan_targets(groups: Collection[str], ingresses: Sequence[TargetIngress], targets: Sequence[Target]) -> TargetPlan:
    """Returns registrations and deregistrations. The last serving target of a group stays until another serves, unless
    its ingress is deleted."""
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
    """Also while it drains under another address, since that must end first."""
    if target is None:
        return False
    return not target.draining or (target.address, target.port) != (ingress.address, ingress.port)


def _is_wanted(ingress: TargetIngress | None, target: Target) -> bool:
    if ingress is None or ingress.leaving:
        return False
    return (ingress.address, ingress.port) == (target.address, target.port)
