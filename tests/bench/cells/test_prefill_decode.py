"""The search for the highest rate ends, and finds more for more cells."""

import pytest

from bench.cells.prefill_decode import Fleet, Load, goodput

LOAD = Load(prompt=100, output=4)


@pytest.mark.parametrize("requests", [1, 5])
def test_a_search_with_few_requests_ends(requests: int) -> None:
    assert 0 < goodput(Fleet(mixed=4), LOAD, ttft_s=10, itl_s=10, requests=requests) <= 2 * requests


def test_limits_that_no_rate_meets_give_zero() -> None:
    assert goodput(Fleet(mixed=1), LOAD, ttft_s=0, itl_s=10, requests=5) == 0


def test_more_cells_carry_more() -> None:
    one, four = (goodput(Fleet(mixed=cells), LOAD, ttft_s=0.1, itl_s=0.05, requests=200) for cells in (1, 4))
    assert 0 < one < four
