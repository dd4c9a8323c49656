"""The bound of a type's cost follows from its price and its bandwidth alone."""

import pytest

from bench.capacity.rated_cost import TYPES, Work, rated, report

WORK = Work(weights_gb=70.0, cache_mb=0.328, batch=64, context=2048)


def test_cost_is_price_over_bandwidth() -> None:
    one, other = rated("inf2.48xlarge", WORK), rated("p5.48xlarge", WORK)
    assert one is not None
    assert other is not None
    by_bandwidth = (other.price_per_hour / other.gb_per_s) / (one.price_per_hour / one.gb_per_s)
    assert other.per_million / one.per_million == pytest.approx(by_bandwidth)


def test_a_type_that_is_too_small_or_has_no_price_has_no_row() -> None:
    assert rated("trn2.48xlarge", WORK) is None
    assert rated("g5.48xlarge", Work(300.0, 0.0, 1, 1)) is None
    found = [one for name in TYPES if (one := rated(name, WORK)) is not None]
    assert report(found).splitlines()[2].startswith("| inf2.48xlarge | 12.98 |")
