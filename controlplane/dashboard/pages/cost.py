"""What machines cost, took and emitted, for a million tokens too; for admins also rates."""

from typing import Any

from django.shortcuts import get_object_or_404

from controlplane.dashboard.actions import Submission, action, page_target
from controlplane.dashboard.fragments import Filter, Fragment, Page, PageRequest
from controlplane.dashboard.pages.choices import choose_deployment, choose_labelled, choose_region
from controlplane.dashboard.selectors.cost import (
    GROUPS,
    CostView,
    WeightLine,
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
        "deployments": Deployment.objects.order_by("name").values_list("name", flat=True),
        "markets": list(Market),
    }


def _weights(request: PageRequest) -> tuple[WeightLine, ...]:
    return weight_lines(request.now)


COSTS = Page(
    section="usage",
    title="Cost and power",
    charts=True,
    fragments=(
        Fragment("costs", "", ("usage",), "dashboard/usage/costs.html", _costs),
        Fragment("weights", "What tokens weigh", ("usage",), "dashboard/usage/weights.html", _weights),
        Fragment("rates", "Rates of machines, power and tokens", ("usage",), "dashboard/usage/rates.html", _rates),
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
