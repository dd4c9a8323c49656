"""What a region states of its warm spares."""

from typing import Any

import pytest

from fleet.planning.placement.warm_spares import InvalidWarmSpares, WarmSpares, parse_warm_spares


def test_a_number_keeps_so_many_for_anybody() -> None:
    assert parse_warm_spares({"a": 2, "b": 0}) == {"a": WarmSpares(2), "b": WarmSpares(0)}


def test_some_can_be_for_repair_alone() -> None:
    assert parse_warm_spares({"a": {"warm": 3, "repair_only": 1}, "b": {"warm": 1}}) == {
        "a": WarmSpares(3, 1),
        "b": WarmSpares(1),
    }


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("two", "spares.a: warm is 'two'; it must be a whole number to 10000"),
        (True, "warm is True"),
        (-1, "warm is -1"),
        ({"repair_only": 1}, 'it must be a number or {"warm": …, "repair_only": …}'),
        ({"warm": 1, "growth": 1}, 'it must be a number or {"warm": …, "repair_only": …}'),
        ({"warm": 1, "repair_only": 2}, "spares.a: repair_only is 2; it must be at most 1"),
    ],
)
def test_nonsense_is_refused_with_what_would_be_right(value: Any, message: str) -> None:
    with pytest.raises(InvalidWarmSpares) as refused:
        parse_warm_spares({"a": value})
    assert message in str(refused.value)
