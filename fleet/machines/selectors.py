"""Reads machines for screens, for launches and for the orders of machine agents, each in a fixed number of queries.
Never writes."""

from collections.abc import Iterable, Mapping
from datetime import datetime

from django.db.models import CharField, OuterRef, Prefetch, QuerySet, Subquery, Value
from django.db.models.functions import Coalesce, NullIf

from engine_agent.protocol.machine_messages import MachineFacts, MachineOrder, ReleaseOrder, RunAgent
from engine_agent.protocol.states import AgentKind
from fleet.clouds.models import CloudNotice
from fleet.machines.models import Invitation, Machine
from fleet.machines.planner import PooledMachine, machine_notices, silent_for_s
from fleet.nodes.models import Node, NodeReport
from fleet.reconcile.planning.states import MachineRole, MachineState
from fleet.releases.models import AgentMove, AgentRelease

RUNS = frozenset({MachineState.TAKEN.value})


def machines_described() -> QuerySet[Machine]:
    """Machines with address and agent version (from their node if needed), network nodes, and open notices."""
    node = Node.objects.filter(id=OuterRef("runs"))
    report = NodeReport.objects.filter(node_id=OuterRef("runs"))
    unsettled = Prefetch("notices", CloudNotice.objects.filter(settled_at=None).order_by("ends_at", "pk"))
    return (
        Machine.objects.select_related("instance_type")
        .prefetch_related(unsettled)
        .annotate(
            network_nodes=Subquery(node.values("topology")[:1]),
            shown_address=Coalesce(
                NullIf("address", Value("")), Subquery(node.values("address")[:1]), Value(""), output_field=CharField()
            ),
            shown_version=Coalesce(
                NullIf("agent_version", Value("")),
                Subquery(report.values("agent_version")[:1]),
                Value(""),
                output_field=CharField(),
            ),
        )
    )


def notices_of(machine: Machine, now: datetime) -> tuple[str, ...]:
    """Returns a machine's notices, one sentence each."""
    if machine.state == MachineState.GONE:
        return ()
    kind = machine.instance_type
    notices = machine_notices(
        facts=machine.stated_facts(),
        stated=kind.shape() if kind is not None and machine.type_stated else None,
        found=machine.instance_type_id or "",
        silent_s=silent_for_s(machine.last_seen_at, now),
    )
    notices = (*notices, *(announced(notice) for notice in machine.notices.all() if notice.settled_at is None))
    if machine.release_trouble:
        notices = (*notices, f"Its agents keep their release: {machine.release_trouble}.")
    return (*notices, *([f"It has not carried out its order: {machine.agent_reason}."] if machine.agent_reason else []))


def announced(notice: CloudNotice) -> str:
    """Returns a cloud's announcement as a sentence."""
    until = f", ends at {notice.ends_at:%Y-%m-%d %H:%M:%S} UTC" if notice.ends_at else ""
    return f"Its provider announced {notice.kind}{until}" + (f": {notice.text}." if notice.text else ".")


def invitations_described() -> QuerySet[Invitation]:
    return Invitation.objects.filter(machine=None).order_by("-id")


def pool_of(region: str, role: MachineRole) -> list[PooledMachine]:
    rows = Machine.objects.filter(region_id=region, role=role.value, state=MachineState.POOL.value, leaving=False)
    found = ((row, row.stated_facts()) for row in rows.order_by("id"))
    return [PooledMachine(row.id, row.instance_type_id or "", row.connected, facts) for row, facts in found if facts]


def free_machines() -> dict[str, dict[str, int]]:
    """Region to instance type to number of free connected machines for nodes. One query."""
    rows = Machine.objects.filter(
        state=MachineState.POOL.value, role=MachineRole.NODE.value, connected=True, leaving=False
    ).exclude(instance_type=None)
    counts: dict[str, dict[str, int]] = {}
    for region, kind in rows.values_list("region_id", "instance_type_id"):
        of_region = counts.setdefault(region, {})
        of_region[kind] = of_region.get(kind, 0) + 1
    return counts


def machine_orders(sent: Mapping[str, int]) -> dict[str, MachineOrder]:
    """Returns the order of each machine that was last sent another version. Four queries."""
    rows = [row for row in Machine.objects.filter(id__in=list(sent)) if row.desired_version != sent[row.id]]
    nodes = {node.id: node for node in Node.objects.filter(id__in=[row.runs for row in rows if row.runs])}
    told = AgentMove.objects.filter(agent__in=[row.id for row in rows], moved_at__isnull=False)
    moves = {move.agent: move for move in told}
    releases = AgentRelease.objects.in_bulk({move.release for move in moves.values()})
    return {
        row.id: _machine_order(row, nodes.get(row.runs), _release_order(row, moves.get(row.id), releases))
        for row in rows
    }


def _release_order(
    machine: Machine, move: AgentMove | None, releases: Mapping[str, AgentRelease]
) -> ReleaseOrder | None:
    """Its last ordered release, if an archive for its Python exists."""
    facts, release = machine.stated_facts(), releases.get(move.release) if move else None
    archive = release.archives.get(tag_of(facts)) if release and facts else None
    if move is None or release is None or archive is None:
        return None
    return ReleaseOrder(release.id, archive["digest"], archive["size_bytes"], move.attempt)


def tag_of(facts: MachineFacts) -> str:
    """Returns a host's Python and processor as in archive names."""
    major, _, rest = facts.python.partition(".")
    return f"cp{major}{rest.partition('.')[0]}-{facts.system.rpartition(' ')[2]}"


def _machine_order(machine: Machine, node: Node | None, release: ReleaseOrder | None) -> MachineOrder:
    leave = machine.state == MachineState.LEAVING
    if machine.state not in RUNS or not machine.runs:
        return MachineOrder(machine.id, machine.desired_version, leave=leave, release=release)
    if machine.role == MachineRole.INGRESS:
        port = machine.port_base or 0
        run = RunAgent(AgentKind.INGRESS, machine.runs, machine.region_id, machine.address, port)
        return MachineOrder(machine.id, machine.desired_version, run, release=release)
    run = RunAgent(
        kind=AgentKind.NODE,
        id=machine.runs,
        region=machine.region_id,
        address=machine.address,
        port=machine.port_base or 0,
        instance_type=node.instance_type_id if node else machine.instance_type_id or "",
        topology=tuple(node.topology) if node else (),
    )
    return MachineOrder(machine.id, machine.desired_version, run, release=release)


def machines_running(ids: Iterable[str]) -> dict[str, Machine]:
    """Returns machines by the ID of their node or ingress."""
    rows = Machine.objects.filter(runs__in=list(ids)).exclude(state=MachineState.GONE)
    return {row.runs: row for row in rows}
