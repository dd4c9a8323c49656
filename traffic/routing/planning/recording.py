"""Publication of routing tables as a recorded loop: what the published tables followed from, and why a region gets no
requests in them. Recorded without keys; a table in which only those differ is not recorded. Another setting is a field
of the deployments' traffic policies. Pure."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import islice
from typing import Any

import msgspec

from engine_agent.protocol.ingress_messages import Pool, Split
from fleet.recorder.planning.changes import policy_changed, policy_names
from fleet.recorder.planning.loops import Decided, NoSettings, RecordedLoop, Round
from fleet.recorder.planning.reasons import (
    ALTERNATIVES_MOST,
    Alternative,
    Reason,
    Subject,
    subjects_bounded,
    text_bounded,
    values_bounded,
)
from traffic.region_shares.planning.policy import Row, TrafficPolicy, parse_traffic_policy
from traffic.region_shares.planning.recording import share_text
from traffic.routing.planning.tables import (
    UNSTEERED,
    HeldDeployment,
    IngressAddress,
    RoutableCell,
    ServedDeployment,
    Steering,
    keep_steering,
    plan_pools,
    plan_splits,
)

NAME = "publication"
SPLITS = ""
"""The digest of a table's splits is under this name of a pool."""


@dataclass(frozen=True, slots=True)
class PoolDigest:
    """A pool in a table: `shares` of its region's requests, and a digest of everything."""

    digest: str
    shares: Row = field(default_factory=dict)


TableDigest = Mapping[str, PoolDigest]


@dataclass(frozen=True, slots=True)
class Kept:
    """What a table keeps of the one before, for deployments with unreadable policies."""

    pools: tuple[Pool, ...] = ()
    splits: tuple[Split, ...] = ()


@dataclass(frozen=True, slots=True)
class Publication:
    """Input of a pass. `in_force`: the tables of all regions before it."""

    deployments: Mapping[str, ServedDeployment]
    cells: Mapping[str, RoutableCell]
    ingresses: Mapping[str, IngressAddress]
    steerings: Mapping[str, Steering]
    holds: Mapping[str, HeldDeployment]
    regions: tuple[str, ...]
    in_force: Mapping[str, TableDigest]
    unreadable: tuple[str, ...] = ()
    kept: Mapping[str, Kept] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PublishTable:
    """A new table of a region: its changed pools, and the names of those that are gone."""

    region: str
    pools: TableDigest
    gone: tuple[str, ...] = ()


def table_digest(pools: Iterable[Pool], splits: tuple[Split, ...]) -> dict[str, PoolDigest]:
    found = {pool.name: PoolDigest(_digest(pool), pool.fractions) for pool in pools}
    return found | ({SPLITS: PoolDigest(_digest(splits))} if splits else {})


def _digest(value: object) -> str:
    return hashlib.blake2b(msgspec.msgpack.encode(value), digest_size=8).hexdigest()


def table_change(region: str, before: TableDigest, after: TableDigest) -> PublishTable | None:
    """None if both tables are the same."""
    changed = {name: one for name, one in after.items() if before.get(name) != one}
    gone = tuple(sorted(before.keys() - after.keys()))
    return PublishTable(region, changed, gone) if changed or gone else None


def plan_tables(view: Publication, _: NoSettings, __: datetime) -> tuple[PublishTable, ...]:
    deployments, cells, ingresses = view.deployments.values(), view.cells.values(), view.ingresses.values()
    splits = plan_splits(deployments, view.steerings)
    found = []
    for region in view.regions:
        kept = view.kept.get(region, Kept())
        pools = plan_pools(region, deployments, cells, ingresses, view.steerings, view.holds)
        pools = keep_steering(pools, kept.pools, view.unreadable)
        change = table_change(region, view.in_force.get(region, {}), table_digest(pools, (*splits, *kept.splits)))
        found += [change] if change else []
    return tuple(found)


def round_of(view: Publication, decisions: tuple[PublishTable, ...], applied: tuple[bool, ...], now: datetime) -> Round:
    return Round(view, NoSettings(), now, (Decided(plan_tables.__name__, decisions, applied),))


# --- why -------------------------------------------------------------------------------------------------------------


def _explain(one: Round) -> Callable[[Any, str], Reason]:
    return lambda decision, planner: _reason(one.view, decision, planner)


def _reason(view: Publication, decision: PublishTable, planner: str) -> Reason:
    before, moved = view.in_force.get(decision.region, {}), dict(_moved(view, decision))
    words = [f"{name} to {share_text(row)}" for name, row in moved.items()]
    others = [name for name in decision.pools if name not in moved and name != SPLITS]
    words += [f"other cells or settings of {', '.join(others)}"] if others else []
    words += [f"{name} is no longer served" for name in decision.gone if name != SPLITS]
    words += ["other splits of model names"] if SPLITS in {*decision.pools, *decision.gone} else []
    return Reason(
        PublishTable.__name__,
        planner,
        subjects_bounded(_subjects(decision.region, moved)),
        "table",
        text_bounded(f"routing table of {decision.region}: {'; '.join(words)}"),
        values_bounded({name: _pool_text(view, decision.region, before, name, row) for name, row in moved.items()}),
        {},
    )


def _moved(view: Publication, decision: PublishTable) -> Iterator[tuple[str, Row]]:
    """Pools whose requests go elsewhere."""
    before = view.in_force.get(decision.region, {})
    for name, pool in decision.pools.items():
        if name != SPLITS and (name not in before or before[name].shares != pool.shares):
            yield name, pool.shares


def _subjects(region: str, moved: Iterable[str]) -> Iterator[str]:
    yield from (Subject.SHARE.named(f"{name}@{region}") for name in moved)
    yield from map(Subject.SHARE.named, moved)
    yield Subject.REGION.named(region)


def _pool_text(view: Publication, region: str, before: TableDigest, name: str, row: Row) -> str:
    planned = view.steerings.get(name, UNSTEERED).matrix.get(region)
    text = f"{share_text(before[name].shares if name in before else None)} -> {share_text(row)}"
    return f"{text}; the autopilot planned {share_text(planned)}" if planned is not None and planned != row else text


def _alternatives(one: Round, decision: PublishTable) -> tuple[Alternative, ...]:
    """Regions that get no requests of a pool whose shares changed."""
    found = (
        Alternative(f"{name} to {region}", _why_not(one.view, name, decision.region, region))
        for name, row in _moved(one.view, decision)
        for region in one.view.regions
        if not row.get(region)
    )
    return tuple(islice(found, ALTERNATIVES_MOST))


def _why_not(view: Publication, name: str, origin: str, region: str) -> str:
    steering = view.steerings.get(name, UNSTEERED)
    if origin != region and not any(one.region == region for one in view.ingresses.values()):
        return "it has no ingress"
    if region in steering.closed:
        return "it is evacuated"
    if not steering.policy.may_serve(origin, region):
        return f"residency keeps requests of {origin} out of it"
    cells = [cell for cell in view.cells.values() if (cell.deployment, cell.region) == (name, region)]
    if not any(cell.state == "ready" for cell in cells):
        return "it has no ready cell"
    return "the autopilot gives it no share"


# --- other settings --------------------------------------------------------------------------------------------------


def _parse(stated: Mapping[str, Any], base: TrafficPolicy) -> TrafficPolicy:
    return parse_traffic_policy(stated, base=base)


def _change(one: Round, changes: Mapping[str, str]) -> Round:
    steerings = {
        name: replace(steering, policy=policy_changed(steering.policy, changes, _parse, loop=NAME))
        for name, steering in one.view.steerings.items()
    }
    return replace(one, view=replace(one.view, steerings=steerings))


PUBLICATION = RecordedLoop(
    name=NAME,
    view=Publication,
    settings=NoSettings,
    decisions=(PublishTable,),
    planners=(plan_tables,),
    explain=_explain,
    check=lambda changes: policy_changed(TrafficPolicy(), changes, _parse, loop=NAME),
    change=_change,
    alternatives=_alternatives,
    with_choices=frozenset({PublishTable.__name__}),
    setting_names=lambda: policy_names(TrafficPolicy),
)
