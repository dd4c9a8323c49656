"""The overview, top down: what is broken, what is moving, are users fine, every cell, the last events."""

from controlplane.dashboard.fragments import Fragment, Page, PageRequest
from controlplane.dashboard.pages.shell import health
from controlplane.dashboard.selectors.deployments import DeploymentList, Placed, deployment_list, deployments_placed
from controlplane.dashboard.selectors.events import EventList, event_list
from controlplane.dashboard.selectors.nodes import NodeList, nodes_by_urgency
from controlplane.dashboard.selectors.overview import Broken, MapRegion, Moving, broken, fleet_map, moving
from fleet.selectors.history import FLEET, Point, last_windows

NODES_ON_OVERVIEW = 40
EVENTS_ON_OVERVIEW = 15


def _broken(request: PageRequest) -> Broken:
    return broken(request.once(health))


def _moving(request: PageRequest) -> Moving:
    return moving()


def _placed(request: PageRequest) -> tuple[Placed, ...]:
    return deployments_placed()


def _users(request: PageRequest) -> DeploymentList:
    return deployment_list(request.once(_placed), now=request.now)


def _rates(request: PageRequest) -> Point | None:
    """Load and latency of the whole fleet in its last window of 15 s."""
    return last_windows([FLEET], request.now).get(FLEET)


def _map(request: PageRequest) -> tuple[MapRegion, ...]:
    return fleet_map(request.once(_placed))


def _nodes(request: PageRequest) -> NodeList:
    return nodes_by_urgency(now=request.now, limit=NODES_ON_OVERVIEW)


def _events(request: PageRequest) -> EventList:
    return event_list(limit=EVENTS_ON_OVERVIEW)


OVERVIEW = Page(
    section="overview",
    title="Overview",
    fragments=(
        Fragment("broken", "Broken", ("incidents", "cells"), "dashboard/overview/broken.html", _broken),
        Fragment("moving", "Moving", ("cells", "nodes"), "dashboard/overview/moving.html", _moving),
        Fragment("rates", "Users", ("history",), "dashboard/overview/rates.html", _rates),
        Fragment("users", "", ("load", "cells", "deployments"), "dashboard/deployments/table.html", _users),
        Fragment("map", "Cells", ("cells", "deployments"), "dashboard/overview/map.html", _map),
        Fragment("nodes", "Nodes", ("nodes", "cells"), "dashboard/overview/nodes.html", _nodes),
        Fragment("events", "Last events", ("events",), "dashboard/events/list.html", _events),
    ),
)
