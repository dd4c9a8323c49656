"""The list of nodes and the page of one node."""

from django.http import Http404

from controlplane.dashboard.fragments import Asked, Filter, Fragment, Page
from controlplane.dashboard.pages.choices import choose, choose_region, choose_state
from controlplane.dashboard.selectors.events import EventList, node_events
from controlplane.dashboard.selectors.nodes import SPARE, NodeList, NodeRow, node_find, node_list
from engine_agent.protocol.states import MemberRole
from fleet.planning.states import NodeState

EVENTS_OF_ONE_NODE = 30


def _list(asked: Asked) -> NodeList:
    return node_list(
        now=asked.now,
        region=asked.word("region"),
        state=asked.word("state"),
        role=asked.word("role"),
        text=asked.word("q"),
        page=asked.page,
    )


def _filter(asked: Asked) -> Filter:
    choices = (
        choose_region(asked),
        choose_state(asked, NodeState, "every live state"),
        choose(asked, "role", "every role", (MemberRole.LEADER, MemberRole.FOLLOWER, SPARE)),
    )
    return Filter(text_label="Find by node, cell or reason", text_name="q", text=asked.word("q"), choices=choices)


def _node(asked: Asked) -> NodeRow:
    row = node_find(node_id=asked.key, now=asked.now)
    if row is None:
        raise Http404(f"There is no node {asked.key!r}.")
    return row


def _events(asked: Asked) -> EventList:
    return node_events(asked.key, EVENTS_OF_ONE_NODE)


NODES = Page(
    section="nodes",
    title="Nodes",
    fragments=(Fragment("nodes-table", "", ("nodes", "cells"), "dashboard/nodes/table.html", _list),),
    narrow=_filter,
)

NODE = Page(
    section="nodes",
    title="",
    fragments=(
        Fragment("node", "", ("nodes:{key}", "cells"), "dashboard/nodes/node.html", _node),
        Fragment("node-report", "Last report", ("nodes:{key}", "load"), "dashboard/nodes/report.html", _node),
        Fragment("node-events", "Events", ("events",), "dashboard/events/list.html", _events),
    ),
)
