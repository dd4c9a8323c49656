"""The last lines of the logs of a cell's nodes, as their agents sent them."""

from dataclasses import dataclass
from datetime import datetime

from engine_agent.protocol.states import MemberRole
from fleet.models import CellMember, NodeLog


@dataclass(frozen=True, slots=True)
class NodeLines:
    """One node's logs: name -> lines, oldest first. `said_at` None: its agent has not sent any yet.

    `is_of_cell`: they are of the cell's present generation, and not of what ran on the node before.
    """

    node: str
    rank: int
    role: MemberRole
    said_at: datetime | None
    is_of_cell: bool
    logs: dict[str, list[str]]


def cell_log_lines(cell_id: str) -> tuple[NodeLines, ...]:
    """By rank, in one query; nothing for a cell without nodes."""
    members = CellMember.objects.filter(cell_id=cell_id).select_related("cell", "node__log").order_by("rank")
    return tuple(_lines(member) for member in members)


def _lines(member: CellMember) -> NodeLines:
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
