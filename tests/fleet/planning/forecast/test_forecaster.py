from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.planning.forecast.forecaster import forecast_series
from fleet.planning.forecast.records import SCORES_LEAST, Calibration, Score
from fleet.planning.forecast.series import LEADS, SLOTS, Method, horizon_of
from tests.fleet.planning.forecast.pasts import DAY_SLOTS, KEY, MADE, days, past

SIX_DAYS = days(6)


def test_a_forecast_covers_a_day_from_the_end_of_the_past() -> None:
    made = forecast_series(past(days(5)), Calibration())

    assert made is not None
    assert (made.forecast.key, made.forecast.made_at) == (KEY, MADE)
    assert len(made.forecast.p50) == len(made.forecast.p90) == len(made.forecast.method) == len(made.p99) == SLOTS
    assert all(
        low <= high <= top for low, high, top in zip(made.forecast.p50, made.forecast.p90, made.p99, strict=True)
    )


def test_quantiles_are_raised_by_the_factors_of_the_method_in_force() -> None:
    scores = {Method.LAST.value: tuple(Score(50, 0.1, 0.9, (1.0 + lead, 2.0 + lead)) for lead in range(len(LEADS)))}
    ledger = Calibration((Method.LAST.value,) * len(LEADS), scores)

    made = forecast_series(past(np.full(2 * DAY_SLOTS, 10.0)), ledger)

    assert made is not None
    for slot in range(SLOTS):
        horizon = horizon_of(slot)
        assert made.forecast.p90[slot] == pytest.approx(10 * (1 + horizon))
        assert made.p99[slot] == pytest.approx(10 * (2 + horizon))


def test_a_method_that_has_nothing_to_go_by_gives_way() -> None:
    ledger = Calibration((Method.SEASONAL.value, Method.SHAPE.value, *[Method.LAST.value] * 6))

    young = forecast_series(past(np.full(40, 5.0)), ledger)
    silent = forecast_series(past(np.concatenate([np.full(40, 5.0), np.full(5 * DAY_SLOTS, np.nan)])), ledger)

    assert young is not None
    assert silent is not None
    assert set(young.forecast.method) == {Method.BLEND.value, Method.LAST.value}
    assert set(silent.forecast.method) == {Method.AVERAGE.value}
    assert set(silent.forecast.p50) == {5.0}


@pytest.mark.parametrize("slots", [np.array([]), np.full(900, np.nan), np.array([1.0])])
def test_of_what_nothing_is_known_nothing_is_forecast(slots: np.ndarray) -> None:
    assert forecast_series(past(slots), Calibration()) is None


def test_a_day_that_repeats_is_forecast_by_its_shape() -> None:
    made = forecast_series(past(SIX_DAYS), Calibration())
    tomorrow = past(days(7)).blocks()[-SLOTS:]

    assert made is not None
    assert set(made.forecast.method) == {Method.BLEND.value}
    assert np.abs(np.array(made.forecast.p50) - tomorrow).sum() / tomorrow.sum() < 0.08
    assert set(made.record.p50) == {method.value for method in Method}


@pytest.mark.parametrize(("count", "is_judged"), [(SCORES_LEAST - 1, False), (SCORES_LEAST, True)])
def test_quantiles_rest_on_errors_once_half_a_day_of_them_is_known(count: int, is_judged: bool) -> None:
    scores = {Method.BLEND.value: (Score(count, 0.1, 0.9, (1.1, 1.2)),) * len(LEADS)}

    made = forecast_series(past(SIX_DAYS), Calibration((Method.BLEND.value,) * len(LEADS), scores))

    assert made is not None
    assert made.is_judged is is_judged


@given(
    loads=st.lists(st.one_of(st.none(), st.floats(0.0, 1e6)), min_size=1, max_size=120),
    first=st.sampled_from([method.value for method in Method]),
    factor=st.floats(1.0, 50.0),
)
def test_whatever_the_history_lacks_a_forecast_is_finite_and_no_multiple_of_what_was_seen(
    loads: list[float | None], first: str, factor: float
) -> None:
    known = [np.nan if load is None else load for load in loads]
    history = np.concatenate([SIX_DAYS, np.repeat(known, 3)])
    scores = {method.value: (Score(30, None, None, (factor, factor)),) * len(LEADS) for method in Method}
    ledger = Calibration((first,) * len(LEADS), scores)

    made = forecast_series(past(history), ledger)

    assert made is not None
    assert made == forecast_series(past(history), ledger)
    most = max(np.nanmax(history), 1.0)
    for one in (made.forecast.p50, made.forecast.p90, made.p99):
        assert np.isfinite(one).all()
        assert min(one) >= 0.0
    assert max(made.forecast.p50) <= 5 * (most + 1)
    assert asdict(made.record)
