"""The list of deployments and the page of one deployment."""

from django.http import Http404

from controlplane.dashboard.fragments import Asked, Filter, Fragment, Page
from controlplane.dashboard.selectors.cells import CellList, cells_of
from controlplane.dashboard.selectors.deployments import (
    DeploymentList,
    DeploymentRow,
    deployment_find,
    deployment_list,
    deployments_placed,
)
from controlplane.dashboard.selectors.events import EventList, deployment_events
from controlplane.dashboard.selectors.load_charts import LoadCharts, Slo, load_charts, slo_of
from fleet.models import Deployment
from fleet.selectors.history import deployment_subject

EVENTS_OF_ONE_DEPLOYMENT = 30


def _list(asked: Asked) -> DeploymentList:
    text = asked.word("q")
    return deployment_list(deployments_placed(text=text), now=asked.now, filtered=bool(text))


def _filter(asked: Asked) -> Filter:
    return Filter(text_label="Find by name", text_name="q", text=asked.word("q"))


def _deployment(asked: Asked) -> DeploymentRow:
    row = deployment_find(name=asked.key, now=asked.now)
    if row is None:
        raise Http404(f"There is no deployment {asked.key!r}.")
    return row


def _cells(asked: Asked) -> CellList:
    return cells_of(asked.key, asked.now)


def _known(asked: Asked) -> Deployment:
    found = Deployment.objects.filter(pk=asked.key).first()
    if found is None:
        raise Http404(f"There is no deployment {asked.key!r}.")
    return found


def _slo(asked: Asked) -> Slo:
    return slo_of(asked.once(_known), asked.now)


def _load(asked: Asked) -> LoadCharts:
    objective_ms = asked.once(_known).objective().ttft_ms
    subject = deployment_subject(asked.key)
    return load_charts(subject, span=asked.word("span"), now=asked.now, ttft_objective_ms=objective_ms)


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
        Fragment("deployment-slo", "Error budget", ("history",), "dashboard/load/slo.html", _slo),
        Fragment("deployment-load", "Load", ("history",), "dashboard/load/charts.html", _load),
        Fragment("deployment-asks", "What you can do", (), "dashboard/deployments/asks.html", _deployment),
        Fragment("deployment-cells", "Cells", ("cells", "load"), "dashboard/cells/table.html", _cells),
        Fragment("deployment-events", "Events", ("events",), "dashboard/events/list.html", _events),
    ),
    charts=True,
)
