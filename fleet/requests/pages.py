"""Sampled requests on pages: the list, what slow requests of a place have in common, and which failed. The planner
compares."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from urllib.parse import urlencode

from django.db.models import F, QuerySet

from controlplane.dashboard.choices import choose_deployment, choose_labelled, choose_region
from controlplane.dashboard.fragments import Filter, Fragment, Page, PageRequest
from controlplane.dashboard.lists import Column, List, ListPage
from engine_agent.protocol.request_messages import SampleKind
from fleet.chains.selectors import TracedChain, chains_of_trace
from fleet.reconcile.planning.states import choices
from fleet.requests.models import RequestSample
from fleet.requests.planner import FAILED, Comparison, compare_requests
from fleet.requests.selectors import MOST_COMPARED, failed_requests, requests_between, requests_compared
from kernel.time_ranges import Ranges, TimeRange

SLOWEST_SHOWN, FAILED_SHOWN = 10, 20
OF_SAMPLES = Ranges(("1h", "6h", "1d", "7d"), "1d")
"""Samples are kept for a day, failed ones for a week."""
FAILED_KINDS = "failed"
"""In place of a kind: both kinds of failed requests."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where and when requests are compared: a cell, a deployment, or a deployment in a region. `query`: the same as
    parameters of the list."""

    span: TimeRange
    cell: str = ""
    deployment: str = ""
    region: str = ""

    @property
    def samples(self) -> QuerySet[RequestSample]:
        return requests_between(self.span, cell=self.cell, deployment=self.deployment, region=self.region)

    @property
    def query(self) -> str:
        stated = {"cell": self.cell, "deployment": self.deployment, "region": self.region}
        return urlencode({name: value for name, value in stated.items() if value})


@dataclass(frozen=True, slots=True)
class SlowRequests:
    """`oldest`: of the compared samples, if there are more than can be compared."""

    place: Place
    comparison: Comparison
    slowest: ListPage[RequestSample]
    oldest: datetime | None


def slow_requests(place: Place, now: datetime) -> SlowRequests:
    """Three queries at most."""
    samples = requests_compared(place.samples)
    kept = place.samples.exclude(kind__in=FAILED)
    slowest = kept.order_by(F("first_ms").desc(nulls_last=True), "-id")
    oldest = samples[-1].at if len(samples) >= MOST_COMPARED else None
    shown = REQUEST_LIST.part(list(slowest[:SLOWEST_SHOWN]), now, SLOWEST_SHOWN)
    return SlowRequests(place, compare_requests(samples), shown, oldest)


@dataclass(frozen=True, slots=True)
class FailedRequests:
    place: Place
    listed: ListPage[RequestSample]


@dataclass(frozen=True, slots=True)
class TraceView:
    """A client's trace, and what planner and deployment took of it together."""

    trace: str
    chains: tuple[TracedChain, ...]


def request_fragments(place: Callable[[PageRequest], Place | None]) -> tuple[Fragment, Fragment]:
    """The fragments of a place's slow and failed requests. Their contents are None without a place."""

    def slow(request: PageRequest) -> SlowRequests | None:
        found = request.once(place)
        return None if found is None else slow_requests(found, request.now)

    def failed(request: PageRequest) -> FailedRequests | None:
        found = request.once(place)
        if found is None:
            return None
        rows = list(failed_requests(found.samples)[: FAILED_SHOWN + 1])
        return FailedRequests(found, REQUEST_LIST.part(rows, request.now, FAILED_SHOWN))

    return (
        Fragment("requests-slow", "Slow requests", ("history",), "fleet/requests/slow.html", slow),
        Fragment("requests-failed", "Failed requests", ("history",), "fleet/requests/failed.html", failed),
    )


def _listed(request: PageRequest) -> QuerySet[RequestSample]:
    found, kind = requests_between(request.span), request.text("kind")
    if kind in set(SampleKind):
        found = found.filter(kind=kind)
    elif kind == FAILED_KINDS:
        found = failed_requests(found)
    for column in ("cell", "deployment", "region", "tenant", "key", "prefix", "ingress"):
        if value := request.text(column):
            found = found.filter(**{column: value})
    if trace := request.text("trace"):
        found = found.filter(trace=trace).exclude(trace="")
    if text := request.text("q"):
        found = found.filter(request__startswith=text)
    return found.order_by()


def _rows(rows: Sequence[Any], now: datetime) -> list[RequestSample]:
    return list(rows)


REQUEST_LIST: List[RequestSample] = List(
    name="requests",
    columns=(
        Column("request", "Request", lambda row: row.request),
        Column("outcome", "Answer", lambda row: row.outcome, ("status",)),
        Column(
            "at",
            "At",
            lambda row: row.at,
            ("at",),
            "number",
            "Arrival at the cell, or at the ingress if no cell answered",
            True,
        ),
        Column("tenant", "Tenant and key", lambda row: f"{row.tenant} {row.key}".strip(), ("tenant", "key"), "wide"),
        Column("prompt", "Prompt", lambda row: row.prompt_tokens, ("prompt_tokens",), "wide number", "Tokens", True),
        Column(
            "answer", "Output", lambda row: row.completion_tokens, ("completion_tokens",), "wide number", "Tokens", True
        ),
        Column("first", "First token", lambda row: row.first_ms, ("first_ms",), "number", "After its arrival", True),
        Column("total", "Total", lambda row: row.total_ms, ("total_ms",), "wide number", "", True),
        Column("cell", "Cell", lambda row: row.cell, ("cell",), "wide"),
        Column("ingress", "Ingress", lambda row: row.ingress, ("ingress",), "wide"),
    ),
    query=_listed,
    rows=_rows,
    order=("-at", "-id"),
    filters=("q", "kind", "cell", "deployment", "region", "tenant", "key", "prefix", "ingress", "trace"),
)


def _filter(request: PageRequest) -> Filter:
    kind = choose_labelled(request, "kind", (("", "every sample"), (FAILED_KINDS, "Failed"), *choices(SampleKind)))
    names = ("cell", "tenant", "key", "prefix", "ingress", "trace")
    kept = tuple((name, value) for name in names if (value := request.text(name)))
    return Filter(
        text_label="Find by the beginning of a request id",
        text_name="q",
        text=request.text("q"),
        choices=(kind, choose_deployment(request), choose_region(request)),
        kept=kept,
    )


def _trace(request: PageRequest) -> TraceView | None:
    trace = request.text("trace")
    return TraceView(trace, tuple(chains_of_trace(trace))) if trace else None


REQUESTS = Page(
    section="requests",
    title="Requests",
    fragments=(
        Fragment("requests-trace", "", (), "fleet/requests/trace.html", _trace),
        Fragment("requests-table", "", (), "fleet/requests/table.html", REQUEST_LIST.page),
    ),
    narrow=_filter,
    lists=(REQUEST_LIST,),
    ranges=OF_SAMPLES,
)
