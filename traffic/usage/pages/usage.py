"""Usage page: usage and charges by tenant and deployment, and budgets; admins can change budgets."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from decimal import Decimal
from math import ceil
from typing import Any
from urllib.parse import parse_qsl, urlencode

from django.shortcuts import get_object_or_404

from controlplane.dashboard.actions import Submission, action, page_target, refuse_newer
from controlplane.dashboard.charts import MOST_SERIES, Chart, Colour, Series
from controlplane.dashboard.choices import choose, choose_deployment
from controlplane.dashboard.events import marked
from controlplane.dashboard.fragments import Filter, Fragment, Page, PageRequest
from controlplane.dashboard.lists import MAX_EXPORTED, Column, List, ListPage
from fleet.deployments.models import Deployment
from kernel.access import Role
from kernel.time_ranges import OF_USAGE, TimeRange
from traffic.keys.models import ApplicationKey
from traffic.responses.selectors import KeptOfTenant, kept_by_tenant
from traffic.responses.services import store_settings
from traffic.usage.api.costs import CreateBudgetSerializer
from traffic.usage.models import Budget
from traffic.usage.planning.figures import By, CostRow, CostSums, UsageQuery
from traffic.usage.planning.prices import TokenPrice
from traffic.usage.selectors.budgets import BUDGET_STATES, BudgetView, budget_views
from traffic.usage.selectors.costs import CostTime, cost_time, machine_rows
from traffic.usage.selectors.usage import UsageRow, usage_answer, usage_stream
from traffic.usage.selectors.weights import token_prices
from traffic.usage.services.budgets import budget_change, budget_create, budget_delete

ROWS_SHOWN = 100
ROWS_READ = 5_000
"""Tenants and deployments of the lists."""
HOUR, DAY = timedelta(hours=1), timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Span:
    """A time range in whole steps of its charts. `query`: the range in the API."""

    label: str
    length: timedelta
    step: timedelta
    query: dict[str, str]


@dataclass(frozen=True, slots=True)
class UsageLine:
    """A tenant or deployment; `budget` is a tenant's fullest one, `idle` and `price` are a deployment's."""

    name: str
    sums: dict[str, Any]
    budget: BudgetView | None = None
    cells: Decimal = Decimal(0)
    idle: Decimal = Decimal(0)
    price: TokenPrice | None = None

    @property
    def failed(self) -> int:
        """Requests that failed in cells or that no cell answered."""
        return int(self.sums.get("errors", 0) + self.sums.get("refused", 0))


@dataclass(frozen=True, slots=True)
class UsageView:
    """`query` gives the same rows in the API. `unpriced`: deployments with tokens but without a price."""

    span: Span
    totals: dict[str, Any]
    cells: Decimal
    idle: Decimal
    charts: tuple[Chart, ...]
    tenants: tuple[UsageLine, ...]
    deployments: tuple[UsageLine, ...]
    more: bool
    query: str
    unpriced: tuple[str, ...]
    tenant_page: ListPage[UsageLine] | None = None
    deployment_page: ListPage[UsageLine] | None = None

    @property
    def is_empty(self) -> bool:
        return not (self.tenants or self.deployments)


def span_of(chosen: TimeRange) -> Span:
    """Steps of an hour up to two days, of a day above."""
    step = HOUR if chosen.length <= 2 * DAY else DAY
    steps = ceil(chosen.length / step)
    label = f"{steps} {'hour' if step == HOUR else 'day'}{'s' if steps > 1 else ''}"
    query = {"from": chosen.name} if chosen.name else dict(parse_qsl(chosen.query))
    return Span(label, steps * step, step, query)


def usage_view(*, span: Span, tenant: str, deployment: str, now: datetime) -> UsageView:
    where = tuple((name, value) for name, value in (("tenant", tenant), ("deployment", deployment)) if value)
    start = first_step(span, now)
    by_tenant = usage_answer(UsageQuery(start, now, group=("tenant",), where=where), most=ROWS_READ)
    by_deployment = usage_answer(UsageQuery(start, now, group=("deployment",), where=where), most=ROWS_READ)
    tenants = sorted(by_tenant.rows, key=lambda row: (-_token_sum(row.sums), row.group["tenant"]))
    cells = UsageQuery(start, now, group=("deployment",), where=(("deployment", deployment),) if deployment else ())
    time = cost_time(cells)
    lines = _deployment_lines(by_deployment.rows, machine_rows(cells, time=time), now)
    largest = [row.group["tenant"] for row in tenants[:MOST_SERIES] if _token_sum(row.sums)]
    budgets = {view.budget.tenant: view for view in reversed(budget_views(now))}  # keeps the fullest budget of a tenant
    return UsageView(
        span=span,
        totals=by_tenant.totals,
        cells=sum((line.cells for line in lines), Decimal(0)),
        idle=sum((line.idle for line in lines), Decimal(0)),
        charts=(
            _token_chart(largest, span, start, now, where),
            *((_cell_chart(cells, time, span),) if not tenant else ()),
        ),
        tenants=tuple(_tenant_line(row, budgets) for row in tenants),
        deployments=tuple(lines),
        more=by_tenant.truncated or by_deployment.truncated,
        query=urlencode(
            {"group": "tenant,key,deployment,class,adapter", "by": step_of(span).value} | span.query | dict(where)
        ),
        unpriced=tuple(
            line.name for line in lines[:ROWS_SHOWN] if line.name and _token_sum(line.sums) and line.price is None
        ),
    )


def _tenant_line(row: UsageRow, budgets: dict[str, BudgetView]) -> UsageLine:
    return UsageLine(row.group["tenant"], row.sums, budgets.get(row.group["tenant"]))


def first_step(span: Span, now: datetime) -> datetime:
    hour = now.replace(minute=0, second=0, microsecond=0)
    begin = hour if span.step == HOUR else hour.replace(hour=0)
    return begin + span.step - span.length


def step_of(span: Span) -> By:
    return By.HOUR if span.step == HOUR else By.DAY


def _token_sum(sums: dict[str, Any]) -> int:
    return int(sums.get("prompt_tokens", 0) + sums.get("completion_tokens", 0))


def _deployment_lines(rows: list[UsageRow], machines: list[CostRow], now: datetime) -> list[UsageLine]:
    sums = {row.group["deployment"]: row.sums for row in rows if row.group["deployment"]}
    cells = {row.group["deployment"]: row.sums for row in machines}
    prices = token_prices(now)
    names = sorted(sums.keys() | cells.keys(), key=lambda name: (-_token_sum(sums.get(name, {})), name))
    return [
        UsageLine(name, sums.get(name, {}), None, cost.cells_cost, cost.idle_cost, prices.get(name))
        for name in names[:ROWS_READ]
        for cost in [cells.get(name, CostSums())]
    ]


def _token_chart(
    tenants: list[str], span: Span, start: datetime, now: datetime, where: tuple[tuple[str, str], ...]
) -> Chart:
    by = step_of(span)
    lines: dict[str, list[float | None]] = {tenant: _zero_steps(span) for tenant in tenants}
    if tenants:
        for row in usage_stream(UsageQuery(start, now, by, ("tenant",), where, tuple((name,) for name in tenants))):
            place = place_of(row.start, start, span)
            if place is not None:
                lines[row.group["tenant"]][place] = float(_token_sum(row.sums))
    series = tuple(Series(tenant or "no key", lines[tenant]) for tenant in tenants)
    unit = "/h" if span.step == HOUR else "/day"
    return Chart("usage-tokens", "Tokens of the largest tenants", unit, start, _span_seconds(span), series, decimals=0)


def _cell_chart(cells: UsageQuery, time: CostTime, span: Span) -> Chart:
    used, idle = _zero_steps(span), _zero_steps(span)
    for row in machine_rows(replace(cells, by=step_of(span), group=()), time=time):
        place = place_of(row.start, cells.start, span)
        if place is not None:
            used[place] = float(row.sums.cells_cost - row.sums.idle_cost)
            idle[place] = float(row.sums.idle_cost)
    lines = (Series("used", used, Colour.FIRST), Series("idle", idle, Colour.IDLE))
    unit = "$/h" if span.step == HOUR else "$/day"
    is_known = any(used) or any(idle)
    return Chart(
        "usage-cells", "Cost of cells", unit, cells.start, _span_seconds(span), lines if is_known else (), decimals=2
    )


def _zero_steps(span: Span) -> list[float | None]:
    return [0.0] * int(span.length / span.step)


def place_of(at: datetime | None, start: datetime, span: Span) -> int | None:
    """Index of the chart step that contains this time, or None."""
    place = int((at - start) / span.step) if at else -1
    return place if 0 <= place < int(span.length / span.step) else None


def _span_seconds(span: Span) -> float:
    return span.step.total_seconds()


def usage_tenants() -> list[str]:
    return list(ApplicationKey.objects.order_by("tenant").values_list("tenant", flat=True).distinct())


def _view(request: PageRequest) -> UsageView:
    return usage_view(
        span=span_of(request.span),
        tenant=request.text("tenant"),
        deployment=request.text("deployment"),
        now=request.span.end,
    )


def _named(lines: Iterable[UsageLine], request: PageRequest) -> list[UsageLine]:
    text = request.text("q").casefold()
    return [line for line in lines if text in line.name.casefold()]


def _sum(name: str, label: str, css: str = "number") -> Column[UsageLine]:
    return Column(name.replace("_", "-"), label, lambda row: row.sums.get(name, 0), css=css, is_newest_first=True)


def _number(name: str, label: str, value: Callable[[UsageLine], object], css: str = "number") -> Column[UsageLine]:
    return Column(name, label, value, css=css, is_newest_first=True)


FILTERS = ("q", "tenant", "deployment")
PROMPT, COMPLETION = _sum("prompt_tokens", "Prompt", "number wide"), _sum("completion_tokens", "Completion")
TENANT_LIST: List[UsageLine] = List(
    name="usage-by-tenant",
    columns=(
        Column("tenant", "Tenant", lambda row: row.name),
        _sum("requests", "Requests", "number wide"),
        _number("failed", "Failed", lambda row: row.failed, "number wide"),
        _sum("cancelled", "Cancelled", "number wide"),
        _sum("limited", "Limited", "number wide"),
        PROMPT,
        COMPLETION,
        _sum("charged", "Price"),
        _sum("machine_cost", "Cells", "number wide"),
        _number("budget", "Budget", lambda row: row.budget.percent if row.budget else None, "number wide"),
    ),
    query=lambda request: _named(request.once(_view).tenants, request),
    filters=FILTERS,
    by_value=True,
)
DEPLOYMENT_LIST: List[UsageLine] = List(
    name="usage-by-deployment",
    prefix="deployments-",
    columns=(
        Column("deployment", "Deployment", lambda row: row.name),
        PROMPT,
        COMPLETION,
        _number("failed", "Failed", lambda row: row.failed, "number wide"),
        _sum("estimated", "Estimated", "number wide"),
        _number("charged", "Price", lambda row: row.sums.get("charged", 0) if row.price else None),
        _number("cells", "Cells", lambda row: row.cells),
        _number("idle", "Idle", lambda row: row.idle, "number wide"),
    ),
    query=lambda request: _named(request.once(_view).deployments, request),
    filters=FILTERS,
    by_value=True,
)


def _usage(request: PageRequest) -> UsageView:
    view = request.once(_view)
    return replace(
        view,
        charts=marked(view.charts),
        tenant_page=TENANT_LIST.page(request),
        deployment_page=DEPLOYMENT_LIST.page(request),
    )


def _filter(request: PageRequest) -> Filter:
    tenant = choose(request, "tenant", "every tenant", usage_tenants())
    sort = request.text("deployments-sort")
    return Filter(
        text_label="Find a tenant or deployment",
        text_name="q",
        text=request.text("q"),
        choices=(tenant, choose_deployment(request)),
        kept=(("deployments-sort", sort),) if sort else (),
    )


BUDGET_LIST: List[BudgetView] = List(
    name="budgets",
    prefix="budgets-",
    columns=(
        Column("subject", "Budget of", lambda row: row.budget.subject),
        Column("state", "State", lambda row: row.state, choices=BUDGET_STATES),
        Column("percent", "Used", lambda row: row.percent, css="number", is_newest_first=True),
        Column("used", "This month", lambda row: row.used, css="number wide"),
        Column("stop", "At 100 %", lambda row: "keys refused" if row.budget.hard_stop else "alert only", css="wide"),
    ),
    query=lambda request: budget_views(request.now),
    find=("subject",),
    by_value=True,
    above=lambda request: Deployment.objects.order_by("name").values_list("name", flat=True),
)
RESPONSE_LIST: List[KeptOfTenant] = List(
    name="kept-responses",
    prefix="responses-",
    columns=(
        Column("tenant", "Tenant", lambda row: row.tenant),
        Column("responses", "Responses", lambda row: row.responses, css="number", is_newest_first=True),
        Column("size", "Size", lambda row: row.size, css="number", is_newest_first=True),
        Column("oldest", "Oldest", lambda row: row.oldest_at, css="wide"),
    ),
    query=lambda request: kept_by_tenant(most=MAX_EXPORTED, tenant=request.text("tenant")),
    find=("tenant",),
    filters=("tenant",),
    by_value=True,
    above=lambda request: store_settings(),
)


USAGE = Page(
    section="usage",
    title="Usage",
    charts=True,
    ranges=OF_USAGE,
    fragments=(
        Fragment("usage", "", ("usage",), "traffic/usage/usage.html", _usage),
        Fragment("usage-budgets", "Budgets of this month", ("usage",), "traffic/usage/budgets.html", BUDGET_LIST.page),
        Fragment("usage-responses", "Kept responses", ("usage",), "traffic/usage/responses.html", RESPONSE_LIST.page),
    ),
    narrow=_filter,
    lists=(TENANT_LIST, DEPLOYMENT_LIST, BUDGET_LIST, RESPONSE_LIST),
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
        stop = ", which refuses keys" if there.hard_stop else ""
        now_is = f"the {there} was set to {there.limit.normalize():f}{stop} by {there.actor}"
        refuse_newer(form, there.changed_at, now_is, form.text("limit"))
        budget_change(budget_id=there.pk, **fields, actor=form.actor, now=form.now)


@action(USAGE_PAGE, Role.ADMIN)
def budget_remove_action(form: Submission, id: int) -> None:
    budget_delete(budget_id=get_object_or_404(Budget, pk=id).pk, actor=form.actor, now=form.now)
