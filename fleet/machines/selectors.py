"""Reads machines for screens, for launches and for the orders of machine agents, each in a fixed number of queries.
Never writes."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime

import msgspec
from django.db.models import CharField, Exists, OuterRef, Prefetch, Q, QuerySet, Subquery, Value
from django.db.models.functions import Coalesce, NullIf

from engine_agent.protocol.machine_messages import INSTANCES_FROM, MachineFacts, MachineOrder, ReleaseOrder, RunAgent
from engine_agent.protocol.states import AgentKind
from fleet.cells.models import CellMember
from fleet.clouds.models import CloudNotice
from fleet.faults.models import Repair
from fleet.faults.planning.views import Rung
from fleet.machines.layouts import device_count, facts_of_node, missing_devices, node_sizes
from fleet.machines.models import Invitation, Machine, MachineSlot
from fleet.machines.planner import (
    LOCAL,
    POOLED,
    WHOLE,
    PooledMachine,
    devices_used,
    machine_notices,
    silent_for_s,
    why_set_aside,
)
from fleet.nodes.models import Node, NodeReport
from fleet.reconcile.planning.snapshot import MachineView
from fleet.reconcile.planning.states import DEAD, MachineRole, MachineState, NodeState
from fleet.releases.models import AgentMove, AgentRelease
from models_registry.instance_types.planner import InstanceShape

RUNS = frozenset({MachineState.TAKEN.value})
SHARED = frozenset({MachineState.POOL.value, MachineState.TAKEN.value})
"""States in which a machine with a layout gets further nodes."""


def machines_described() -> QuerySet[Machine]:
    """Machines with address and agent version (from their node if needed), network nodes, and open notices."""
    node = Node.objects.filter(id=OuterRef("runs"))
    report = NodeReport.objects.filter(node_id=OuterRef("runs"))
    unsettled = Prefetch("notices", CloudNotice.objects.filter(settled_at=None).order_by("ends_at", "pk"))
    return (
        Machine.objects.select_related("instance_type")
        .prefetch_related(unsettled, "slots")
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
    if machine.layout_changes:
        notices = (*notices, f"It becomes {machine.next_layout or 'one node'} when its nodes are wiped.")
    for slot in machine.slots.all():
        notices = (*notices, *_slot_notices(machine, slot))
    for what, why in sorted(machine.broken.items()):
        name = "It is" if what == WHOLE else f"{what} is"
        notices = (*notices, f"{name} out of use until `switchyard machine repaired {machine.id}`: {why}.")
    if machine.release_trouble:
        notices = (*notices, f"Its agents keep their release: {machine.release_trouble}.")
    return (*notices, *([f"It has not carried out its order: {machine.agent_reason}."] if machine.agent_reason else []))


def _slot_notices(machine: Machine, slot: MachineSlot) -> Iterator[str]:
    facts, name = machine.stated_facts(), slot.runs or f"Its node {slot.number}"
    if facts and (missing := missing_devices(facts, slot.resources())):
        yield f"{name} lacks {', '.join(missing)}, which the machine no longer has."
    if slot.instance_type_id is None:
        yield f"No instance type fits {name.lower() if not slot.runs else name}. Set the layout with an instance type."


def announced(notice: CloudNotice) -> str:
    """Returns a cloud's announcement as a sentence."""
    until = f", ends at {notice.ends_at:%Y-%m-%d %H:%M:%S} UTC" if notice.ends_at else ""
    return f"Its provider announced {notice.kind}{until}" + (f": {notice.text}." if notice.text else ".")


def _staying(rows: "QuerySet[Machine]") -> "QuerySet[Machine]":
    """Without machines that get no new node now: a reboot is due, or their cloud will take or maintain them, as joined
    hosts read in their metadata."""
    rebooting = MachineSlot.objects.filter(machine=OuterRef("pk"), runs__in=_reboots_due().values("node"))
    ending = CloudNotice.objects.filter(machine=OuterRef("pk"), settled_at=None)
    return rows.exclude(Exists(ending)).exclude(Exists(rebooting))


def is_reboot_due(machine: Machine) -> bool:
    return machine.slots.filter(runs__in=_reboots_due().values("node")).exists()


def _reboots_due() -> "QuerySet[Repair]":
    """Repairs that wait for the reboot of their node's machine. An attempt that has ended does not, so that a host that
    returns late is not rebooted."""
    due = Repair.objects.filter(what=Rung.REBOOT.value, ended_at=None, request="")
    return due.filter(node__state=NodeState.FAULTY.value)


def invitations_described() -> QuerySet[Invitation]:
    return Invitation.objects.filter(machine=None).order_by("-id")


def pool_of(region: str, role: MachineRole) -> list[PooledMachine]:
    """Free machines, and free nodes of machines with a layout whose devices are all there."""
    rows = Machine.objects.filter(region_id=region, role=role.value, leaving=False, layout_changes=False, layout="")
    rows = _staying(rows.filter(broken={}))
    found = ((row, row.stated_facts()) for row in rows.filter(state=MachineState.POOL.value).order_by("id"))
    whole = [PooledMachine(row.id, row.instance_type_id or "", row.connected, facts) for row, facts in found if facts]
    return [*whole, *_free_slots(region)] if role is MachineRole.NODE else whole


def _free_slots(region: str) -> Iterator[PooledMachine]:
    rows = Machine.objects.filter(region_id=region, leaving=False, layout_changes=False, state__in=SHARED)
    for row in _staying(rows).exclude(layout="").order_by("id").prefetch_related("slots"):
        facts, slots = row.stated_facts(), list(row.slots.all())
        in_use = sum(slot.state != MachineState.POOL for slot in slots)
        for slot in slots:
            owns = slot.resources()
            is_free = slot.state == MachineState.POOL and not why_set_aside(owns, row.broken)
            if facts and is_free and not missing_devices(facts, owns):
                kind, own = slot.instance_type_id or "", facts_of_node(facts, owns)
                yield PooledMachine(row.id, kind, row.connected, own, slot.number, in_use)


def free_machines() -> dict[str, dict[str, int]]:
    """Region to instance type to number of free connected places for nodes: machines, and slots of divided ones. Two
    queries."""
    there = _staying(Machine.objects.filter(role=MachineRole.NODE.value, connected=True, leaving=False))
    whole = there.filter(state=MachineState.POOL.value, layout="", layout_changes=False, broken={})
    whole = whole.exclude(instance_type=None)
    slots = MachineSlot.objects.filter(
        state=MachineState.POOL.value,
        machine__in=there.filter(state__in=SHARED, layout_changes=False).exclude(layout=""),
    ).exclude(instance_type=None)
    usable = (
        (slot.machine.region_id, slot.instance_type_id or "")
        for slot in slots.select_related("machine")
        if not slot.machine.broken or not why_set_aside(slot.resources(), slot.machine.broken)
    )
    counts: dict[str, dict[str, int]] = {}
    for region, kind in [*whole.values_list("region_id", "instance_type_id"), *usable]:
        of_region = counts.setdefault(region, {})
        of_region[kind] = of_region.get(kind, 0) + 1
    return counts


def divided_regions() -> set[str]:
    """Regions of provider `local` whose nodes are slots of a machine. One query."""
    rows = Machine.objects.filter(provider=LOCAL, leaving=False).exclude(layout="").exclude(state=MachineState.GONE)
    return set(rows.values_list("region_id", flat=True))


def machine_views(kinds: Collection[str], shapes: Mapping[str, InstanceShape]) -> tuple[MachineView, ...]:
    """Connected joined hosts, and parts of this computer, without broken devices or cells that the planner may divide
    into nodes of these instance types, and those whose layout changes. Two queries."""
    hosts = Q(provider=POOLED) | Q(provider=LOCAL) & ~Q(layout="")
    rows = _staying(Machine.objects.filter(hosts, role=MachineRole.NODE.value, connected=True, leaving=False))
    rows = rows.filter(Q(layout_changes=True) | Q(state__in=SHARED, layout_pinned=False, broken={}))
    members = CellMember.objects.values("node_id")
    in_cells = MachineSlot.objects.filter(machine=OuterRef("pk"), runs__in=members)
    rows = rows.exclude(runs__in=members).exclude(Exists(in_cells))
    wanted = tuple(shapes[kind] for kind in sorted(kinds) if kind in shapes)
    found = (_machine_view(row, wanted) for row in rows.order_by("id").prefetch_related("slots"))
    return tuple(view for view in found if view is not None)


def _machine_view(row: Machine, wanted: tuple[InstanceShape, ...]) -> MachineView | None:
    facts, slots = row.stated_facts(), list(row.slots.all())
    if facts is None or row.port_base is None:
        return None
    facts = msgspec.structs.replace(facts, port_base=row.port_base)
    names = [row.runs, *(slot.runs for slot in slots)]
    kinds = [slot.instance_type_id for slot in slots] if row.layout else [row.instance_type_id]
    return MachineView(
        id=row.id,
        region=row.region_id,
        layout=row.layout,
        devices=device_count(row.layout, facts),
        are_shares=not facts.devices,
        sizes=node_sizes(row.layout, facts, wanted),
        nodes=tuple(sorted(name for name in names if name)),
        types=frozenset(kind for kind in kinds if kind),
        free_places=sum(not slot.runs for slot in slots) if row.layout else int(not row.runs),
        layout_since=row.layout_at or row.created_at,
        coming=tuple(row.next_types) if row.layout_changes else None,
    )


def nodes_sharing_devices() -> dict[tuple[str, str], tuple[str, ...]]:
    """(machine, device as a fault names it) -> the nodes that use it, for devices that several nodes use. One query."""
    parts = MachineSlot.objects.exclude(runs="").order_by("machine_id", "number")
    parts = parts.filter(Q(owns__share__lt=1) | Q(owns__devices__0__gte=INSTANCES_FROM))
    users: dict[tuple[str, str], tuple[str, ...]] = {}
    for slot in parts:
        for device in devices_used(slot.resources()):
            key = (slot.machine_id, device)
            users[key] = (*users.get(key, ()), slot.runs)
    return {key: nodes for key, nodes in users.items() if len(nodes) > 1}


def machine_orders(sent: Mapping[str, int]) -> dict[str, MachineOrder]:
    """Returns the order of each machine that was last sent another version. Six queries, and two more if a reboot is
    due."""
    rows = [row for row in Machine.objects.filter(id__in=list(sent)) if row.desired_version != sent[row.id]]
    slots: dict[str, list[MachineSlot]] = {}
    taken = MachineSlot.objects.filter(machine__in=[row.id for row in rows], state=MachineState.TAKEN)
    for slot in taken.select_related("machine"):
        slots.setdefault(slot.machine_id, []).append(slot)
    names = [row.runs for row in rows if row.runs] + [slot.runs for of_one in slots.values() for slot in of_one]
    nodes = {node.id: node for node in Node.objects.filter(id__in=names)}
    told = AgentMove.objects.filter(agent__in=[row.id for row in rows], moved_at__isnull=False)
    moves = {move.agent: move for move in told}
    releases = AgentRelease.objects.in_bulk({move.release for move in moves.values()})
    reboots = reboot_orders(names)
    reboots = {node: reboots[node] for node in reboots.keys() - neighbours_in_use(reboots).keys()}
    return {
        row.id: _machine_order(
            row, slots.get(row.id, ()), nodes, _release_order(row, moves.get(row.id), releases), reboots
        )
        for row in rows
    }


def reboot_orders(nodes: Iterable[str]) -> dict[str, str]:
    """Node -> the order of the reboot that its repair waits for. One query."""
    due = _reboots_due().filter(node__in=list(nodes))
    return {repair.node_id: f"{repair.pk}-{repair.at.timestamp():.3f}" for repair in due}


def neighbours_in_use(nodes: Collection[str]) -> dict[str, list[str]]:
    """Node -> other nodes of its machine that are in use, if there are any: a reboot would end their cells. Two
    queries."""
    if not nodes:
        return {}
    shared = MachineSlot.objects.filter(runs__in=list(nodes)).values("machine")
    slots = list(MachineSlot.objects.filter(machine__in=shared).exclude(runs="").values_list("machine", "runs"))
    alive = Node.objects.filter(id__in=[name for _, name in slots]).exclude(state__in=list(DEAD))
    used = set(alive.values_list("id", flat=True))
    machines = {name: machine for machine, name in slots}
    others = {
        node: sorted(name for machine, name in slots if name in used and name != node and machine == machines[node])
        for node in machines.keys() & set(nodes)
    }
    return {node: names for node, names in others.items() if names}


def nodes_that_may_reboot() -> frozenset[str]:
    """Nodes on joined hosts whose operators allow reboots. Two queries."""
    hosts = Machine.objects.filter(provider=POOLED, may_reboot=True).exclude(state=MachineState.GONE)
    slots = MachineSlot.objects.filter(machine__in=hosts)
    return frozenset([*hosts.values_list("runs", flat=True), *slots.values_list("runs", flat=True)]) - {""}


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


def _machine_order(
    machine: Machine,
    slots: Iterable[MachineSlot],
    nodes: Mapping[str, Node],
    release: ReleaseOrder | None,
    reboots: Mapping[str, str],
) -> MachineOrder:
    leave = machine.state == MachineState.LEAVING
    if machine.layout:
        shared = tuple(_run_node(machine, slot, nodes.get(slot.runs)) for slot in slots if not leave)
        reboot = next((reboots[run.id] for run in shared if run.id in reboots), "")
        return MachineOrder(
            machine.id, machine.desired_version, leave=leave, release=release, nodes=shared, reboot=reboot
        )
    if machine.state not in RUNS or not machine.runs:
        return MachineOrder(machine.id, machine.desired_version, leave=leave, release=release)
    if machine.role == MachineRole.INGRESS:
        port = machine.port_base or 0
        run = RunAgent(AgentKind.INGRESS, machine.runs, machine.region_id, machine.address, port)
        return MachineOrder(machine.id, machine.desired_version, run, release=release)
    run = _run_node(machine, None, nodes.get(machine.runs))
    reboot = reboots.get(machine.runs, "")
    return MachineOrder(machine.id, machine.desired_version, run, release=release, reboot=reboot)


def _run_node(machine: Machine, slot: MachineSlot | None, node: Node | None) -> RunAgent:
    kind = (slot or machine).instance_type_id
    return RunAgent(
        kind=AgentKind.NODE,
        id=(slot or machine).runs,
        region=machine.region_id,
        address=machine.address,
        port=(slot or machine).port_base or 0,
        instance_type=node.instance_type_id if node else kind or "",
        topology=tuple(node.topology) if node else (),
        owns=slot.resources() if slot else None,
    )


@dataclass(frozen=True, slots=True)
class NodeHost:
    """The machine of a node or ingress, and its slot if the machine has a layout."""

    machine: Machine
    slot: MachineSlot | None = None

    @property
    def state(self) -> str:
        return (self.slot or self.machine).state

    @property
    def phase(self) -> str:
        return (self.slot or self.machine).phase

    @property
    def port_base(self) -> int | None:
        return (self.slot or self.machine).port_base


def hosts_running(ids: Iterable[str]) -> dict[str, NodeHost]:
    """Returns machines that are not gone by the ID of their nodes or ingress. Two queries."""
    names = list(ids)
    rows = Machine.objects.filter(runs__in=names).exclude(state=MachineState.GONE)
    slots = MachineSlot.objects.filter(runs__in=names).exclude(machine__state=MachineState.GONE)
    return {
        **{row.runs: NodeHost(row) for row in rows},
        **{slot.runs: NodeHost(slot.machine, slot) for slot in slots.select_related("machine")},
    }
