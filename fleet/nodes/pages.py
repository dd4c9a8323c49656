"""The list of nodes, and the page of one with its last report and deep checks. Reads only."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from django.db.models import Q, QuerySet

from controlplane.dashboard.choices import choose, choose_region, choose_state
from controlplane.dashboard.events import EventList, node_events
from controlplane.dashboard.fragments import Filter, Fragment, Page, PageRequest, found_or_404
from engine_agent.protocol.states import MemberRole
from fleet.cells.models import CellMember
from fleet.load.pages import report_of, silent_s
from fleet.machines.selectors import NodeHost, hosts_running
from fleet.nodes.models import Node, NodeReport
from fleet.reconcile.planning.states import NodeState

NODES_SHOWN = 100
SPARE = "spare"


@dataclass(frozen=True, slots=True)
class NodeRow:
    """A node. `role`: leader, follower or spare; `silent_s`: set while its agent does not report; `host`: its machine,
    only on its own page."""

    node: Node
    role: str
    member: CellMember | None
    report: NodeReport | None
    silent_s: float | None
    host: NodeHost | None = None

    @property
    def checks(self) -> Mapping[str, Any] | None:
        found = self.report.telemetry.get("checks") if self.report is not None else None
        return found if isinstance(found, dict) else None

    @property
    def checked_at(self) -> datetime | None:
        """When the checks ended by the node's clock, or None while they run."""
        ended = self.checks.get("ended_at") if self.checks else None
        return datetime.fromtimestamp(ended, UTC) if isinstance(ended, int | float) else None

    @property
    def accelerators(self) -> str:
        """For example "2 x H100" for `nvidia 0: H100`, `nvidia 1: H100`."""
        alike = Counter(line.partition(": ")[2] or line for line in self.node.accelerators)
        return ", ".join(f"{many} x {name}" for name, many in alike.items()) or "none found"


@dataclass(frozen=True, slots=True)
class NodeList:
    rows: tuple[NodeRow, ...]
    more: bool
    filtered: bool
    page: int


def node_list(
    *, now: datetime, region: str = "", state: str = "", role: str = "", text: str = "", page: int = 1
) -> NodeList:
    """Nodes by region, those in cells first, in pages from 1. Leaves out retired nodes unless `state` selects them."""
    nodes = _ordered().filter(state=state) if state else _ordered().exclude(state=NodeState.RETIRED)
    if region:
        nodes = nodes.filter(region_id=region)
    if role:
        nodes = nodes.filter(_has_role(role))
    if text:
        nodes = nodes.filter(Q(id__icontains=text) | Q(member__cell__id__icontains=text) | Q(reason__icontains=text))
    fetched = list(nodes[(page - 1) * NODES_SHOWN : page * NODES_SHOWN + 1])
    rows = tuple(node_row(node, now) for node in fetched[:NODES_SHOWN])
    return NodeList(rows, more=len(fetched) > NODES_SHOWN, filtered=bool(region or state or role or text), page=page)


def _ordered() -> "QuerySet[Node]":
    return (
        _nodes()
        .defer("report__load", "report__telemetry", "report__steps", "report__health")
        .order_by("region__position", "region_id", "member__cell_id", "member__rank", "id")
    )


def node_find(*, node_id: str, now: datetime) -> NodeRow | None:
    node = _nodes().filter(pk=node_id).first()
    return replace(node_row(node, now), host=hosts_running([node_id]).get(node_id)) if node else None


def node_row(node: Node, now: datetime) -> NodeRow:
    member: CellMember | None = getattr(node, "member", None)
    report = report_of(node)
    role = member.role.value if member else SPARE
    return NodeRow(node=node, role=role, member=member, report=report, silent_s=silent_s(report, now))


def _nodes() -> "QuerySet[Node]":
    return Node.objects.select_related("report", "member", "member__cell")


def _has_role(role: str) -> Q:
    if role == MemberRole.LEADER:
        return Q(member__rank=0)
    if role == MemberRole.FOLLOWER:
        return Q(member__rank__gt=0)
    return Q(member=None)


EVENTS_OF_ONE_NODE = 30


def _node_rows(request: PageRequest) -> NodeList:
    return node_list(
        now=request.now,
        region=request.text("region"),
        state=request.text("state"),
        role=request.text("role"),
        text=request.text("q"),
        page=request.page,
    )


def _node_filter(request: PageRequest) -> Filter:
    choices = (
        choose_region(request),
        choose_state(request, NodeState, "every live state"),
        choose(request, "role", "every role", (MemberRole.LEADER, MemberRole.FOLLOWER, SPARE)),
    )
    return Filter(text_label="Find by node, cell or reason", text_name="q", text=request.text("q"), choices=choices)


def _node(request: PageRequest) -> NodeRow:
    return found_or_404(node_find(node_id=request.key, now=request.now), f"node {request.key!r}")


def _events_of_node(request: PageRequest) -> EventList:
    return node_events(request.key, EVENTS_OF_ONE_NODE)


NODES = Page(
    section="nodes",
    title="Nodes",
    fragments=(Fragment("nodes-table", "", ("nodes", "cells"), "fleet/nodes/table.html", _node_rows),),
    narrow=_node_filter,
)

NODE = Page(
    section="nodes",
    title="",
    fragments=(
        Fragment("node", "", ("nodes:{key}", "cells"), "fleet/nodes/node.html", _node),
        Fragment("node-report", "Last report", ("nodes:{key}", "load"), "fleet/nodes/report.html", _node),
        Fragment("node-checks", "Deep checks", ("nodes:{key}", "load"), "fleet/nodes/checks.html", _node),
        Fragment("node-events", "Events", ("events",), "dashboard/events/list.html", _events_of_node),
    ),
)
