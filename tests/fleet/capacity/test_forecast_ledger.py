from dataclasses import replace
from datetime import timedelta

import numpy as np
import pytest

from fleet.capacity.planning.forecast import MARGIN, calibrate
from fleet.capacity.planning.forecast_series import LEADS, SCORES_LEAST, UNKNOWN_FACTORS, Calibration, Method, Record
from tests.fleet.capacity.pasts import MADE, past

SHAPE, BLEND = Method.SHAPE.value, Method.BLEND.value
STEADY = past(np.full(6 * 288, 100.0))
HALF_HOUR = timedelta(minutes=30)


def records(count: int, raised: float = 1.2, **p50: float) -> list[Record]:
    """One each half hour, the last half a day ago; each method always made the same forecast."""
    return [
        Record(
            MADE - timedelta(days=1) - number * HALF_HOUR,
            {method: (load,) * len(LEADS) for method, load in p50.items()},
            {method: (raised * load,) * len(LEADS) for method, load in p50.items()},
        )
        for number in range(1, count + 1)
    ]


def test_the_method_that_was_nearest_takes_over() -> None:
    ledger = calibrate(STEADY, records(160, blend=120.0, day_shape=101.0, last=110.0), Calibration())

    assert ledger.chosen == (SHAPE,) * len(LEADS)
    assert ledger.scores[SHAPE][0].wape == pytest.approx(0.01)
    assert ledger.scores[BLEND][0].wape == pytest.approx(0.2)


@pytest.mark.parametrize(("share", "chosen"), [(1 - MARGIN / 2, BLEND), (1 - 2 * MARGIN, SHAPE)])
def test_a_method_must_be_nearer_by_a_margin(share: float, chosen: str) -> None:
    seen = records(40, blend=120.0, day_shape=100.0 + 20 * share)

    assert calibrate(STEADY, seen, Calibration()).chosen[0] == chosen


def test_the_method_in_force_stays_while_none_is_much_better() -> None:
    before = Calibration((SHAPE,) * len(LEADS))

    assert calibrate(STEADY, records(40, blend=110.0, day_shape=110.1), before).chosen[0] == SHAPE


def test_nothing_is_concluded_from_few_records() -> None:
    ledger = calibrate(STEADY, records(SCORES_LEAST - 1, blend=200.0, last=100.0), Calibration())

    assert ledger.chosen[0] == BLEND
    assert ledger.scores[BLEND][0].factors == UNKNOWN_FACTORS


def test_methods_are_compared_where_both_had_a_say() -> None:
    early = [replace(one, made_at=one.made_at - timedelta(days=1)) for one in records(40, blend=300.0)]
    both = records(40, blend=101.0, day_shape=110.0)

    assert calibrate(STEADY, [*early, *both], Calibration()).chosen[0] == BLEND


def test_the_p90_follows_the_ratios_that_were_seen() -> None:
    loads = np.full(4 * 288, 100.0)
    loads[-288 - 60 : -288 - 30] = 150.0

    factors = calibrate(past(loads), records(80, blend=100.0), Calibration()).scores[BLEND][0].factors

    assert factors[0] == pytest.approx(1.0)
    assert factors[1] == pytest.approx(150.5 / 100.5, rel=1e-3)


def test_a_p90_that_held_says_so() -> None:
    held = calibrate(STEADY, records(40, raised=1.2, blend=90.0), Calibration()).scores[BLEND][0].held
    broken = calibrate(STEADY, records(40, raised=1.05, blend=90.0), Calibration()).scores[BLEND][0].held

    assert (held, broken) == (1.0, 0.0)


def test_a_horizon_without_errors_of_its_own_takes_the_factors_of_the_one_before() -> None:
    young = [replace(one, made_at=MADE - number * HALF_HOUR) for number, one in enumerate(records(30, blend=80.0), 1)]

    scores = calibrate(STEADY, young, Calibration()).scores[BLEND]

    assert scores[-1].count == 0
    assert scores[-1].factors == scores[2].factors != UNKNOWN_FACTORS


def test_what_was_not_seen_is_not_judged() -> None:
    holed = past(np.full(4 * 288, np.nan))

    ledger = calibrate(holed, records(40, blend=1.0), Calibration((SHAPE,) * len(LEADS)))

    assert ledger.scores[BLEND][0].count == 0
    assert ledger.chosen[0] == SHAPE


def test_records_of_more_than_a_week_ago_count_no_longer() -> None:
    old = [replace(one, made_at=one.made_at - timedelta(days=7)) for one in records(40, blend=300.0, last=100.0)]

    assert calibrate(past(np.full(12 * 288, 100.0)), old, Calibration()).chosen[0] == BLEND
