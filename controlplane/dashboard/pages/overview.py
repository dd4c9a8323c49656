"""The overview, top down: what is broken, what is moving, are users fine, where every cell is, what happened."""

from controlplane.dashboard.fragments import Asked, Fragment, Page
from controlplane.dashboard.pages.shell import whole_fleet
from controlplane.dashboard.selectors.deployments import DeploymentList, Placed, deployment_list, deployments_placed
from controlplane.dashboard.selectors.events import EventList, event_list
from controlplane.dashboard.selectors.nodes import NodeList, nodes_to_look_at
from controlplane.dashboard.selectors.overview import Broken, MapRegion, Moving, broken, fleet_map, moving
from fleet.selectors.history import FLEET, Point, last_windows

NODES_ON_OVERVIEW = 40
EVENTS_ON_OVERVIEW = 15


def _broken(asked: Asked) -> Broken:
    return broken(asked.once(whole_fleet))


def _moving(asked: Asked) -> Moving:
    return moving()


def _placed(asked: Asked) -> tuple[Placed, ...]:
    return deployments_placed()


def _users(asked: Asked) -> DeploymentList:
    return deployment_list(asked.once(_placed), now=asked.now)


def _rates(asked: Asked) -> Point | None:
    """What users of the whole fleet got in the last quarter of a minute that was looked at."""
    return last_windows([FLEET], asked.now).get(FLEET)


def _map(asked: Asked) -> tuple[MapRegion, ...]:
    return fleet_map(asked.once(_placed))


def _nodes(asked: Asked) -> NodeList:
    return nodes_to_look_at(now=asked.now, limit=NODES_ON_OVERVIEW)


def _events(asked: Asked) -> EventList:
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
