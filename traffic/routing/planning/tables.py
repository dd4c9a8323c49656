"""Plans the routing table of a region: the cells of each model and the regions that take its other requests. Pure.
Shares come from the region autopilot, without regions that have no ready cell. Without a usable plan, the home region
serves, or else the region with the most ready cells. A region that residency excludes is never a target, not even as a
stand-by."""

from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from engine_agent.protocol.ingress_messages import (
    Affinity,
    CellEndpoint,
    Hold,
    Pool,
    PoolAdapter,
    SpillTarget,
    Split,
    cell_server_name,
)
from engine_agent.protocol.request_limits import limits_text
from traffic.region_shares.planning.policy import Matrix, TrafficPolicy, whole_row

ROUTED = frozenset({"ready", "draining"})


@dataclass(frozen=True, slots=True)
class RoutableCell:
    """A cell that can be routed to. `node` is its leader's; `port` is the cell proxy's on that node. `version` is equal
    for cells that answer alike (`models_registry.versions.planning.answers`)."""

    id: str
    deployment: str
    region: str
    state: str
    generation: int
    node: str
    address: str
    port: int
    max_connections: int
    adapters: tuple[str, ...] = ()
    version: str = ""


@dataclass(frozen=True, slots=True)
class ServedDeployment:
    """A deployment as the table lists it: model names, serving class, maximum tokens of request and answer, creation
    time (Unix seconds), and its version's adapters."""

    name: str
    models: tuple[str, ...]
    serving_class: str
    max_model_len: int = 0
    created_at: int = 0
    adapters: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class HeldDeployment:
    """A deployment that scales to zero; a request starts its first cell in one of `regions`."""

    hold: Hold
    regions: frozenset[str]


@dataclass(frozen=True, slots=True)
class IngressAddress:
    id: str
    region: str
    address: str
    port: int


@dataclass(frozen=True, slots=True)
class Steering:
    """How a deployment's requests are shared. `closed` regions get no requests that other regions may serve."""

    matrix: Matrix = field(default_factory=dict)
    policy: TrafficPolicy = field(default_factory=TrafficPolicy)
    closed: frozenset[str] = frozenset()

    def may_receive(self, origin: str, region: str) -> bool:
        return region not in self.closed and self.policy.may_serve(origin, region)


UNSTEERED = Steering()


def plan_pools(
    region: str,
    deployments: Iterable[ServedDeployment],
    cells: Iterable[RoutableCell],
    ingresses: Iterable[IngressAddress],
    steerings: Mapping[str, Steering] | None = None,
    holds: Mapping[str, HeldDeployment] | None = None,
) -> tuple[Pool, ...]:
    """Plans the pools of one region's table, in a stable order: equal states give equal tables. `steerings` maps a
    deployment to its shares and policy, `holds` to its request hold. Every deployment has a pool in every region; an
    ingress without local cells spills."""
    by_pool: dict[tuple[str, str], list[RoutableCell]] = defaultdict(list)
    for cell in cells:
        if cell.state in ROUTED:
            by_pool[cell.deployment, cell.region].append(cell)
    named = resolve_model_names(deployments)
    named = resolve_adapters(named, by_pool)
    by_region: dict[str, list[IngressAddress]] = defaultdict(list)
    for ingress in sorted(ingresses, key=lambda ingress: ingress.id):
        by_region[ingress.region].append(ingress)
    return tuple(
        msgspec.structs.replace(
            _plan_pool(deployment, region, by_pool, by_region, steering),
            hold=_pool_hold(region, (holds or {}).get(deployment.name), steering),
        )
        for deployment in named
        for steering in [(steerings or {}).get(deployment.name, UNSTEERED)]
    )


def _pool_hold(region: str, held: HeldDeployment | None, steering: Steering) -> Hold | None:
    may = held is not None and any(steering.may_receive(region, other) for other in held.regions)
    return held.hold if held is not None and may else None


def keep_steering(planned: Iterable[Pool], before: Iterable[Pool], unreadable: Container[str]) -> tuple[Pool, ...]:
    """Returns the pools, keeping the previous shares of `unreadable` deployments. One without a previous pool stays in
    its home region, because its residency is unknown."""
    known = {pool.name: pool for pool in before}
    return tuple(_keep_pool_shares(pool, known.get(pool.name)) if pool.name in unreadable else pool for pool in planned)


def _keep_pool_shares(pool: Pool, before: Pool | None) -> Pool:
    if before is None:
        home = {region: 1.0 for region in pool.fractions if region not in {target.region for target in pool.spill}}
        return msgspec.structs.replace(pool, spill=(), fractions=home)
    return msgspec.structs.replace(
        pool,
        spill=before.spill,
        fractions=before.fractions,
        affinity=before.affinity,
        by_cache=before.by_cache,
        shares_caches=before.shares_caches,
        continues=before.continues,
    )


def resolve_model_names(deployments: Iterable[ServedDeployment]) -> list[ServedDeployment]:
    """Returns the deployments by name, each with the model names that only it answers. The name of a model that several
    deployments serve leads to the deployment of that name, or else to the first that serves it."""
    ordered = sorted(deployments, key=lambda deployment: deployment.name)
    owners = {deployment.name: deployment.name for deployment in ordered}
    for deployment in ordered:
        for model in deployment.models:
            owners.setdefault(model, deployment.name)
    return [replace(one, models=tuple(model for model in one.models if owners[model] == one.name)) for one in ordered]


CellsByPool = Mapping[tuple[str, str], Sequence[RoutableCell]]
"""Routed cells by deployment and region."""


def resolve_adapters(deployments: Iterable[ServedDeployment], by_pool: CellsByPool) -> list[ServedDeployment]:
    """Returns the deployments with the adapters that only they answer: those of the version and of its cells, without
    model names. Services refuse names that are taken; if two deployments still share one, the first gets it."""
    served = list(deployments)
    taken = {model for deployment in served for model in deployment.models}
    of_cells: dict[str, set[str]] = defaultdict(set)
    for (deployment_name, _), cells in by_pool.items():
        of_cells[deployment_name].update(name for cell in cells for name in cell.adapters)
    resolved = []
    for deployment in served:
        own = sorted({*deployment.adapters, *of_cells[deployment.name]} - taken)
        taken.update(own)
        resolved.append(replace(deployment, adapters=tuple(own)))
    return resolved


def _pool_adapters(deployment: ServedDeployment, region: str, by_pool: CellsByPool) -> Iterator[PoolAdapter]:
    """Yields the adapters. One that any ready cell lacks lists the local cells that have it, since other regions may
    lack it. Draining cells do not count, since they get no new requests."""
    if not deployment.adapters:
        return
    everywhere = [cell for (name, _), cells in by_pool.items() if name == deployment.name for cell in cells]
    taking = [cell for cell in everywhere if cell.state == "ready"]
    for adapter in deployment.adapters:
        if all(adapter in cell.adapters for cell in taking):
            yield PoolAdapter(adapter, deployment.models[-1])
            continue
        here = by_pool.get((deployment.name, region), ())
        holders = sorted(cell_server_name(cell.id, cell.generation) for cell in here if adapter in cell.adapters)
        yield PoolAdapter(adapter, deployment.models[-1], tuple(holders))


def _plan_pool(
    deployment: ServedDeployment,
    region: str,
    by_pool: Mapping[tuple[str, str], list[RoutableCell]],
    ingresses: Mapping[str, list[IngressAddress]],
    steering: Steering,
) -> Pool:
    ready = {
        name: sum(cell.state == "ready" for cell in by_pool.get((deployment.name, name), ()))
        for name in sorted({*ingresses, region})
    }
    others = [name for name in ingresses if name != region and ready[name] and steering.may_receive(region, name)]
    others.sort(key=lambda name: (-ready[name], name))
    return Pool(
        name=deployment.name,
        models=deployment.models,
        serving_class=deployment.serving_class,
        cells=tuple(
            CellEndpoint(
                cell=cell.id,
                generation=cell.generation,
                address=cell.address,
                port=cell.port,
                max_connections=cell.max_connections,
                drain=cell.state == "draining",
                node=cell.node,
                version=cell.version,
            )
            for cell in sorted(by_pool.get((deployment.name, region), ()), key=lambda cell: cell.id)
        ),
        spill=tuple(
            SpillTarget(name, ingress.address, ingress.port, ingress.id)
            for name in others
            for ingress in ingresses[name]
        ),
        fractions=_pool_fractions(region, ready, others, steering.matrix.get(region, {})),
        affinity=None if steering.policy.load_bound is None else Affinity(steering.policy.load_bound),
        max_model_len=deployment.max_model_len,
        created_at=deployment.created_at,
        adapters=tuple(_pool_adapters(deployment, region, by_pool)),
        by_cache=steering.policy.load_bound is not None and steering.policy.routing == "exact",
        shares_caches=steering.policy.shared_caches,
        continues=steering.policy.continuation,
        request_limits=limits_text(steering.policy.request_limits),
    )


def plan_splits(deployments: Iterable[ServedDeployment], steerings: Mapping[str, Steering]) -> tuple[Split, ...]:
    """Returns the model names that several deployments answer, in a stable order. Shares of deleted deployments fall to
    the others."""
    served = {deployment.name: deployment for deployment in resolve_model_names(deployments)}
    splits = []
    for name in sorted(served):
        policy = steerings.get(name, UNSTEERED).policy
        shares = {other: weight for other, weight in sorted(policy.split.items()) if other in served and weight > 0}
        if shares:
            splits += [Split(model, shares, policy.split_sticky) for model in served[name].models]
    return tuple(splits)


def _pool_fractions(
    region: str, ready: Mapping[str, int], others: list[str], row: Mapping[str, float]
) -> dict[str, float]:
    """Returns shares that sum to 1 (I12), or {} if no region can serve. Regions that cannot serve lose their share to
    the others."""
    there = {name: share for name, share in row.items() if name in others or (name == region and ready[region])}
    if any(share > 0 for share in there.values()):
        return whole_row(there, region)
    if ready[region]:
        return {region: 1.0}
    return {others[0]: 1.0} if others else {}


def describe_change(before: tuple[Pool, ...], after: tuple[Pool, ...]) -> str:
    parts: list[str] = []
    old, new = {pool.name: pool for pool in before}, {pool.name: pool for pool in after}
    for name in sorted(old.keys() | new.keys()):
        parts += _pool_changes(name, old.get(name), new.get(name))
    return "; ".join(parts) or "addresses changed"


def describe_splits(before: tuple[Split, ...], after: tuple[Split, ...]) -> list[str]:
    """Returns sentences about changed splits."""
    old, new = {split.model: split for split in before}, {split.model: split for split in after}
    parts = []
    for model in sorted(old.keys() | new.keys()):
        if model not in new:
            parts.append(f"model {model} is no longer split")
        elif old.get(model) != new[model]:
            total = sum(new[model].shares.values())
            shares = ", ".join(f"{pool} {weight / total:.1%}" for pool, weight in new[model].shares.items())
            parts.append(f"model {model}: {shares}{'' if new[model].sticky else ', chosen per request'}")
    return parts


def sharing_ingresses(of_region: Sequence[str]) -> tuple[str, ...]:
    """Returns the ingresses of a region that share its cells. A single one needs no reports of their load."""
    return tuple(sorted(of_region)) if len(of_region) > 1 else ()


def describe_ingresses(before: Sequence[str], after: Sequence[str]) -> list[str]:
    """Returns a sentence if other ingresses share the region's cells."""
    if tuple(before) == tuple(after):
        return []
    return [f"{len(after)} ingresses share its cells: {', '.join(after)}" if after else "one ingress has its cells"]


def _pool_changes(name: str, old: Pool | None, new: Pool | None) -> list[str]:
    if new is None:
        return [f"{name} is no longer served"]
    was = {cell.cell: cell for cell in old.cells} if old else {}
    now = {cell.cell: cell for cell in new.cells}
    parts = [f"+{cell}" for cell in now if cell not in was and not now[cell].drain]
    parts += [f"-{cell}" for cell in was if cell not in now]
    parts += [f"{cell} drains" for cell in now if now[cell].drain and not (cell in was and was[cell].drain)]
    parts += [f"{cell} restarted" for cell in now if cell in was and now[cell].generation != was[cell].generation]
    if old is None or old.fractions != new.fractions:
        shares = ", ".join(f"{region} {share:.0%}" for region, share in new.fractions.items()) or "no region can serve"
        parts.append(f"{name} -> {shares}")
    if ((old.affinity, old.by_cache) if old else (None, False)) != (new.affinity, new.by_cache):
        parts.append(f"{name} {_affinity_text(new)}")
    if old is not None and old.shares_caches != new.shares_caches:
        parts.append(f"{name}: tenants {'share' if new.shares_caches else 'do not share'} its caches")
    if (old.continues if old else False) != new.continues:
        parts.append(f"{name}: streams {'continue at other cells' if new.continues else 'end with their cell'}")
    if (old.hold if old else None) != new.hold:
        parts.append(f"{name} {_hold_text(new.hold)}")
    if old is not None and (old.max_model_len, old.created_at) != (new.max_model_len, new.created_at):
        parts.append(f"{name} is listed with {new.max_model_len} tokens")
    return [*parts, *_adapter_changes(old.adapters if old else (), new.adapters)]


def _affinity_text(pool: Pool) -> str:
    if pool.affinity is None:
        return "routes by fewest requests"
    return "routes by cache contents" if pool.by_cache else "keeps prefixes together"


def _hold_text(hold: Hold | None) -> str:
    if hold is None:
        return "holds no requests"
    if hold.withheld:
        return f"holds no requests; its cell gets no machines ({hold.withheld})"
    return f"holds requests for {hold.for_s} s, " + ("a cell is starting" if hold.ready_at else "no cell is starting")


def _adapter_changes(before: tuple[PoolAdapter, ...], after: tuple[PoolAdapter, ...]) -> list[str]:
    was, now = ({adapter.name: adapter for adapter in adapters} for adapters in (before, after))
    parts = [f"adapter {name} is no longer served" for name in was if name not in now]
    for name, adapter in now.items():
        if was.get(name) != adapter:
            holders = "every cell" if adapter.cells is None else ", ".join(adapter.cells) or "no cell here"
            parts.append(f"adapter {name}: {holders}")
    return parts
