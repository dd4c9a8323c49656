import numpy as np
import pytest

from fleet.planning.forecast.methods import DAY, average, blend, day_shape, last_value, seasonal_day
from fleet.planning.forecast.past import Floats
from tests.fleet.planning.forecast.pasts import days, past

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
