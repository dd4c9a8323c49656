"""Reads which machine runs which image, for image moves (`fleet.clouds.planning.upkeep`), which node serves which cell,
for the tags of tasks, and which tasks did not start (`fleet.clouds.planning.starts`). Never writes."""

from collections.abc import Collection
from datetime import datetime

from fleet.capacity.planning.pools import LaunchOutcome
from fleet.cells.models import CellMember
from fleet.clouds.models import CloudNotice, ImageMove, LaunchAttempt
from fleet.clouds.planning.starts import LOOKED_BACK, Start, StartFault, start_fault
from fleet.clouds.planning.task_tags import Serves
from fleet.clouds.planning.upkeep import ImageMachine
from fleet.machines.models import Machine
from fleet.nodes.models import Node
from fleet.reconcile.planning.states import MachineRole, MachineState, NodeState, NoticeKind


def image_machines(move: ImageMove) -> list[ImageMachine]:
    """Returns machines of a move's type and region whose nodes are not retired."""
    rows = Machine.objects.filter(
        region_id=move.region_id,
        instance_type_id=move.instance_type_id,
        role=MachineRole.NODE.value,
    ).exclude(state=MachineState.GONE)
    machines = {row.runs: row for row in rows.select_related("launched_by")}
    units = {node: row.launched_by.unit_id if row.launched_by else node for node, row in machines.items()}
    nodes = Node.objects.filter(id__in=machines).exclude(state=NodeState.RETIRED).order_by("id")
    cells = dict(CellMember.objects.filter(node_id__in=machines).values_list("node_id", "cell_id"))
    announced = CloudNotice.objects.filter(kind=NoticeKind.IMAGE, settled_at=None, machine__in=machines.values())
    leaving = set(announced.values_list("machine__runs", flat=True))
    return [
        ImageMachine(
            node=node.id,
            unit=units[node.id],
            cell=str(cells.get(node.id, "")),
            is_new=machines[node.id].image == move.image,
            state=NodeState(node.state),
            state_since=node.state_since,
            is_leaving=node.id in leaving,
        )
        for node in nodes
    ]


def units_under_way(move: ImageMove) -> frozenset[str]:
    """Returns the units with open launches from the move's image."""
    rows = LaunchAttempt.objects.filter(
        ended_at=None,
        unit__region_id=move.region_id,
        unit__instance_type_id=move.instance_type_id,
        pool_seen__image=move.image,
    )
    return frozenset(rows.values_list("unit_id", flat=True))


def nodes_serving(nodes: Collection[str]) -> dict[str, Serves]:
    """Returns the work of these nodes; those that are retired or unknown are left out."""
    there = Node.objects.filter(id__in=nodes).exclude(state=NodeState.RETIRED).values_list("id", flat=True)
    members = CellMember.objects.filter(node_id__in=nodes).values_list("node_id", "cell_id", "cell__generation")
    cells = {node: Serves(node, cell, str(generation)) for node, cell, generation in members}
    return {node: cells.get(node, Serves(node)) for node in there}


STARTS_READ = 200
"""The newest of an instance type: more than a back-off counts."""


def task_starts(region: str, instance_type: str, role: MachineRole, now: datetime) -> tuple[Start, ...]:
    """Returns the tasks of a type that joined or did not start, and the calls that ECS refused. Two queries."""
    since = now - LOOKED_BACK
    kind = {"region_id": region, "instance_type_id": instance_type, "role": role.value}
    rows = Machine.objects.filter(provider="ecs", created_at__gt=since, **kind).exclude(launched_by=None)
    tasks = [_start_of(row) for row in rows.select_related("launched_by").order_by("-created_at")[:STARTS_READ]]
    attempts = LaunchAttempt.objects.filter(outcome=LaunchOutcome.REFUSED.value, ended_at__gt=since)
    refused = attempts.filter(**{f"unit__{name}": value for name, value in kind.items()}).order_by("-ended_at")
    return tuple(start for start in (*tasks, *map(_refused_start, refused[:STARTS_READ])) if start is not None)


def _refused_start(row: LaunchAttempt) -> Start | None:
    image = row.pool_seen.get("image", "")
    return Start(row.ended_at, row.unit_id, "", image, StartFault.EVERYWHERE, row.text) if row.ended_at else None


def _start_of(row: Machine) -> Start | None:
    """None while its agent may still join, and if no fault ended it."""
    attempt = row.launched_by
    if attempt is None or row.runs not in attempt.subjects:
        return None
    placed = attempt.base["placed"][attempt.subjects.index(row.runs)]
    if row.last_seen_at is not None:
        return Start(row.created_at, attempt.unit_id, placed["arn"], row.image, None)
    fault = start_fault(row.cloud_reason.partition(":")[0], row.cloud_reason) if row.cloud_ended_at else None
    if fault is None or row.cloud_ended_at is None:
        return None
    return Start(row.cloud_ended_at, attempt.unit_id, placed["arn"], row.image, fault, row.cloud_reason)
