"""The list of nodes and the page of one node."""

from django.http import Http404

from controlplane.dashboard.fragments import Filter, Fragment, Page, PageRequest
from controlplane.dashboard.pages.agents import AGENTS
from controlplane.dashboard.pages.choices import choose, choose_region, choose_state
from controlplane.dashboard.pages.machines import MACHINES
from controlplane.dashboard.selectors.events import EventList, node_events
from controlplane.dashboard.selectors.nodes import SPARE, NodeList, NodeRow, node_find, node_list
from engine_agent.protocol.states import MemberRole
from fleet.planning.states import NodeState

EVENTS_OF_ONE_NODE = 30


def _list(request: PageRequest) -> NodeList:
    return node_list(
        now=request.now,
        region=request.text("region"),
        state=request.text("state"),
        role=request.text("role"),
        text=request.text("q"),
        page=request.page,
    )


def _filter(request: PageRequest) -> Filter:
    choices = (
        choose_region(request),
        choose_state(request, NodeState, "every live state"),
        choose(request, "role", "every role", (MemberRole.LEADER, MemberRole.FOLLOWER, SPARE)),
    )
    return Filter(text_label="Find by node, cell or reason", text_name="q", text=request.text("q"), choices=choices)


def _node(request: PageRequest) -> NodeRow:
    row = node_find(node_id=request.key, now=request.now)
    if row is None:
        raise Http404(f"There is no node {request.key!r}.")
    return row


def _events(request: PageRequest) -> EventList:
    return node_events(request.key, EVENTS_OF_ONE_NODE)


NODES = Page(
    section="nodes",
    title="Nodes",
    fragments=(Fragment("nodes-table", "", ("nodes", "cells"), "dashboard/nodes/table.html", _list), MACHINES, AGENTS),
    narrow=_filter,
)

NODE = Page(
    section="nodes",
    title="",
    fragments=(
        Fragment("node", "", ("nodes:{key}", "cells"), "dashboard/nodes/node.html", _node),
        Fragment("node-report", "Last report", ("nodes:{key}", "load"), "dashboard/nodes/report.html", _node),
        Fragment("node-checks", "Deep checks", ("nodes:{key}", "load"), "dashboard/nodes/checks.html", _node),
        Fragment("node-events", "Events", ("events",), "dashboard/events/list.html", _events),
    ),
)
