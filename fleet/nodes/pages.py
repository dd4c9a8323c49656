"""The list of nodes, and the page of one with its last report, deep checks and actions. Services decide."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

from django.db.models import Q, QuerySet
from django.template.defaultfilters import filesizeformat
from django.urls import reverse

from controlplane.dashboard.actions import (
    WHY,
    Action,
    ActionMenu,
    Field,
    Run,
    Submission,
    Target,
    action_menu,
    action_view,
)
from controlplane.dashboard.charts import Marker
from controlplane.dashboard.choices import choose, choose_region, choose_state
from controlplane.dashboard.events import EventList, chart_markers, node_events
from controlplane.dashboard.fragments import Filter, Fragment, Page, PageRequest, deferred, found_or_404
from controlplane.dashboard.lists import Column, List
from engine_agent.protocol.states import MemberRole
from fleet.cells.models import Cell, CellMember
from fleet.cells.pages.data import cell_find, drain_effect
from fleet.cells.services import DRAINABLE
from fleet.faults.planning.views import Rung
from fleet.faults.services.incidents import is_replaced
from fleet.faults.services.repairs import repair_request, why_no_repair
from fleet.load.pages import Charts, load_charts, report_of, silent_s, use_charts
from fleet.load.selectors import cell_subject, node_subject
from fleet.machines.selectors import NodeHost, hosts_running
from fleet.machines.services.revocation import node_revoke
from fleet.nodes.models import Node, NodeReport
from fleet.nodes.services.nodes import (
    REPLACEABLE,
    node_checks_request,
    node_cordon,
    node_drain,
    node_replacement_request,
    node_uncordon,
)
from fleet.reconcile.planning.states import CellState, NodeState
from fleet.recorder.pages.past import PAST_NODES
from fleet.recorder.pages.why import time_line_fragment, why_fragment
from fleet.recorder.planning.reasons import Subject
from kernel.time_ranges import OF_LOAD

SPARE = "spare"
SHOWN_ELSEWHERE = frozenset(
    {"accelerators", "checks", "builds", "prefetched", "compile_caches", "offered_caches", "host"}
)
"""Members of a report's telemetry that other parts of the page show."""


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
    def facts(self) -> dict[str, Any]:
        """What the agent reported of its host and that no other part of the page shows, by name; sizes with a unit."""
        stated = self.report.telemetry if self.report is not None else {}
        return {
            name.removesuffix("_bytes").replace("_", " ").capitalize(): (
                filesizeformat(value) if name.endswith("_bytes") and isinstance(value, int) else value
            )
            for name, value in stated.items()
            if name not in SHOWN_ELSEWHERE
        }

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


LIST_COLUMNS = (
    "region", "instance_type", "state", "cordoned", "port_base", "state_since",
    "member__cell", "member__rank", "report__state", "report__last_seen_at",
    "report__connected", "report__quiet",
)  # fmt: skip
"""Columns of a list. Reading all columns would take longer than rendering."""


def _last_seen(row: NodeRow) -> datetime | None:
    return row.report.last_seen_at if row.report else None


def _listed(request: PageRequest) -> "QuerySet[Node]":
    """Leaves out retired nodes unless `state` selects them."""
    nodes = Node.objects.select_related("report", "member").only(*LIST_COLUMNS)
    state, text = request.text("state"), request.text("q")
    nodes = nodes.filter(state=state) if state else nodes.exclude(state=NodeState.RETIRED)
    if region := request.text("region"):
        nodes = nodes.filter(region_id=region)
    if role := request.text("role"):
        nodes = nodes.filter(_has_role(role))
    if text:
        nodes = nodes.filter(Q(id__icontains=text) | Q(member__cell__id__icontains=text) | Q(reason__icontains=text))
    return nodes


NODE_LIST: List[NodeRow] = List(
    name="nodes",
    columns=(
        Column("node", "Node", lambda row: row.node.pk, ("id",)),
        Column("state", "State", lambda row: row.node.state, ("state", "cordoned")),
        Column("role", "Role", lambda row: row.role, ("member__rank",)),
        Column("cell", "Cell", lambda row: row.member.cell_id if row.member else "", ("member__cell_id",), "wide"),
        Column("region", "Region", lambda row: row.node.region_id, ("region_id",), "wide"),
        Column("type", "Type", lambda row: row.node.instance_type_id, ("instance_type_id",), "wide"),
        Column("engine", "Engine", lambda row: row.report.state if row.report else "", ("report__state",), "wide"),
        Column("ports", "Ports", lambda row: row.node.port_base, ("port_base",), "wide number"),
        Column("report", "Last report", _last_seen, ("report__last_seen_at",), "wide number", is_newest_first=True),
        Column("since", "In this state", lambda row: row.node.state_since, ("state_since",), "wide number"),
    ),
    query=_listed,
    rows=lambda nodes, now: [node_row(node, now) for node in nodes],
    order=("region__position", "region_id", "member__cell_id", "member__rank", "id"),
    filters=("region", "state", "role", "q"),
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


def _node_actions(request: PageRequest) -> ActionMenu:
    return action_menu(request.once(_node).node, request.caller.access, *NODE_ACTIONS)


NODES = Page(
    section="nodes",
    title="Nodes",
    fragments=(Fragment("nodes-table", "", ("nodes", "cells"), "fleet/nodes/table.html", NODE_LIST.page),),
    narrow=_node_filter,
    past=PAST_NODES,
    lists=(NODE_LIST,),
)


def _markers(request: PageRequest) -> tuple[Marker, ...]:
    member = request.once(_node).member
    deployment, cell = (member.cell.deployment_id, member.cell_id) if member else ("", "")
    return chart_markers(request.span, deployment=deployment, cell=cell, node=request.key)


def _use(request: PageRequest) -> Charts:
    subject = node_subject(request.key)
    return use_charts(subject, span=request.span, now=request.now, markers=request.once(_markers))


def _cell_load(request: PageRequest) -> Charts:
    """Empty while the node is in no cell."""
    if (member := request.once(_node).member) is None:
        return Charts((), ())
    subject = cell_subject(member.cell_id)
    return load_charts(subject, span=request.span, now=request.now, markers=request.once(_markers))


NODE = Page(
    section="nodes",
    title="",
    actions=_node_actions,
    fragments=(
        Fragment("node", "", ("nodes:{key}", "cells"), "fleet/nodes/node.html", _node),
        time_line_fragment(Subject.NODE),
        why_fragment(Subject.NODE),
        *deferred(
            Fragment("node-use", "Machine and accelerators", ("history",), "fleet/load/charts.html", _use),
            Fragment("node-load", "Load of its cell", ("history",), "fleet/load/charts.html", _cell_load),
        ),
        Fragment("node-report", "Last report", ("nodes:{key}", "load"), "fleet/nodes/report.html", _node),
        Fragment("node-checks", "Deep checks", ("nodes:{key}", "load"), "fleet/nodes/checks.html", _node),
        Fragment("node-events", "Events", ("events",), "dashboard/events/list.html", _events_of_node),
    ),
    charts=True,
    ranges=OF_LOAD,
)


# Actions on one node.


def _find(node_id: str) -> Node:
    return found_or_404(_nodes().select_related("region").filter(pk=node_id).first(), f"node {node_id!r}")


def _calls(service: Callable[..., object]) -> Run[Node]:
    def run(form: Submission, node: Node) -> None:
        service(node_id=node.pk, actor=form.actor, now=form.now, why=form.text("why"))

    return run


def _check(form: Submission, node: Node) -> None:
    others = form.text("with_nodes").replace(",", " ").split()
    node_checks_request(node_id=node.pk, actor=form.actor, now=form.now, why=form.text("why"), with_nodes=others)


def _cell_of(node: Node) -> Cell | None:
    member: CellMember | None = getattr(node, "member", None)
    return member.cell if member else None


def _if_retired(node: Node) -> str:
    return "This node is retired." if node.state == NodeState.RETIRED else ""


def _why_not_cordon(node: Node) -> str:
    return _if_retired(node) or ("It is cordoned already." if node.cordoned else "")


def _why_not_uncordon(node: Node) -> str:
    if node.state == NodeState.FAULTY and _cell_of(node) is not None:
        return "It is faulty and still in a cell. Wait until its replacement has taken its place."
    return _if_retired(node) or ("" if node.cordoned else "It is not cordoned.")


def _why_not_drain(node: Node) -> str:
    cell = _cell_of(node)
    if cell is not None and cell.state != CellState.DRAINING and CellState(cell.state) not in DRAINABLE:
        return f"Its cell is {cell.state}. A cell can be drained when it is ready."
    return _if_retired(node)


def _why_not_replace(node: Node) -> str:
    if NodeState(node.state) not in REPLACEABLE:
        return f"It is {node.state}. A node can be replaced when it is ready or suspect."
    return "It is being replaced already." if is_replaced(node.pk) else ""


def _why_not_check(node: Node) -> str:
    joined = node.state not in {NodeState.RETIRED, NodeState.JOINING, NodeState.LOST}
    return "" if joined else f"It is {node.state}. Only nodes that have joined can be checked."


def _uncordon_effect(node: Node, now: datetime) -> str:
    returns = "It becomes ready, and its incidents close. " if node.state == NodeState.FAULTY else ""
    return f"{returns}Cells may be placed on it again. A scheduled replacement is cancelled."


def _drain_effect(node: Node, now: datetime) -> str:
    cell = _cell_of(node)
    row = cell_find(cell_id=cell.pk, now=now) if cell else None
    if row is None:
        return "It is in no cell. No cell is placed on it until it is uncordoned. Its machine stays."
    return f"It is cordoned, and its cell {row.cell.pk} is drained. {drain_effect(row, now)} Its machine stays."


def _replace_effect(node: Node, now: datetime) -> str:
    cell = _cell_of(node)
    if cell is None:
        return "It is cordoned and retired, and its machine is terminated. It is in no cell, so no request is affected."
    return (
        f"Its cell {cell.pk} is drained when the disruption ledger allows, and starts again with another node. "
        "Requests in flight may finish. Then its machine is terminated."
    )


def _check_effect(node: Node, now: datetime) -> str:
    if cell := _cell_of(node):
        return f"It is in cell {cell.pk}, so only its memory and disk are checked. A failure counts as a fault."
    return "Its memory, disk and accelerators are checked, and links to the spares below. A failure counts as a fault."


def _repair_effect(node: Node, now: datetime) -> str:
    return "It is out of use until its deep checks pass. If they fail, it is replaced. It is in no cell."


def _revoke_effect(node: Node, now: datetime) -> str:
    cell = _cell_of(node)
    moves = f" Its cell {cell.pk} is lost and starts again on other nodes; its requests are cut." if cell else ""
    return f"Its credential and certificates are revoked, and its connection closes within 5 s.{moves} This is final."


def _why_not(rung: Rung) -> Callable[[Node], str]:
    def why_not(node: Node) -> str:
        reason = why_no_repair(node, rung)
        return f"{reason[:1].upper()}{reason[1:]}." if reason else ""

    return why_not


TARGET = Target(
    noun="node",
    find=_find,
    name=lambda node: node.pk,
    url=lambda node: reverse("node", args=(node.pk,)),
    action_url=lambda node, name: reverse("node-action", args=(node.pk, name)),
)
CORDON = Action(
    target=TARGET,
    name="cordon",
    label="Cordon",
    run=_calls(node_cordon),
    fields=(WHY,),
    effect=lambda node, now: "It gets no further cell. The cell on it keeps running.",
    why_not=_why_not_cordon,
)
UNCORDON = Action(
    target=TARGET,
    name="uncordon",
    label="Uncordon",
    run=_calls(node_uncordon),
    fields=(WHY,),
    effect=_uncordon_effect,
    why_not=_why_not_uncordon,
)
DRAIN = Action(
    target=TARGET,
    name="drain",
    label="Drain",
    run=_calls(node_drain),
    fields=(WHY,),
    effect=_drain_effect,
    why_not=_why_not_drain,
)
REPLACE = Action(
    target=TARGET,
    name="replace",
    label="Replace",
    run=_calls(node_replacement_request),
    typed=TARGET.name,
    fields=(WHY,),
    effect=_replace_effect,
    why_not=_why_not_replace,
)
NODE_ACTIONS = (
    CORDON,
    UNCORDON,
    DRAIN,
    REPLACE,
    Action(
        target=TARGET,
        name="check",
        label="Deep check",
        submit="Start the checks",
        run=_check,
        fields=(Field("with_nodes", "Also check links to these spares"), WHY),
        effect=_check_effect,
        why_not=_why_not_check,
        words=("check",),
    ),
    *(
        Action(
            target=TARGET,
            name=name,
            label=label,
            run=_calls(partial(repair_request, rung=rung)),
            fields=(WHY,),
            effect=_repair_effect,
            why_not=_why_not(rung),
        )
        for name, label, rung in (("reset", "Reset devices", Rung.RESET), ("reboot", "Reboot machine", Rung.REBOOT))
    ),
    Action(
        target=TARGET,
        name="revoke",
        label="Revoke certificate",
        run=_calls(node_revoke),
        typed=TARGET.name,
        fields=(WHY,),
        effect=_revoke_effect,
        why_not=_if_retired,
    ),
)
node_action = action_view(*NODE_ACTIONS)
