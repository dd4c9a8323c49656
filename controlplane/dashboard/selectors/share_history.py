"""How much of each origin's requests was served in another region, over the last hours, from the changes of shares."""

from collections import defaultdict
from datetime import UTC, datetime

from controlplane.dashboard.charts import MOST_SERIES, Chart, Series
from traffic.models import TrafficMatrix, TrafficShift

STEP_S = 60
STEPS = 6 * 60
CHARTS_SHOWN = 4
SHIFTS_READ = 2000


def share_charts(now: datetime) -> tuple[Chart, ...]:
    """Of the deployments whose shares moved last, in two queries. Between two changes shares stay as they are."""
    rows = TrafficMatrix.objects.exclude(moved_at=None).order_by("-moved_at", "deployment_id")
    names = sorted(rows.values_list("deployment_id", flat=True)[:CHARTS_SHOWN])
    shifts: dict[str, list[TrafficShift]] = defaultdict(list)
    for shift in TrafficShift.objects.filter(deployment_id__in=names).order_by("-id")[:SHIFTS_READ]:
        shifts[shift.deployment_id].append(shift)
    return tuple(_chart(name, shifts[name][::-1], now) for name in names if shifts[name])


def _chart(deployment: str, shifts: list[TrafficShift], now: datetime) -> Chart:
    first = int(now.timestamp() // STEP_S) - STEPS + 1
    origins = sorted({origin for shift in shifts for origin in shift.shares})[:MOST_SERIES]
    lines: dict[str, list[float | None]] = {origin: [] for origin in origins}
    at, holds = 0, None
    for step in range(first, first + STEPS):
        while at < len(shifts) and shifts[at].at.timestamp() < (step + 1) * STEP_S:
            holds, at = shifts[at].shares, at + 1
        for origin, line in lines.items():
            line.append(_away(holds, origin) if holds else None)
    title = f"{deployment}: served in another region"
    start = datetime.fromtimestamp(first * STEP_S, UTC)
    series = tuple(Series(f"from {origin}", line) for origin, line in lines.items())
    return Chart(f"history-{deployment}", title, "% of an origin's requests", start, STEP_S, series)


def _away(shares: dict[str, dict[str, float]], origin: str) -> float | None:
    row = shares.get(origin)
    return None if row is None else 100 * (1 - row.get(origin, 0.0))
