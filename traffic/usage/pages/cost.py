"""Cost and power page: cost, energy and emissions in total and per million tokens, by group, with the source of each
number; rates for admins."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from decimal import Decimal
from typing import Any
from urllib.parse import urlencode

from django.http import StreamingHttpResponse
from django.shortcuts import get_object_or_404

from controlplane.dashboard.actions import Submission, action, page_target, refuse_newer
from controlplane.dashboard.charts import MOST_SERIES, Chart, Colour, Series
from controlplane.dashboard.choices import choose_deployment, choose_labelled, choose_region
from controlplane.dashboard.events import marked
from controlplane.dashboard.fragments import Filter, Fragment, Page, PageRequest
from controlplane.dashboard.lists import Column, List, ListPage
from fleet.capacity.api import SetRateSerializer
from fleet.capacity.planning.pools import Market
from fleet.capacity.planning.rates import RateKind, Source
from fleet.capacity.services import dated_states, rate_set, rate_withdraw
from fleet.deployments.models import Deployment
from fleet.regions.models import Rate, Region
from kernel.access import Role
from kernel.time_ranges import OF_USAGE
from kernel.tones import Tone
from models_registry.instance_types.selectors import instance_type_names
from traffic.usage.pages.usage import ROWS_READ, Span, first_step, place_of, span_of, step_of
from traffic.usage.planning.figures import FIGURES, CostRow, CostSums, UsageQuery
from traffic.usage.selectors.costs import BatchPrice, CostTime, batch_price, cost_answer, cost_rows, cost_time
from traffic.usage.selectors.weights import TokenWeight, token_weights

GROUPS = (
    ("version,type", "by version and type"), ("region", "by region"), ("deployment", "by deployment"),
    ("tenant", "by tenant"), ("class", "by class"), ("tenant,class", "by tenant and class"), ("adapter", "by adapter"),
)  # fmt: skip
SOURCE_TONE = {
    Source.MEASURED: Tone.OK, Source.RATED: Tone.MOVING, Source.ESTIMATED: Tone.WARN, Source.UNKNOWN: Tone.BAD,
}  # fmt: skip
NOBODY = {"tenant": "no key", "adapter": "the base model"}
KWH_UJ = Decimal(3_600_000_000_000)


@dataclass(frozen=True, slots=True)
class Figure:
    """A number with its source; `value` is None if unknown."""

    value: Decimal | None
    source: Source

    @property
    def label(self) -> str:
        return self.source.label

    @property
    def tone(self) -> str:
        return SOURCE_TONE[self.source].value


@dataclass(frozen=True, slots=True)
class CostLine:
    """One group: its values and their names, sums, and dollars, watt-hours and grams per million tokens."""

    group: tuple[str, ...]
    names: tuple[str, ...]
    sums: CostSums
    usd: Figure
    watt_hours: Figure
    grams: Figure

    @property
    def known(self) -> str:
        return f"{self.usd.label}, {self.watt_hours.label}, {self.grams.label}"


@dataclass(frozen=True, slots=True)
class CostView:
    """`bill` and `spares` are None if a filter excludes machines. `query` gives the same rows in the API."""

    span: Span
    heads: tuple[str, ...]
    total: CostLine
    has_idle: bool
    spares: Decimal | None
    bill: Decimal | None
    kwh: Decimal
    kilograms: Decimal
    charts: tuple[Chart, ...]
    lines: tuple[CostLine, ...]
    more: bool
    query: str
    batches: BatchPrice | None
    page: ListPage[CostLine] | None = None

    @property
    def is_empty(self) -> bool:
        return not self.lines and not self.spares


def cost_view(*, span: Span, group: str, deployment: str, region: str, now: datetime) -> CostView:
    chosen = group if group in dict(GROUPS) else GROUPS[0][0]
    where = tuple((name, value) for name, value in (("deployment", deployment), ("region", region)) if value)
    start, dimensions = first_step(span, now), tuple(chosen.split(","))
    query = UsageQuery(start, now, group=dimensions, where=where)
    time = cost_time(query)
    answer = cost_answer(query, most=ROWS_READ, time=time)
    total, spares = answer.totals, answer.spares
    lines = sorted((_cost_line(row) for row in answer.rows), key=lambda line: (-_spent_usd(line.sums), line.names))
    return CostView(
        span=span,
        heads=dimensions,
        total=_cost_line(total),
        has_idle=not {"tenant", "class", "adapter"} & set(dimensions),
        spares=spares.idle_cost if spares is not None else None,
        bill=total.sums.cells_cost + spares.idle_cost if spares is not None else None,
        kwh=Decimal(total.sums.energy_uj + total.sums.idle_uj) / KWH_UJ,
        kilograms=Decimal(total.sums.carbon_ug + total.sums.idle_carbon_ug) / 10**9,
        charts=_cost_charts(query, time, span, lines),
        lines=tuple(lines),
        more=answer.truncated,
        batches=batch_price(query, time=time),
        query=urlencode({"group": chosen, "by": step_of(span).value} | span.query | dict(where)),
    )


def _spent_usd(sums: CostSums) -> Decimal:
    return sums.cost + sums.idle_cost


def _cost_line(row: CostRow) -> CostLine:
    figures = row.sums.figures(with_idle=row.has_idle)
    usd, joules, grams = (figures[name] for name in FIGURES)
    return CostLine(
        group=tuple(row.group.values()),
        names=tuple(value or NOBODY.get(name, "none") for name, value in row.group.items()),
        sums=row.sums,
        usd=Figure(usd, row.sums.cost_source),
        watt_hours=Figure(None if joules is None else joules / 3600, row.sums.energy_source),
        grams=Figure(grams, row.sums.carbon_source),
    )


def _cost_charts(query: UsageQuery, time: CostTime, span: Span, lines: list[CostLine]) -> tuple[Chart, ...]:
    """Costs over time by use and idleness, and dollars, watt-hours and grams per million tokens of the largest
    groups."""
    by = step_of(span)
    money = cost_rows(replace(query, by=by, group=()), time=time)
    largest = [line for line in lines if line.sums.tokens][:MOST_SERIES]
    groups = cost_rows(replace(query, by=by, only=tuple(line.group for line in largest)), time=time) if largest else []
    by_step = [(_cost_line(row), place_of(row.start, query.start, span)) for row in groups]
    unit = "$/h" if span.step.total_seconds() == 3600 else "$/day"
    used, idle = _empty_steps(span), _empty_steps(span)
    for row in money:
        place = place_of(row.start, query.start, span)
        if place is not None:
            used[place], idle[place] = float(row.sums.cost), float(row.sums.idle_cost)
    spent = (Series("used", used, Colour.FIRST), Series("idle", idle, Colour.IDLE)) if money else ()
    step_s = span.step.total_seconds()
    return (
        Chart("cost-money", "Cost of cells", unit, query.start, step_s, spent, decimals=2),
        *(
            Chart(
                f"cost-{name}",
                title,
                unit,
                query.start,
                step_s,
                _cost_series(by_step, [line.names for line in largest], span, name),
                decimals=2,
            )
            for name, title, unit in (
                ("usd", "Dollars for a million tokens", "$/M"),
                ("watt_hours", "Energy for a million tokens", "Wh/M"),
                ("grams", "Emissions for a million tokens", "g CO2e/M"),
            )
        ),
    )


def _cost_series(
    by_step: list[tuple[CostLine, int | None]], largest: list[tuple[str, ...]], span: Span, name: str
) -> tuple[Series, ...]:
    values = {names: _empty_steps(span) for names in largest}
    for line, place in by_step:
        figure: Figure = getattr(line, name)
        if place is not None and figure.value is not None:
            values[line.names][place] = float(figure.value)
    known = [names for names in largest if any(value is not None for value in values[names])]
    return tuple(Series(" · ".join(names), values[names]) for names in known)


def _empty_steps(span: Span) -> list[float | None]:
    return [None] * int(span.length / span.step)


@dataclass(frozen=True, slots=True)
class WeightLine:
    """Token weights with their source; for measured ones also milliseconds per step and the unexplained share of busy
    time."""

    weight: TokenWeight
    known: Figure
    step_ms: float | None
    error_percent: float | None


def weight_lines(now: datetime) -> tuple[WeightLine, ...]:
    return tuple(
        WeightLine(
            weight=each,
            known=Figure(None, each.source),
            step_ms=each.fit.step_us / 1000 if each.fit else None,
            error_percent=100 * each.fit.error if each.fit else None,
        )
        for each in token_weights(now)
    )


@dataclass(frozen=True, slots=True)
class RateRow:
    """`state`: `in force`, `later` or `past`."""

    rate: Rate
    state: str

    @property
    def kind(self) -> str:
        return self.rate.kind.replace("_", " ")

    @property
    def tone(self) -> Tone:
        return {"in force": Tone.OK, "later": Tone.MOVING}.get(self.state, Tone.IDLE)


def _rate_rows(rates: Sequence[Rate], now: datetime) -> list[RateRow]:
    states = dated_states(rates, lambda row: (row.kind, row.subject, row.region, row.market), now)
    return [RateRow(row, states[row.pk]) for row in rates]


def _view(request: PageRequest) -> CostView:
    return cost_view(
        span=span_of(request.span),
        group=request.text("group"),
        deployment=request.text("deployment"),
        region=request.text("region"),
        now=request.span.end,
    )


def _name_at(place: int) -> Callable[[CostLine], object]:
    return lambda row: row.names[place]


def _number(name: str, label: str, value: Callable[[CostLine], object], css: str = "number") -> Column[CostLine]:
    return Column(name, label, value, css=css, is_newest_first=True)


def _named(request: PageRequest) -> list[CostLine]:
    text = request.text("q").casefold()
    return [line for line in request.once(_view).lines if any(text in name.casefold() for name in line.names)]


def _cost_list(request: PageRequest) -> List[CostLine]:
    """Its first columns are what the costs are grouped by."""
    view = request.once(_view)
    names = (
        Column(head, head.capitalize(), _name_at(place), css="wide" if place else "")
        for place, head in enumerate(view.heads)
    )
    idle = (_number("idle", "Idle", lambda row: row.sums.idle_cost, "number wide"),) if view.has_idle else ()
    return List(
        name="costs",
        columns=(
            *names,
            _number("tokens", "Tokens", lambda row: row.sums.tokens, "number wide"),
            _number("cost", "Cost", lambda row: row.sums.cost, "number wide"),
            *idle,
            _number("usd", "$/M", lambda row: row.usd.value),
            _number("watt-hours", "Wh/M", lambda row: row.watt_hours.value),
            _number("grams", "g CO2e/M", lambda row: row.grams.value, "number wide"),
            Column("known", "Known", lambda row: row.known, css="wide"),
        ),
        query=_named,
        filters=("q", "deployment", "region"),
        by_value=True,
    )


class CostExport:
    """The costs as CSV; their columns depend on the request."""

    prefix = ""

    def export(self, request: PageRequest) -> StreamingHttpResponse:
        return _cost_list(request).export(request)


def _costs(request: PageRequest) -> CostView:
    view = request.once(_view)
    page = replace(_cost_list(request).page(request), above=view.has_idle)
    return replace(view, charts=marked(view.charts), page=page)


def _filter(request: PageRequest) -> Filter:
    group = choose_labelled(request, "group", (("", GROUPS[0][1]), *GROUPS[1:]))
    return Filter(
        text_label="Find in the table", text_name="q", text=request.text("q"),
        choices=(group, choose_deployment(request), choose_region(request)),
    )  # fmt: skip


def _rate_form(_: PageRequest) -> dict[str, Any]:
    return {
        "kinds": [(kind.value, kind.value.replace("_", " ")) for kind in RateKind],
        "types": instance_type_names(),
        "regions": Region.objects.values_list("name", flat=True),
        "deployments": Deployment.objects.order_by("name").values_list("name", flat=True),
        "markets": list(Market),
    }


RATE_LIST: List[RateRow] = List(
    name="rates",
    prefix="rates-",
    columns=(
        Column("kind", "Rate", lambda row: row.kind, choices=tuple(kind.value.replace("_", " ") for kind in RateKind)),
        Column("subject", "Of", lambda row: f"{row.rate.subject} {row.rate.market}".strip()),
        Column("region", "Region", lambda row: row.rate.region or "every region", css="wide"),
        Column("from", "From, UTC", lambda row: row.rate.valid_from, css="wide", is_newest_first=True),
        Column("state", "State", lambda row: row.state, choices=("in force", "later", "past")),
        Column("value", "Value", lambda row: row.rate.value, css="number", is_newest_first=True),
        Column("actor", "Set by", lambda row: row.rate.actor, css="wide"),
    ),
    query=lambda request: Rate.objects.all(),
    rows=_rate_rows,
    order=("-valid_from", "-id"),
    find=("subject", "region", "actor"),
    by_value=True,
    above=_rate_form,
)
WEIGHT_LIST: List[WeightLine] = List(
    name="token-weights",
    prefix="weights-",
    columns=(
        Column("version", "Version", lambda row: row.weight.version),
        Column("type", "Type", lambda row: row.weight.instance_type, css="wide"),
        Column("cached", "Cached", lambda row: row.weight.cached, css="number"),
        Column("completion", "Completion", lambda row: row.weight.completion, css="number", is_newest_first=True),
        Column("known", "Known", lambda row: row.known.label),
        Column("step", "Step, ms", lambda row: row.step_ms, css="number wide", is_newest_first=True),
        Column("error", "Error", lambda row: row.error_percent, css="number wide", is_newest_first=True),
        Column("looks", "Looks", lambda row: row.weight.fit and row.weight.fit.samples, css="number wide"),
        Column("nodes", "Nodes", lambda row: row.weight.fit and row.weight.fit.nodes, css="number wide"),
    ),
    query=lambda request: weight_lines(request.now),
    find=("version", "type"),
    by_value=True,
)


COSTS = Page(
    section="costs",
    title="Cost and power",
    charts=True,
    ranges=OF_USAGE,
    fragments=(
        Fragment("costs", "", ("usage",), "traffic/usage/costs.html", _costs),
        Fragment("weights", "Token weights", ("usage",), "traffic/usage/weights.html", WEIGHT_LIST.page),
        Fragment(
            "rates", "Rates of machines, power and tokens", ("usage",), "traffic/usage/rates.html", RATE_LIST.page
        ),
    ),
    narrow=_filter,
    lists=(CostExport(), WEIGHT_LIST, RATE_LIST),
)

COSTS_PAGE = page_target("costs", "costs")


@action(COSTS_PAGE, Role.ADMIN)
def rate_set_action(form: Submission, _: None) -> None:
    fields = form.valid(SetRateSerializer, "kind", "subject", "region", "market", "value")
    chosen = {name: fields.get(name, "") for name in ("kind", "subject", "region", "market")}
    if there := Rate.objects.filter(**chosen).order_by("-created_at").first():
        now_is = f"the {there} was set to {there.value.normalize():f} by {there.actor}"
        refuse_newer(form, there.created_at, now_is, form.text("value"))
    rate_set(**{**fields, "kind": RateKind(fields["kind"])}, actor=form.actor, now=form.now)


@action(COSTS_PAGE, Role.ADMIN)
def rate_withdraw_action(form: Submission, id: int) -> None:
    rate_withdraw(rate_id=get_object_or_404(Rate, pk=id).pk, actor=form.actor, now=form.now)
