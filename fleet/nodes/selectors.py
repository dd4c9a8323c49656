"""Reads nodes, the desired state that each is sent, and their logs, in a number of queries that does not grow with the
number of nodes. A desired state is always complete: it is built from the cell that the node is in."""

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cache, lru_cache
from time import monotonic
from typing import Any

from django.db import connection
from django.db.models import CharField, Count, Min, OuterRef, Q, QuerySet, Subquery, Value
from django.db.models.functions import Coalesce
from msgspec import structs

from engine_agent.protocol.engine_builds import EngineBuild
from engine_agent.protocol.manifest import DIGEST_PREFIX
from engine_agent.protocol.messages import (
    PREFETCH_MAX,
    Artifact,
    Assignment,
    CheckRequest,
    Desired,
    EnginePlan,
    Holder,
    LogRequest,
    Peer,
    Prefetch,
)
from engine_agent.protocol.states import CellRole, MemberRole, Phase
from fleet.cells.models import Cell, CellMember
from fleet.cells.selectors import Pairings, pairings
from fleet.deployments.models import Deployment
from fleet.faults.planning.liveness import WATCHED
from fleet.machines.models import Machine, MachineSlot
from fleet.nodes.models import AgentListener, Node, NodeCheck, NodeLog, NodeReport
from fleet.nodes.planner import NEXT_TRY, WAITS_FOR_MACHINE, HolderView, plan_holders
from fleet.reconcile.planning.settings import FleetSettings
from fleet.reconcile.planning.states import CELL_PHASE, CellState, MachineState, NodeState
from kernel.row_cache import FullLooks, RowCache
from models_registry.builds.selectors import builds_ordered
from models_registry.instance_types.models import InstanceType
from models_registry.versions.models import ModelVersion
from models_registry.versions.planning.lifecycle import artifacts_of
from models_registry.versions.planning.roles import render_role
from models_registry.versions.planning.spec import InvalidVersion
from models_registry.versions.selectors import engine_allowances

_UNHEARD = """
SELECT region.provider, node.id, report.node_id IS NULL OR NOT report.connected OR report.last_seen_at < %(seen_by)s
FROM fleet_node AS node
JOIN fleet_region AS region ON region.name = node.region_id
LEFT JOIN fleet_nodereport AS report ON report.node_id = node.id
WHERE node.state = ANY(%(watched)s)
    AND NOT EXISTS (SELECT FROM fleet_providercall WHERE node_id = node.id)
    AND (report.node_id IS NULL OR NOT report.connected OR report.quiet
        OR NOT EXISTS (SELECT FROM fleet_agentlistener WHERE id = report.listener AND until > %(now)s))
ORDER BY node.id
"""
"""SQL, because `fleet.provision` runs it every second and Django takes longer to build it than PostgreSQL to answer."""

HOLDERS_READ = 64
"""Of those that hold an artifact in a region; more only cost time."""
HOLDERS_KEPT_S = 3.0
"""All nodes of a region may fetch the same artifact at the same time."""

log = logging.getLogger(__name__)


def nodes_described() -> QuerySet[Node]:
    """Nodes with their latest report, cell and machine, in one query. A node without a report has `connected` False and
    `agent_version` ""."""
    whole = Machine.objects.filter(runs=OuterRef("pk")).exclude(runs="").exclude(state=MachineState.GONE)
    shared = MachineSlot.objects.filter(runs=OuterRef("pk")).exclude(runs="")
    return Node.objects.select_related("report", "member__cell").annotate(
        machine=Coalesce(
            Subquery(whole.values("id")[:1]),
            Subquery(shared.values("machine")[:1]),
            Value(""),
            output_field=CharField(),
        ),
        connected=Coalesce("report__connected", Value(False)),
        agent_version=Coalesce("report__agent_version", Value("")),
    )


@dataclass(frozen=True, slots=True)
class Unheard:
    """Nodes from which no web process hears. `in_doubt`: those silent for long enough to query their provider, per
    provider. `is_any`: time alone may put another node in doubt."""

    in_doubt: dict[str, list[str]]
    is_any: bool


def unheard_machines(*, now: datetime, settings: FleetSettings) -> Unheard:
    """`nodes_in_doubt` without loading the fleet, and whether there may soon be more."""
    found: dict[str, list[str]] = defaultdict(list)
    with connection.cursor() as cursor:
        seen_by = now - timedelta(seconds=settings.doubt_after_s)
        watched = [state.value for state in WATCHED]
        cursor.execute(_UNHEARD, {"watched": watched, "seen_by": seen_by, "now": now})
        rows = cursor.fetchall()
    for provider, node, is_in_doubt in rows:
        if is_in_doubt:
            found[provider].append(node)
    return Unheard(dict(found), bool(rows))


def first_listener_ends(now: datetime) -> datetime | None:
    """Returns when the first web process stops to count as listening, unless it renews its lease until then."""
    ends: datetime | None = AgentListener.objects.filter(until__gt=now).aggregate(first=Min("until"))["first"]
    return ends


def node_counts_by_region() -> dict[str, dict[str, int]]:
    """Region -> state -> number of nodes, without retired nodes and empty states. One query."""
    counts: dict[str, dict[str, int]] = {}
    there = Node.objects.exclude(state=NodeState.RETIRED.value).order_by()
    for region, state, count in there.values_list("region_id", "state").annotate(count=Count("id")):
        counts.setdefault(region, {})[state] = count
    return counts


def spare_nodes() -> dict[tuple[str, str], int]:
    """(region, instance type) -> ready nodes in no cell that may be used. One query."""
    spare = Node.objects.filter(state=NodeState.READY.value, cordoned=False, member=None)
    counted = spare.order_by().values_list("region_id", "instance_type_id").annotate(count=Count("id"))
    return {(region, kind): count for region, kind, count in counted}


@dataclass(frozen=True, slots=True)
class AwaitedMachines:
    """Nodes of a type in a region that wait for their machines, or whose machines did not start, for the same
    reason."""

    region: str
    instance_type: str
    nodes: int
    reason: str


def machines_awaited(regions: Iterable[str], instance_types: Iterable[str]) -> tuple[AwaitedMachines, ...]:
    """Why machines of these types do not arrive in these regions. One query."""
    coming = Q(state=NodeState.JOINING.value, reason__startswith=WAITS_FOR_MACHINE)
    failed = Q(state=NodeState.LOST.value, report=None)
    rows = Node.objects.filter(coming | failed, region__in=list(regions), instance_type__in=list(instance_types))
    counts = Counter(
        (region, kind, reason.removeprefix(WAITS_FOR_MACHINE).partition(NEXT_TRY)[0])
        for region, kind, reason in rows.values_list("region_id", "instance_type_id", "reason")
    )
    return tuple(AwaitedMachines(region, kind, nodes, why) for (region, kind, why), nodes in sorted(counts.items()))


class DesiredVersions:
    """The current version of every node's desired state, of which each call reads only changes. For one thread."""

    def __init__(self) -> None:
        self._looks = FullLooks()
        self._rows = self._all_rows()

    @staticmethod
    def _all_rows() -> RowCache:
        kept = f"state <> '{NodeState.RETIRED}' OR terminated_at IS NULL"
        return RowCache("fleet_node", ("id", "desired_version"), kept=kept)

    def newer(self, sent: Iterable[tuple[str, int]]) -> list[str]:
        """The nodes that were sent another version than the current one."""
        if self._looks.begin():
            self._rows = self._all_rows()
        self._rows.refresh()
        self._looks.end()
        current = self._rows.rows
        return [node for node, version in sent if (row := current.get(node)) is not None and row[0] != version]


def desired_for(node_ids: Iterable[str]) -> dict[str, Desired]:
    """Desired state of these nodes, without those whose version cannot be rendered. Six queries, and one more each
    for checks of links, for engine builds, and for what is fetched in advance."""
    rows = Node.objects.filter(id__in=list(node_ids)).defer("fingerprint", "accelerators", "topology", "markets")
    nodes = {node.id: node for node in rows.select_related("log", "check_request")}
    members = CellMember.objects.filter(node_id__in=nodes).select_related("cell")
    own = {member.node_id: member for member in members}
    _attach_parents([member.cell for member in own.values()])
    peers: dict[str, list[Peer]] = defaultdict(list)
    cells = {member.cell_id for member in own.values()}
    addressed = CellMember.objects.filter(cell_id__in=cells).select_related("node").order_by("rank")
    for member in addressed.only("cell_id", "node_id", "rank", "node__address", "node__port_base"):
        peers[member.cell_id].append(
            Peer(node=member.node_id, rank=member.rank, address=member.node.address, port_base=member.node.port(0))
        )
    addresses = _nodes_by_id({peer for node in nodes.values() for peer in _check_field(node, "peers", [])})
    desired = {}
    allowances = engine_allowances() if own else {}
    builds = cache(builds_ordered)
    ahead = _versions_ahead(nodes.values())
    pairs = pairings(member.cell for member in own.values())
    plans: dict[tuple[object, ...], EnginePlan] = {}
    for node in nodes.values():
        place = own.get(node.id)
        assignment = None
        try:
            if place is not None:
                plan = _plan_of(place.cell, plans, allowances, builds)
                assignment = _assignment(place, tuple(peers[place.cell_id]), pairs, plan)
        except InvalidVersion as error:
            # It keeps its previous orders. Other nodes are not affected.
            log.error("cannot render the desired state of node %s: %s", node.id, error)
        else:
            desired[node.id] = Desired(
                node.id,
                node.desired_version,
                assignment,
                _log_request(node),
                check=_check_request(node, addresses),
                prefetch=_prefetch(node, ahead, builds),
            )
    return desired


def _attach_parents(cells: Sequence[Cell]) -> None:
    """Loads each deployment, instance type and version of these cells once: of thousands of cells they are few, and
    their rows are large."""
    deployments = Deployment.objects.in_bulk({cell.deployment_id for cell in cells})
    kinds = InstanceType.objects.in_bulk({cell.instance_type_id for cell in cells})
    versions = ModelVersion.objects.in_bulk({cell.model_version_id for cell in cells})
    for cell in cells:
        cell.deployment = deployments[cell.deployment_id]
        cell.instance_type = kinds[cell.instance_type_id]
        cell.model_version = versions[cell.model_version_id]


def _plan_of(
    cell: Cell,
    plans: dict[tuple[object, ...], EnginePlan],
    allowances: Mapping[str, Sequence[str]],
    builds: Callable[[], Mapping[str, EngineBuild]],
) -> EnginePlan:
    """How a cell's engine is started; equal cells share one in `plans`. Raises InvalidVersion."""
    key = (cell.model_version_id, cell.role, cell.instance_type_id)
    if key not in plans:
        spec = cell.model_version.spec(allowances)
        plan = render_role(spec, CellRole(cell.role), cell.instance_type.shape()).plan
        if plan.build is not None:
            plan = structs.replace(plan, build=builds().get(plan.build.name, plan.build))
        plans[key] = plan
    return plans[key]


def _assignment(member: CellMember, peers: tuple[Peer, ...], pairs: Pairings, plan: EnginePlan) -> Assignment:
    cell = member.cell
    return Assignment(
        cell=cell.id,
        generation=cell.generation,
        rank=member.rank,
        role=member.role,
        phase=CELL_PHASE.get(CellState(cell.state), Phase.STOP),
        plan=plan,
        peers=peers,
        secret=cell.secret,
        drain_deadline_s=cell.deployment.drain_deadline_s,
        cell_role=CellRole(cell.role),
        kv_layout=pairs.layout(cell.id),
        prefill_cells=pairs.prefill_cells(cell.id),
        prefill_from_tokens=pairs.prefill_from_tokens(cell.id),
        decode_nodes=pairs.decode_nodes(cell.id),
    )


def _versions_ahead(nodes: Iterable[Node]) -> dict[str, ModelVersion]:
    """The versions that these nodes fetch in advance, by reference."""
    wanted = {reference for node in nodes for reference in node.prefetch}
    if not wanted:
        return {}
    models = {reference.partition("@")[0] for reference in wanted}
    found = {version.reference: version for version in ModelVersion.objects.filter(model__in=models)}
    return {reference: found[reference] for reference in wanted & found.keys()}


def _prefetch(
    node: Node, versions: Mapping[str, ModelVersion], builds: Callable[[], Mapping[str, EngineBuild]]
) -> Prefetch | None:
    """What a node fetches in advance. A version that is invalid on its instance type is left out."""
    wanted: dict[EngineBuild, None] = {}
    artifacts: dict[Artifact, None] = {}
    for version in (versions[reference] for reference in node.prefetch if reference in versions):
        try:
            there = version.spec().on(node.instance_type_id)
            artifacts |= dict.fromkeys(each for each in artifacts_of(there) if each.digest)
        except InvalidVersion as error:
            log.error("node %s cannot fetch %s in advance: %s", node.id, version.reference, error)
            continue
        build = builds().get(there.engine_build) if there.engine_build else None
        if build is not None and not build.is_external:
            wanted[build] = None
    if not wanted and not artifacts:
        return None
    return Prefetch(tuple(wanted)[:PREFETCH_MAX], tuple(artifacts)[:PREFETCH_MAX])


def _check_field(node: Node, name: str, default: Any) -> Any:
    return getattr(getattr(node, "check_request", None), name, default)


def _nodes_by_id(names: set[str]) -> dict[str, Node]:
    return {node.id: node for node in Node.objects.filter(id__in=names)} if names else {}


def _check_request(node: Node, addresses: Mapping[str, Node]) -> CheckRequest | None:
    """The deep checks that it was last ordered to make. Without links if a peer is gone."""
    known: NodeCheck | None = getattr(node, "check_request", None)
    if known is None:
        return None
    peers = tuple(
        Peer(node=name, rank=rank, address=addresses[name].address, port_base=addresses[name].port(0))
        for rank, name in enumerate(known.peers)
        if name in addresses and addresses[name].port_base is not None
    )
    reset = None if known.reset is None else tuple(known.reset)
    if len(peers) < len(known.peers):
        return CheckRequest(known.request, reset=reset)
    rank = known.peers.index(node.id) if peers else 0
    return CheckRequest(known.request, rank, peers, known.secret, reset)


def _log_request(node: Node) -> LogRequest | None:
    """Until when a user reads this node's logs. Also returned after its end, so that the agent stops."""
    known: NodeLog | None = getattr(node, "log", None)
    return LogRequest(until=known.wished_until.timestamp()) if known is not None else None


def holders_of(hex_digest: str, node_id: str) -> tuple[Holder, ...]:
    """The nodes from which this one should fetch weights, a build or a compile cache, by reports of the last
    seconds."""
    own = Node.objects.filter(id=node_id).only("region_id", "address").first()
    if own is None:
        return ()
    views = _holder_views(own.region_id, f"{DIGEST_PREFIX}{hex_digest}", int(monotonic() // HOLDERS_KEPT_S))
    return plan_holders(node_id, own.region_id, own.address, views)


@lru_cache(maxsize=64)
def _holder_views(region: str, digest: str, _moment: int) -> tuple[HolderView, ...]:
    """One query for all nodes that ask in these seconds: it reads the reports of a region."""
    weights = Q(telemetry__contains={"prefetched": {"artifacts": [{"digest": digest, "is_offered": True}]}})
    archives = Q(telemetry__contains={"offered_caches": [digest.removeprefix(DIGEST_PREFIX)]})
    rows = NodeReport.objects.filter(
        weights | archives | Q(telemetry__contains={"builds": [{"digest": digest}]}),
        connected=True,
        node__region=region,
        node__state=NodeState.READY.value,
    )
    return tuple(_holder_view(row, digest) for row in rows.select_related("node__member__cell")[:HOLDERS_READ])


def _holder_view(row: NodeReport, digest: str) -> HolderView:
    member = getattr(row.node, "member", None)
    kept = [*row.telemetry.get("builds", ()), *(row.telemetry.get("prefetched") or {}).get("artifacts", ())]
    return HolderView(
        node=row.node_id,
        region=row.node.region_id,
        address=row.node.address,
        port_base=row.node.port_base,
        is_whole=not any(each["digest"] == digest and each.get("fetching") for each in kept),
        is_ready=row.node.state == NodeState.READY.value,
        is_leaving=row.node.cordoned or (member is not None and member.cell.state == CellState.DRAINING.value),
    )


@dataclass(frozen=True, slots=True)
class NodeLines:
    """A node's logs: name -> lines, oldest first. `said_at`: None if its agent sent none yet. `is_of_cell`: the lines
    belong to the cell's current generation."""

    node: str
    rank: int
    role: MemberRole
    said_at: datetime | None
    is_of_cell: bool
    logs: dict[str, list[str]]


def cell_log_lines(cell_id: str) -> tuple[NodeLines, ...]:
    """By rank, in one query. Empty for a cell without nodes."""
    members = CellMember.objects.filter(cell_id=cell_id).select_related("cell", "node__log").order_by("rank")
    return tuple(_node_lines(member) for member in members)


def _node_lines(member: CellMember) -> NodeLines:
    stored: NodeLog | None = getattr(member.node, "log", None)
    place = (member.cell_id, member.cell.generation)
    return NodeLines(
        node=member.node_id,
        rank=member.rank,
        role=member.role,
        said_at=stored.said_at if stored else None,
        is_of_cell=stored is not None and (stored.cell, stored.generation) == place,
        logs=stored.logs if stored else {},
    )
