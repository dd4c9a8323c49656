"""What machines cost, took and emitted, for a million tokens too; for admins also rates and budgets of machines."""

from typing import Any

from django.shortcuts import get_object_or_404

from controlplane.dashboard.actions import Submission, action, page_target
from controlplane.dashboard.fragments import Filter, Fragment, Page, PageRequest
from controlplane.dashboard.pages.choices import choose_deployment, choose_labelled, choose_region
from controlplane.dashboard.selectors.cost import (
    GROUPS,
    CostBudgetView,
    CostView,
    WeightLine,
    cost_budget_views,
    cost_view,
    rate_rows,
    weight_lines,
)
from controlplane.dashboard.selectors.usage import DEFAULT_SPAN, SPANS, span_of
from fleet.api.rate import SetRateSerializer
from fleet.models import Deployment, InstanceType, Rate, Region
from fleet.planning.markets import Market
from fleet.planning.rate import RateKind
from fleet.services.rate import rate_set, rate_withdraw
from kernel.access import Role
from traffic.api.cost_budget import CreateCostBudgetSerializer
from traffic.models import CostBudget
from traffic.services.cost_budget import cost_budget_change, cost_budget_create, cost_budget_delete


def _costs(request: PageRequest) -> CostView:
    return cost_view(
        span=span_of(request.text("span")),
        group=request.text("group"),
        deployment=request.text("deployment"),
        region=request.text("region"),
        now=request.now,
    )


def _filter(request: PageRequest) -> Filter:
    others = [(span.name, span.label) for span in SPANS if span is not DEFAULT_SPAN]
    span = choose_labelled(request, "span", (("", DEFAULT_SPAN.label), *others))
    group = choose_labelled(request, "group", (("", GROUPS[0][1]), *GROUPS[1:]))
    return Filter(
        text_label="", text_name="", text="",
        choices=(span, group, choose_deployment(request), choose_region(request)),
    )  # fmt: skip


def _rates(request: PageRequest) -> dict[str, Any]:
    return {
        "rows": rate_rows(request.now),
        "kinds": [(kind.value, kind.value.replace("_", " ")) for kind in RateKind],
        "types": InstanceType.objects.values_list("name", flat=True),
        "regions": Region.objects.values_list("name", flat=True),
        "markets": list(Market),
    }


def _weights(request: PageRequest) -> tuple[WeightLine, ...]:
    return weight_lines(request.now)


def _budgets(request: PageRequest) -> dict[str, Any]:
    views: tuple[CostBudgetView, ...] = cost_budget_views(request.now)
    return {"rows": views, "deployments": Deployment.objects.order_by("name").values_list("name", flat=True)}


COSTS = Page(
    section="usage",
    title="Cost and power",
    charts=True,
    fragments=(
        Fragment("costs", "", ("usage",), "dashboard/usage/costs.html", _costs),
        Fragment("weights", "What tokens weigh", ("usage",), "dashboard/usage/weights.html", _weights),
        Fragment("cost-budgets", "Budgets of machines", ("usage",), "dashboard/usage/cost_budgets.html", _budgets),
        Fragment("rates", "Rates of machines and power", ("usage",), "dashboard/usage/rates.html", _rates),
    ),
    narrow=_filter,
)

COSTS_PAGE = page_target("costs", "costs")


@action(COSTS_PAGE, Role.ADMIN)
def rate_set_action(form: Submission, _: None) -> None:
    fields = form.valid(SetRateSerializer, "kind", "subject", "region", "market", "value")
    rate_set(**{**fields, "kind": RateKind(fields["kind"])}, actor=form.actor, now=form.now)


@action(COSTS_PAGE, Role.ADMIN)
def rate_withdraw_action(form: Submission, id: int) -> None:
    rate_withdraw(rate_id=get_object_or_404(Rate, pk=id).pk, actor=form.actor, now=form.now)


@action(COSTS_PAGE, Role.ADMIN)
def cost_budget_set_action(form: Submission, _: None) -> None:
    fields = form.valid(CreateCostBudgetSerializer, "deployment", "money_per_month")
    there = CostBudget.objects.filter(deployment=fields["deployment"]).first()
    if there is None:
        cost_budget_create(**fields, actor=form.actor, now=form.now)
    else:
        cost_budget_change(
            budget_id=there.pk, money_per_month=fields["money_per_month"], actor=form.actor, now=form.now
        )


@action(COSTS_PAGE, Role.ADMIN)
def cost_budget_remove_action(form: Submission, id: int) -> None:
    cost_budget_delete(budget_id=get_object_or_404(CostBudget, pk=id).pk, actor=form.actor, now=form.now)
