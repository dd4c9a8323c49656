"""The plan of the day: what the fleet is going to have, for whom, and what it costs."""

from controlplane.dashboard.fragments import Filter, Fragment, Page, PageRequest
from controlplane.dashboard.pages.choices import choose_deployment, choose_region
from controlplane.dashboard.selectors.capacity_plan import DayPlanView, day_plan_view


def _plan(request: PageRequest) -> DayPlanView:
    return day_plan_view(deployment=request.text("deployment"), region=request.text("region"), now=request.now)


def _filter(request: PageRequest) -> Filter:
    choices = (choose_deployment(request), choose_region(request))
    return Filter(text_label="", text_name="", text="", choices=choices)


DAY_PLAN = Page(
    section="deployments",
    title="Plan of the day",
    charts=True,
    fragments=(Fragment("day-plan", "", ("capacity-plan",), "dashboard/capacity/plan.html", _plan),),
    narrow=_filter,
)
