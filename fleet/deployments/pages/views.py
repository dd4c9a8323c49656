"""The list of deployments, the page of one, and the page that scales it after predicting the effect."""

from collections.abc import Mapping
from dataclasses import dataclass

from django.http import Http404
from django.shortcuts import get_object_or_404
from django.urls import reverse

from controlplane.dashboard.actions import (
    Action,
    ActionPage,
    Field,
    Submission,
    Target,
    action_page_view,
)
from controlplane.dashboard.choices import choose_deployment, choose_region
from controlplane.dashboard.events import EventList, deployment_events
from controlplane.dashboard.fragments import Context, Filter, Fragment, Page, PageRequest
from controlplane.forecast_budget import FORECASTS
from controlplane.what_if import plan_scale
from fleet.autoscaling.pages import Autoscaling, Forecasts, Roles, autoscaling_of, forecasts_of, roles_of
from fleet.autoscaling.planning.policy import (
    CELLS_MOST,
    Cells,
    InvalidScaling,
    cells_from_text,
    cells_to_text,
    parse_cells,
)
from fleet.capacity.pages import DayPlanView, day_plan_view
from fleet.cells.pages.data import CellList, cells_of
from fleet.deployments.models import Deployment, DeploymentRegion
from fleet.deployments.pages.data import (
    DeploymentList,
    DeploymentRow,
    DeploymentTypes,
    QuotaTable,
    Shares,
    deployment_find,
    deployment_list,
    deployment_types,
    deployments_placed,
    quota_table,
    shares_of,
)
from fleet.deployments.services.deployments import deployment_scale_or_request
from fleet.load.pages import LoadCharts, Slo, load_charts, slo_of
from fleet.load.selectors import deployment_subject
from fleet.regions.models import Region
from kernel.refusals import InvalidInput, Refusal
from simulator.prediction import Forecast

EVENTS_OF_ONE_DEPLOYMENT = 30
MAX_DIGITS = 5


def _list(request: PageRequest) -> DeploymentList:
    text = request.text("q")
    return deployment_list(deployments_placed(text=text), now=request.now, filtered=bool(text))


def _filter(request: PageRequest) -> Filter:
    return Filter(text_label="Find by name", text_name="q", text=request.text("q"))


def _deployment(request: PageRequest) -> DeploymentRow:
    row = deployment_find(name=request.key, now=request.now)
    if row is None:
        raise Http404(f"There is no deployment {request.key!r}.")
    return row


def _cells(request: PageRequest) -> CellList:
    return cells_of(request.key, request.now)


def _model(request: PageRequest) -> Deployment:
    return get_object_or_404(Deployment, pk=request.key)


def _slo(request: PageRequest) -> Slo:
    return slo_of(request.once(_model), request.now)


def _types(request: PageRequest) -> DeploymentTypes:
    return deployment_types(request.once(_model), request.now)


def _autoscaling(request: PageRequest) -> Autoscaling:
    return autoscaling_of(request.once(_model))


def _shares(request: PageRequest) -> Shares:
    return shares_of(request.once(_model))


def _quotas(request: PageRequest) -> QuotaTable:
    return quota_table()


def _roles(request: PageRequest) -> Roles:
    return roles_of(request.once(_model), request.now)


def _forecasts(request: PageRequest) -> Forecasts:
    return forecasts_of(request.key, request.now)


def _load(request: PageRequest) -> LoadCharts:
    objective_ms = request.once(_model).objective().ttft_ms
    subject = deployment_subject(request.key)
    return load_charts(subject, span=request.text("span"), now=request.now, ttft_objective_ms=objective_ms)


def _events(request: PageRequest) -> EventList:
    return deployment_events(request.key, EVENTS_OF_ONE_DEPLOYMENT)


DEPLOYMENTS = Page(
    section="deployments",
    title="Deployments",
    fragments=(
        Fragment("deployments-table", "", ("deployments", "cells", "load"), "fleet/deployments/table.html", _list),
        Fragment("quotas", "Quotas of teams", ("quotas", "cells"), "fleet/quotas/quotas.html", _quotas),
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
            "fleet/deployments/deployment.html",
            _deployment,
        ),
        Fragment(
            "deployment-types",
            "Instance types",
            ("deployments:{key}", "cells"),
            "fleet/deployments/types.html",
            _types,
        ),
        Fragment("deployment-slo", "Error budget", ("history",), "fleet/load/slo.html", _slo),
        Fragment(
            "deployment-autoscaling",
            "Autoscaling",
            ("autoscaling", "deployments:{key}", "load"),
            "fleet/autoscaling/autoscaling.html",
            _autoscaling,
        ),
        Fragment(
            "deployment-roles",
            "Prefill and decode",
            ("deployments:{key}", "cells", "load"),
            "fleet/autoscaling/roles.html",
            _roles,
        ),
        Fragment(
            "deployment-shares",
            "Share of machines",
            ("deployments:{key}", "quotas"),
            "fleet/quotas/shares.html",
            _shares,
        ),
        Fragment("deployment-forecast", "Forecast", ("forecast",), "fleet/autoscaling/forecast.html", _forecasts),
        Fragment("deployment-load", "Load", ("history",), "fleet/load/charts.html", _load),
        Fragment("deployment-actions", "Actions", (), "fleet/deployments/actions.html", _deployment),
        Fragment("deployment-cells", "Cells", ("cells", "load"), "fleet/cells/table.html", _cells),
        Fragment("deployment-events", "Events", ("events",), "dashboard/events/list.html", _events),
    ),
    charts=True,
)


@dataclass(frozen=True, slots=True)
class RegionCells:
    """How many cells a deployment wants in a region now, and how many the form sets, or between which numbers."""

    region: str
    now: Cells
    new: Cells

    @property
    def field(self) -> str:
        """The form's field for this region."""
        return f"cells-{self.region}"

    @property
    def value(self) -> str:
        return cells_to_text(self.new)


def _cells_by_region(deployment: Deployment, form: Submission | None) -> tuple[RegionCells, ...]:
    """Every region; without a form, as it is.

    Raises:
        InvalidInput: a field is no possible number of cells.
    """
    places = {place.region_id: place for place in DeploymentRegion.objects.filter(deployment=deployment)}
    cells = []
    for region in Region.objects.values_list("name", flat=True):
        place = places.get(region)
        now = place.stated(plans_roles=deployment.plans_roles) if place else 0
        text = form.text(f"cells-{region}", cells_to_text(now)) if form else cells_to_text(now)
        cells.append(RegionCells(region, now, _stated(region, text)))
    return tuple(cells)


def _stated(region: str, text: str) -> Cells:
    stated = cells_from_text(text)
    if stated is None:
        raise InvalidInput(field="regions", rule="range", message=_impossible(region, text))
    try:
        return parse_cells(stated, f"the cells in {region}")
    except InvalidScaling as wrong:
        message = _impossible(region, text) if isinstance(stated, int) else str(wrong)
        raise InvalidInput(field="regions", rule="range", message=message) from None


def _impossible(region: str, text: str) -> str:
    rule = f"the number must be from 0 to {CELLS_MOST}, or a range such as 2-8, or cells by role such as 1p+3d"
    return f"{text[:20]!r} cells in {region}; {rule}"


def _changes(cells: tuple[RegionCells, ...]) -> dict[str, Cells]:
    return {one.region: one.new for one in cells if one.new != one.now}


def _scale(form: Submission, deployment: Deployment) -> object:
    changes = _changes(_cells_by_region(deployment, form))
    return deployment_scale_or_request(name=deployment.pk, cells=changes, actor=form.actor, now=form.now)


def _scale_form(form: Submission, deployment: Deployment) -> Context:
    try:
        cells = _cells_by_region(deployment, form)
    except Refusal:
        cells = _cells_by_region(deployment, None)
    return {"deployment": deployment, "regions": cells}


def _forecast(form: Submission, deployment: Deployment, cells: Mapping[str, Cells]) -> Forecast:
    with FORECASTS.take(form.request.user.get_username()) as has_time:
        return plan_scale(deployment=deployment.pk, cells=cells, now=form.now, has_time=has_time)


def _scale_forecast(form: Submission, deployment: Deployment) -> Context:
    """What the form's numbers would do; nothing if they change none."""
    cells = _cells_by_region(deployment, form)
    if not (changes := _changes(cells)):
        return {}
    fields = tuple(Field(one.field, kind="hidden", value=one.value) for one in cells)
    return {
        "forecast": _forecast(form, deployment, changes),
        "confirmation": SCALE.confirmation(deployment, reverse("deployment-scale", args=(deployment.pk,)), "", fields),
    }


TARGET = Target(
    noun="deployment",
    find=lambda name: get_object_or_404(Deployment, pk=name),
    name=lambda deployment: deployment.pk,
    url=lambda deployment: reverse("deployment", args=(deployment.pk,)),
    deployment=lambda deployment: deployment.pk,
)
SCALE = Action(target=TARGET, name="scale", label="Scale", run=_scale, typed=TARGET.name)
deployment_scale_page = action_page_view(
    ActionPage(
        action=SCALE,
        template="fleet/deployments/scale.html",
        context=_scale_form,
        predict=_scale_forecast,
    )
)


# The plan of the day: what the fleet is going to have, for whom, and what it costs.


def _plan(request: PageRequest) -> DayPlanView:
    return day_plan_view(deployment=request.text("deployment"), region=request.text("region"), now=request.now)


def _plan_filter(request: PageRequest) -> Filter:
    choices = (choose_deployment(request), choose_region(request))
    return Filter(text_label="", text_name="", text="", choices=choices)


DAY_PLAN = Page(
    section="deployments",
    title="Plan of the day",
    charts=True,
    fragments=(Fragment("day-plan", "", ("capacity-plan",), "fleet/capacity/plan.html", _plan),),
    narrow=_plan_filter,
)
