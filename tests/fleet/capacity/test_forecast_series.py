from datetime import UTC, datetime, timedelta

import pytest

from fleet.capacity.planning.forecast_series import SLOT_S, SLOTS, Forecast, SeriesKey, forecast_at

MADE = datetime(2026, 11, 26, 12, 0, tzinfo=UTC)
KEY = SeriesKey("chat", "eu-west", "realtime")
RISING = Forecast(
    KEY,
    MADE,
    SLOT_S,
    p50=tuple(float(slot) for slot in range(SLOTS)),
    p90=tuple(slot + 10.0 for slot in range(SLOTS)),
    method=("blend",) * SLOTS,
)


@pytest.mark.parametrize(
    ("after_s", "within_s", "peak"),
    [
        (0, 0, 10.0),
        (0, 899, 10.0),
        (0, 900, 11.0),
        (1000, 900, 12.0),
        (0, -5, 10.0),
        (95 * 900, 899, 105.0),
        (95 * 900, 900, None),
        (-1, 900, None),
        (96 * 900, 0, None),
    ],
)
def test_the_peak_is_that_of_all_slots_that_the_time_touches(
    after_s: float, within_s: float, peak: float | None
) -> None:
    assert forecast_at(RISING, MADE + timedelta(seconds=after_s), within_s) == peak


def test_a_forecast_ends_a_day_after_it_was_made() -> None:
    assert RISING.ends_at == MADE + timedelta(days=1)


def test_a_series_says_whose_it_is() -> None:
    assert str(KEY) == "chat from eu-west, realtime"
