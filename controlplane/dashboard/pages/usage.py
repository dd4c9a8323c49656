"""Who used what, what it costs, and who is near a budget; for admins also budgets."""

from typing import Any

from django.shortcuts import get_object_or_404

from controlplane.dashboard.actions import Submission, action, page_target
from controlplane.dashboard.fragments import Filter, Fragment, Page, PageRequest
from controlplane.dashboard.pages.choices import choose, choose_deployment, choose_labelled
from controlplane.dashboard.selectors.usage import (
    DEFAULT_SPAN,
    SPANS,
    KeptResponsesView,
    UsageView,
    kept_responses_view,
    span_of,
    usage_tenants,
    usage_view,
)
from fleet.models import Deployment
from kernel.access import Role
from traffic.api.budget import CreateBudgetSerializer
from traffic.models import Budget
from traffic.selectors.budget import budget_views
from traffic.services.budget import budget_change, budget_create, budget_delete


def _usage(request: PageRequest) -> UsageView:
    return usage_view(
        span=span_of(request.text("span")),
        tenant=request.text("tenant"),
        deployment=request.text("deployment"),
        now=request.now,
    )


def _filter(request: PageRequest) -> Filter:
    others = [(span.name, span.label) for span in SPANS if span is not DEFAULT_SPAN]
    span = choose_labelled(request, "span", (("", DEFAULT_SPAN.label), *others))
    tenant = choose(request, "tenant", "every tenant", usage_tenants())
    return Filter(text_label="", text_name="", text="", choices=(span, tenant, choose_deployment(request)))


def _budgets(request: PageRequest) -> dict[str, Any]:
    return {
        "rows": budget_views(request.now),
        "deployments": Deployment.objects.order_by("name").values_list("name", flat=True),
    }


def _responses(request: PageRequest) -> KeptResponsesView:
    return kept_responses_view(tenant=request.text("tenant"))


USAGE = Page(
    section="usage",
    title="Usage",
    charts=True,
    fragments=(
        Fragment("usage", "", ("usage",), "dashboard/usage/usage.html", _usage),
        Fragment("usage-budgets", "Budgets of this month", ("usage",), "dashboard/usage/budgets.html", _budgets),
        Fragment("usage-responses", "Kept responses", ("usage",), "dashboard/usage/responses.html", _responses),
    ),
    narrow=_filter,
)

USAGE_PAGE = page_target("usage", "usage")


@action(USAGE_PAGE, Role.ADMIN)
def budget_set_action(form: Submission, _: None) -> None:
    hard_stop = form.text("hard_stop") == "yes"
    fields = form.valid(CreateBudgetSerializer, "tenant", "deployment", "unit", "limit", hard_stop=hard_stop)
    whose = {name: fields.pop(name) for name in ("tenant", "deployment", "unit")}
    there = Budget.objects.filter(**whose).first()
    if there is None:
        budget_create(**whose, **fields, actor=form.actor, now=form.now)
    else:
        budget_change(budget_id=there.pk, **fields, actor=form.actor, now=form.now)


@action(USAGE_PAGE, Role.ADMIN)
def budget_remove_action(form: Submission, id: int) -> None:
    budget_delete(budget_id=get_object_or_404(Budget, pk=id).pk, actor=form.actor, now=form.now)
