"""Reads sampled requests: for lists, for the comparison of slow requests with ordinary ones, and by request id."""

from collections.abc import Iterable
from dataclasses import fields
from datetime import datetime, timedelta

from django.db.models import Q, QuerySet

from engine_agent.protocol.request_messages import SampleKind
from fleet.requests.models import RequestSample
from fleet.requests.planner import COMPARED, FAILED, FAILED_KEPT_S, SampledRequest
from kernel.time_ranges import TimeRange

MOST_COMPARED = 6000
"""Samples that are compared, the newest first: half an hour of one cell has 2,000."""
LEAST_SEARCHED = 6
"""Characters of a request id that a search needs."""


_COLUMNS = tuple(field.name for field in fields(SampledRequest))


def requests_between(
    span: TimeRange, *, cell: str = "", deployment: str = "", region: str = ""
) -> QuerySet[RequestSample]:
    """Samples of a cell, of a deployment, or of a deployment in a region, newest first."""
    found = RequestSample.objects.filter(at__range=(span.start, span.end)).order_by("-at", "-id")
    stated = {"cell": cell, "deployment": deployment, "region": region}
    return found.filter(**{name: value for name, value in stated.items() if value})


def requests_compared(found: QuerySet[RequestSample]) -> list[SampledRequest]:
    """The newest `MOST_COMPARED` answered requests, without those that were chosen by their trace."""
    answered = found.filter(kind__in=COMPARED).values_list(*_COLUMNS)
    return [SampledRequest(*row) for row in answered[:MOST_COMPARED]]


def failed_requests(found: QuerySet[RequestSample]) -> QuerySet[RequestSample]:
    return found.filter(kind__in=FAILED)


def failed_requests_of_keys(places: Iterable[tuple[str, str]], now: datetime, **whose: str) -> QuerySet[RequestSample]:
    """Failed requests in cells of these (key, deployment), and at ingresses of a `tenant` or `key`, newest first."""
    found = Q(cell="", **whose) if whose else Q(pk__in=[])
    for key, deployment in places:
        found |= Q(key=key, deployment=deployment)
    recent = RequestSample.objects.filter(kind=SampleKind.ERROR.value, at__gte=now - timedelta(seconds=FAILED_KEPT_S))
    return recent.filter(found).exclude(key="").order_by("-at", "-id")


def refused_requests_named(request: str) -> QuerySet[RequestSample]:
    """Requests without a valid key, by their complete id, newest first. Only who sent one knows its random id."""
    return RequestSample.objects.filter(kind=SampleKind.REFUSED.value, request=request).order_by("-at", "-id")


def requests_named(text: str) -> QuerySet[RequestSample]:
    """Samples whose request id starts with a text, newest first; none for a short text."""
    text = text.strip()
    if len(text) < LEAST_SEARCHED:
        return RequestSample.objects.none()
    return RequestSample.objects.filter(request__startswith=text).order_by("-at", "-id")
