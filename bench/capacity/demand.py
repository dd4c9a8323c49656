"""What is expected of a recorded load: by the live forecaster, which knows what has come by then, and by one that knows
all that will."""

from collections.abc import Callable, Mapping
from datetime import timedelta

import numpy as np

from bench.capacity.autoscaling import DAY_S, SERVICE_S, Load
from fleet.planning.capacity.view import Demand
from fleet.planning.forecast.forecaster import forecast_series
from fleet.planning.forecast.ledger import calibrate
from fleet.planning.forecast.past import past_of
from fleet.planning.forecast.records import Calibration, Record
from fleet.planning.forecast.series import HISTORY_SLOT_S, SLOT_S, SLOTS, SeriesKey
from simulator.clock import EPOCH

REGION = "east"


def forecasts(loads: Mapping[str, Load], seconds: float) -> dict[str, list[Demand | None]]:
    """Forecasts of each series every 15 minutes by the live forecaster, with its ledger renewed once an hour, from the
    load up to that time alone. None where its quantiles rest on no errors yet."""
    found: dict[str, list[Demand | None]] = {}
    for name, load in loads.items():
        key = SeriesKey(name, REGION, "realtime")
        slots = np.array(
            [mean_rate(load, at, HISTORY_SLOT_S) * SERVICE_S for at in np.arange(0.0, seconds, HISTORY_SLOT_S)]
        )
        calibration, records = Calibration(), list[Record]()
        rows: list[Demand | None] = []
        for at in range(0, int(seconds), SLOT_S):
            past = past_of(key, EPOCH + timedelta(seconds=at), slots[: at // HISTORY_SLOT_S])
            if at and at % 3600 == 0:
                calibration = calibrate(past, records, calibration)
            made = forecast_series(past, calibration) if at >= 2 * SLOT_S else None
            if made and at % 1800 == 0:
                records.append(made.record)
            rows.append(Demand(made.forecast.p50, made.forecast.p90) if made and made.is_judged else None)
        found[name] = rows
    return found


def perfect(load: Load, seconds: float) -> Callable[[float], Demand]:
    """What will come, as means of slots."""
    means = [mean_rate(load, at, SLOT_S) * SERVICE_S for at in range(0, int(seconds + DAY_S), SLOT_S)]

    def known(now_s: float) -> Demand:
        row = tuple(means[int(now_s // SLOT_S) :][:SLOTS])
        return Demand(row, row)

    return known


def mean_rate(load: Load, begins_s: float, lasts_s: float) -> float:
    """Requests a second, by five looks."""
    return sum(load.rate(begins_s + lasts_s * (part + 0.5) / 5) for part in range(5)) / 5
