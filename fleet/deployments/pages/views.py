"""The list of deployments, the page of one, the page that scales it after a forecast, and the day plan. Services
decide."""

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlencode

from django.shortcuts import get_object_or_404
from django.urls import reverse

from controlplane.dashboard.actions import (
    Action,
    ActionMenu,
    ActionPage,
    Field,
    Submission,
    Target,
    action_page_view,
    menu_item,
)
from controlplane.dashboard.charts import Marker
from controlplane.dashboard.choices import choose_deployment, choose_region
from controlplane.dashboard.events import EventList, chart_markers, deployment_events
from controlplane.dashboard.fragments import Context, Filter, Fragment, Page, PageRequest, deferred, found_or_404
from controlplane.dashboard.lists import ListPage
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
from fleet.cells.pages.data import CellSummary, cells_of
from fleet.chains.selectors import ChainView, chain_view
from fleet.deployments.models import Deployment, DeploymentRegion
from fleet.deployments.pages.data import (
    DEPLOYMENT_LIST,
    QUOTA_LIST,
    DeploymentRow,
    DeploymentTypes,
    Shares,
    deployment_find,
    deployment_types,
    shares_of,
)
from fleet.deployments.services.deployments import deployment_scale_or_request
from fleet.load.pages import Charts, Slo, load_charts, slo_of, use_charts
from fleet.load.selectors import deployment_subject
from fleet.recorder.pages.past import PAST_DEPLOYMENTS
from fleet.recorder.pages.why import time_line_fragment, why_fragment
from fleet.recorder.planning.reasons import Subject
from fleet.regions.models import Region
from fleet.requests.pages import Place, request_fragments
from kernel.refusals import InvalidInput, Refusal
from kernel.time_ranges import OF_LOAD
from simulator.prediction import Forecast
from traffic.streams.pages import Streams, streams_of

EVENTS_OF_ONE_DEPLOYMENT = 30


def _deployment_filter(request: PageRequest) -> Filter:
    return Filter(text_label="Find by name", text_name="q", text=request.text("q"))


def _deployment(request: PageRequest) -> DeploymentRow:
    return found_or_404(deployment_find(name=request.key, now=request.now), f"deployment {request.key!r}")


def _deployment_cells(request: PageRequest) -> ListPage[CellSummary]:
    return cells_of(request.key, request.now)


def _deployment_model(request: PageRequest) -> Deployment:
    return get_object_or_404(Deployment, pk=request.key)


def _slo(request: PageRequest) -> Slo:
    return slo_of(request.once(_deployment_model), request.now)


def _chain(request: PageRequest) -> ChainView:
    return chain_view(request.once(_deployment_model), request.now)


def _types(request: PageRequest) -> DeploymentTypes:
    return deployment_types(request.once(_deployment_model), request.now)


def _autoscaling(request: PageRequest) -> Autoscaling:
    return autoscaling_of(request.once(_deployment_model))


def _shares(request: PageRequest) -> Shares:
    return shares_of(request.once(_deployment_model))


def _roles(request: PageRequest) -> Roles:
    return roles_of(request.once(_deployment_model), request.now)


def _forecasts(request: PageRequest) -> Forecasts:
    return forecasts_of(request.key, request.now)


def _deployment_load(request: PageRequest) -> Charts:
    return load_charts(
        deployment_subject(request.key),
        span=request.span,
        now=request.now,
        markers=request.once(_markers),
        ttft_objective_ms=request.once(_deployment_model).objective().ttft_ms,
    )


def _markers(request: PageRequest) -> tuple[Marker, ...]:
    return chart_markers(request.span, deployment=request.key)


def _deployment_use(request: PageRequest) -> Charts:
    subject = deployment_subject(request.key)
    return use_charts(subject, span=request.span, now=request.now, markers=request.once(_markers))


def _streams(request: PageRequest) -> Streams:
    return streams_of(request.key, request.now)


def _events_of_deployment(request: PageRequest) -> EventList:
    return deployment_events(request.key, EVENTS_OF_ONE_DEPLOYMENT)


POLICY_PAGES = (
    ("deployment-autoscaling", "Autoscaling"),
    ("deployment-updates", "Update policy"),
    ("deployment-traffic", "Traffic policy"),
    ("deployment-chain", "Chain"),
)


def _deployment_actions(request: PageRequest) -> ActionMenu:
    deployment, access = request.once(_deployment_model), request.caller.access
    rollout = f"{reverse('rollout-new')}?{urlencode({'deployment': deployment.pk})}"
    return ActionMenu(
        (
            SCALE.menu_item(deployment, access),
            menu_item("Roll out another version", rollout, access, deployment=deployment.pk),
            *(menu_item(label, reverse(name, args=(deployment.pk,)), access) for name, label in POLICY_PAGES),
        )
    )


DEPLOYMENTS = Page(
    section="deployments",
    title="Deployments",
    fragments=(
        Fragment(
            "deployments-table",
            "",
            ("deployments", "cells", "load"),
            "fleet/deployments/table.html",
            DEPLOYMENT_LIST.page,
        ),
        Fragment("quotas", "Quotas of teams", ("quotas", "cells"), "fleet/quotas/quotas.html", QUOTA_LIST.page),
    ),
    narrow=_deployment_filter,
    lists=(DEPLOYMENT_LIST, QUOTA_LIST),
    past=PAST_DEPLOYMENTS,
)


def _requests_of_deployment(request: PageRequest) -> Place:
    return Place(request.span, deployment=request.key)


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
            "deployment-chain",
            "Chain with its planner",
            ("deployments:{key}", "requests"),
            "fleet/chains/chain.html",
            _chain,
        ),
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
        *deferred(
            Fragment("deployment-forecast", "Forecast", ("forecast",), "fleet/autoscaling/forecast.html", _forecasts),
            Fragment("deployment-load", "Load", ("history",), "fleet/load/charts.html", _deployment_load),
            Fragment(
                "deployment-use", "Accelerators and machines", ("history",), "fleet/load/charts.html", _deployment_use
            ),
            Fragment(
                "deployment-streams",
                "Streams that continue",
                ("traffic",),
                "traffic/streams/streams.html",
                _streams,
            ),
            *request_fragments(_requests_of_deployment),
            Fragment("deployment-cells", "Cells", ("cells", "load"), "fleet/cells/table.html", _deployment_cells),
            time_line_fragment(Subject.DEPLOYMENT),
            why_fragment(Subject.DEPLOYMENT),
            Fragment("deployment-events", "Events", ("events",), "dashboard/events/list.html", _events_of_deployment),
        ),
    ),
    actions=_deployment_actions,
    charts=True,
    ranges=OF_LOAD,
)


@dataclass(frozen=True, slots=True)
class RegionCells:
    """Cells of a deployment in a region: the current target and the form's."""

    region: str
    now: Cells
    new: Cells

    @property
    def field(self) -> str:
        return f"cells-{self.region}"

    @property
    def value(self) -> str:
        return cells_to_text(self.new)


def _cells_by_region(deployment: Deployment, form: Submission | None) -> tuple[RegionCells, ...]:
    """Every region. Without a form, the current targets. Raises InvalidInput if a field is no valid number of cells."""
    places = {place.region_id: place for place in DeploymentRegion.objects.filter(deployment=deployment)}
    cells = []
    for region in Region.objects.values_list("name", flat=True):
        place = places.get(region)
        now = place.stated(plans_roles=deployment.plans_roles) if place else 0
        text = form.text(f"cells-{region}", cells_to_text(now)) if form else cells_to_text(now)
        cells.append(RegionCells(region, now, _cells_in_field(region, text)))
    return tuple(cells)


def _cells_in_field(region: str, text: str) -> Cells:
    stated = cells_from_text(text)
    if stated is None:
        raise InvalidInput(field="regions", rule="range", message=_cells_error(region, text))
    try:
        return parse_cells(stated, f"the cells in {region}")
    except InvalidScaling as wrong:
        message = _cells_error(region, text) if isinstance(stated, int) else str(wrong)
        raise InvalidInput(field="regions", rule="range", message=message) from None


def _cells_error(region: str, text: str) -> str:
    rule = f"the number must be from 0 to {CELLS_MOST}, or a range such as 2-8, or cells by role such as 1p+3d"
    return f"{text[:20]!r} cells in {region}; {rule}"


def _changed_cells(cells: tuple[RegionCells, ...]) -> dict[str, Cells]:
    return {one.region: one.new for one in cells if one.new != one.now}


def _stored_cells(deployment: Deployment) -> dict[str, object]:
    return {one.field: cells_to_text(one.now) for one in _cells_by_region(deployment, None)}


def _scale(form: Submission, deployment: Deployment) -> object:
    changes = _changed_cells(_cells_by_region(deployment, form))
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
    """The forecast of the form's numbers, or {} if they change nothing."""
    cells = _cells_by_region(deployment, form)
    if not (changes := _changed_cells(cells)):
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
    action_url=lambda deployment, name: reverse(f"deployment-{name}", args=(deployment.pk,)),
)
SCALE = Action(target=TARGET, name="scale", label="Scale", run=_scale, typed=TARGET.name, present=_stored_cells)
deployment_scale_page = action_page_view(
    ActionPage(
        action=SCALE,
        template="fleet/deployments/scale.html",
        context=_scale_form,
        predict=_scale_forecast,
    )
)


def _day_plan(request: PageRequest) -> DayPlanView:
    return day_plan_view(deployment=request.text("deployment"), region=request.text("region"), now=request.now)


def _day_plan_filter(request: PageRequest) -> Filter:
    choices = (choose_deployment(request), choose_region(request))
    return Filter(text_label="", text_name="", text="", choices=choices)


DAY_PLAN = Page(
    section="capacity",
    title="Plan of the day",
    charts=True,
    fragments=(Fragment("day-plan", "", ("capacity-plan",), "fleet/capacity/plan.html", _day_plan),),
    narrow=_day_plan_filter,
)
