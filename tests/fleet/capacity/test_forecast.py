from dataclasses import asdict
from datetime import timedelta

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.capacity.planning.forecast import (
    DAY,
    Floats,
    average,
    blend,
    day_shape,
    forecast_series,
    last_value,
    seasonal_day,
)
from fleet.capacity.planning.forecast_series import LEADS, SCORES_LEAST, SLOTS, Calibration, Method, Score, horizon_of
from tests.fleet.capacity.pasts import DAY_SLOTS, KEY, MADE, days, past

NAN = float("nan")


def test_blocks_end_where_the_past_does() -> None:
    blocks = past(np.array([9.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0])).blocks()

    np.testing.assert_array_equal(blocks, [2.0, 5.0])


def test_a_block_of_which_most_is_not_known_is_a_hole() -> None:
    blocks = past(np.array([1.0, NAN, NAN, 2.0, NAN, 4.0])).blocks()

    np.testing.assert_array_equal(blocks, [NAN, 3.0])


def test_loads_that_cannot_be_are_holes() -> None:
    blocks = past(np.array([-1.0, np.inf, 2.0, 2.0, 2.0, -np.inf])).blocks()

    np.testing.assert_array_equal(blocks, [NAN, 2.0])


def test_a_block_is_found_by_its_begin_once_it_is_over() -> None:
    seen = past(np.array([1.0, 2.0, 3.0, 4.0, 5.0]))

    assert seen.block_from(MADE - timedelta(minutes=15)) == 4.0
    assert seen.block_from(MADE - timedelta(minutes=25)) == 2.0
    for starts_at in (MADE - timedelta(minutes=10), MADE, MADE - timedelta(minutes=30)):
        assert np.isnan(seen.block_from(starts_at))


METHODS = (average, last_value, seasonal_day, day_shape, blend)


def here(blocks: Floats) -> np.ndarray:
    return np.array([len(blocks)])


def test_a_steady_load_is_expected_to_stay_by_every_method() -> None:
    blocks = np.full(8 * DAY, 25.0)

    for method in METHODS:
        np.testing.assert_allclose(method(blocks, here(blocks)), 25.0)


def test_days_that_repeat_are_expected_to_repeat() -> None:
    blocks = past(days(5)).blocks()
    tomorrow = past(days(6)).blocks()[-DAY:]

    for method in (seasonal_day, day_shape, blend):
        off = np.abs(method(blocks, here(blocks))[0] - tomorrow).sum() / tomorrow.sum()
        assert off < 0.08, method.__name__


def test_a_day_at_twice_the_level_is_expected_to_stay_high_for_some_hours() -> None:
    blocks = past(days(5)).blocks()
    as_ever = day_shape(blocks, here(blocks))[0]
    blocks[-4:] *= 2

    ratio = day_shape(blocks, here(blocks))[0] / as_ever

    assert ratio[0] == pytest.approx(2.0, rel=0.15)
    assert 1.0 < ratio[8] < ratio[0]
    assert ratio[60] == pytest.approx(1.0, rel=0.01)


def test_the_blend_begins_at_the_last_value_and_ends_at_the_shape() -> None:
    blocks = past(days(5)).blocks()
    blocks[-1] *= 3

    mixed, last, shape = (method(blocks, here(blocks))[0] for method in (blend, last_value, day_shape))

    assert abs(np.log(mixed[0] / last[0])) < abs(np.log(mixed[0] / shape[0]))
    assert mixed[-1] == pytest.approx(shape[-1])


def test_a_hole_is_bridged_and_never_a_zero() -> None:
    blocks = past(days(5)).blocks()
    holed = blocks.copy()
    holed[-3:] = np.nan
    holed[DAY : DAY + 20] = np.nan

    np.testing.assert_allclose(last_value(holed, here(holed)), blocks[-4])
    np.testing.assert_allclose(blend(holed, here(holed)), blend(blocks, here(blocks)), rtol=0.35)


def test_what_is_older_than_two_hours_is_no_last_value() -> None:
    blocks = past(days(5)).blocks()
    blocks[-8:] = np.nan

    assert np.isnan(last_value(blocks, here(blocks))).all()
    np.testing.assert_allclose(blend(blocks, here(blocks)), day_shape(blocks, here(blocks)))


@pytest.mark.parametrize("known", [0, 1, 5])
def test_without_a_yesterday_there_is_only_what_is_known(known: int) -> None:
    blocks = np.full(known, 10.0)

    for method in (seasonal_day, day_shape):
        assert np.isnan(method(blocks, here(blocks))[0, : DAY - known]).all()
    for method in (average, last_value, blend):
        np.testing.assert_allclose(method(blocks, here(blocks)), 10.0 if known else np.nan)


def test_an_origin_knows_nothing_of_what_comes_after_it() -> None:
    blocks = past(days(9)).blocks()
    origins = np.array([5 * DAY, 6 * DAY + 7])
    later = blocks.copy()
    later[origins[-1] :] = 1e6

    for method in METHODS:
        np.testing.assert_array_equal(method(blocks, origins)[-1], method(later, origins)[-1])
        np.testing.assert_array_equal(method(blocks, origins)[0], method(blocks[: origins[0]], origins[:1])[0])


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
