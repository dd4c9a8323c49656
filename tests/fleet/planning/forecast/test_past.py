from datetime import timedelta

import numpy as np

from tests.fleet.planning.forecast.pasts import MADE, past

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
