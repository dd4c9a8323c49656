"""Days of demand, and rounds of forecasts, as rows."""

from datetime import UTC, datetime, timedelta

from tests.fleet import rows
from traffic.models import DemandDay, DemandForecast

MADE = datetime(2026, 11, 26, 12, 0, tzinfo=UTC)
EAST = "us-east-1"


def demand_days(count: int, load: float = 20.0, serving_class: str = "realtime") -> None:
    """Whole days of a load that stays, up to `MADE`, of the deployment `sim-70b` in its first region."""
    deployment, region = rows.deployment(where=EAST), rows.region(EAST)
    for ago in range(count + 1):
        slots = 288 if ago else 144
        DemandDay.objects.create(
            deployment=deployment,
            origin=region,
            serving_class=serving_class,
            day=(MADE - timedelta(days=ago)).date(),
            loads=[load] * slots,
        )


def forecast_row(
    load: float = 30.0,
    made_at: datetime = MADE,
    origin: str = EAST,
    serving_class: str = "realtime",
    judged: bool = True,
) -> DemandForecast:
    """A forecast of the same load all day, with a p90 of 1.2 times and a p99 of 1.5 times as much."""
    return DemandForecast.objects.create(
        deployment=rows.deployment(where=origin),
        origin=rows.region(origin),
        serving_class=serving_class,
        made_at=made_at,
        slot_s=900,
        p50=[load] * 96,
        p90=[1.2 * load] * 96,
        p99=[1.5 * load] * 96,
        methods=["blend"] * 96,
        is_judged=judged,
    )
