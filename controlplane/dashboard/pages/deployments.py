"""The list of deployments and the page of one deployment."""

from django.http import Http404

from controlplane.dashboard.fragments import Asked, Filter, Fragment, Page
from controlplane.dashboard.selectors.cells import CellList, cells_of
from controlplane.dashboard.selectors.deployments import DeploymentList, DeploymentRow, deployment_find, deployment_list
from controlplane.dashboard.selectors.events import EventList, deployment_events

EVENTS_OF_ONE_DEPLOYMENT = 30


def _list(asked: Asked) -> DeploymentList:
    return deployment_list(now=asked.now, text=asked.word("q"))


def _filter(asked: Asked) -> Filter:
    return Filter(text_label="Find by name", text_name="q", text=asked.word("q"))


def _deployment(asked: Asked) -> DeploymentRow:
    row = deployment_find(name=asked.key, now=asked.now)
    if row is None:
        raise Http404(f"There is no deployment {asked.key!r}.")
    return row


def _cells(asked: Asked) -> CellList:
    return cells_of(asked.key, asked.now)


def _events(asked: Asked) -> EventList:
    return deployment_events(asked.key, EVENTS_OF_ONE_DEPLOYMENT)


DEPLOYMENTS = Page(
    section="deployments",
    title="Deployments",
    fragments=(
        Fragment("deployments-table", "", ("deployments", "cells", "load"), "dashboard/deployments/table.html", _list),
    ),
    narrow=_filter,
)

DEPLOYMENT = Page(
    section="deployments",
    title="",
    fragments=(
        Fragment(
            "deployment",
            "",
            ("deployments:{key}", "cells", "load"),
            "dashboard/deployments/deployment.html",
            _deployment,
        ),
        Fragment("deployment-cells", "Cells", ("cells", "load"), "dashboard/cells/table.html", _cells),
        Fragment("deployment-events", "Events", ("events",), "dashboard/events/list.html", _events),
    ),
)
