"""What keys and tenants used, hour by hour, as charts."""

from collections import defaultdict
from collections.abc import Iterable
from datetime import UTC, datetime

from django.db.models import Sum

from controlplane.dashboard.charts import MOST_SERIES, Chart, Colour, Series
from traffic.models import UsageHour

HOURS = 48
HOUR_S = 3600


def tenant_chart(now: datetime) -> Chart:
    """Tokens written for the tenants that used most, in two queries."""
    first = _first(now)
    hours = UsageHour.objects.filter(key="", hour__gte=datetime.fromtimestamp(first * HOUR_S, UTC))
    most = hours.order_by().values("tenant").annotate(all=Sum("completion_tokens")).order_by("-all", "tenant")
    tenants = [row["tenant"] for row in most[:MOST_SERIES]]
    found: dict[str, list[tuple[datetime, float]]] = defaultdict(list)
    for tenant, hour, tokens in hours.filter(tenant__in=tenants).values_list("tenant", "hour", "completion_tokens"):
        found[tenant].append((hour, tokens))
    series = tuple(Series(tenant or "nobody's", _line(found[tenant], first)) for tenant in tenants)
    return _chart("tenant-usage", "Tokens written for the tenants that used most", "tokens/h", first, series)


def key_chart(key: str, now: datetime) -> Chart:
    """What became of a key's requests, in one query."""
    first = _first(now)
    since = datetime.fromtimestamp(first * HOUR_S, UTC)
    rows = list(UsageHour.objects.filter(key=key, hour__gte=since))
    lines = (
        ("requests", Colour.FIRST, [(row.hour, float(row.requests)) for row in rows]),
        ("over a limit", Colour.WARN, [(row.hour, float(row.limited)) for row in rows]),
        ("errors", Colour.BAD, [(row.hour, float(row.errors)) for row in rows]),
    )
    series = tuple(
        Series(name, _line(hours, first) if hours else [None] * HOURS, colour) for name, colour, hours in lines
    )
    return _chart("key-requests", "Requests", "/h", first, series)


def _first(now: datetime) -> int:
    return int(now.timestamp() // HOUR_S) - HOURS + 1


def _line(rows: Iterable[tuple[datetime, float]], first: int) -> list[float | None]:
    """A value for each hour; an hour without a row had none of it."""
    line: list[float | None] = [0.0] * HOURS
    for hour, value in rows:
        place = int(hour.timestamp() // HOUR_S) - first
        if 0 <= place < HOURS:
            line[place] = float(value)
    return line


def _chart(name: str, title: str, unit: str, first: int, series: tuple[Series, ...]) -> Chart:
    start = datetime.fromtimestamp(first * HOUR_S, UTC)
    return Chart(name, title, unit, start, HOUR_S, series, decimals=0)
