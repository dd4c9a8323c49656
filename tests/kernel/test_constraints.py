"""Structs changed from outside: what is refused, and the sentence that says so."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any

import msgspec
import pytest
from msgspec import Meta

from kernel.constraints import InvalidField, struct_changed


class Colour(StrEnum):
    RED = "red"
    GREEN = "green"


class Inner(msgspec.Struct, frozen=True):
    ratio: Annotated[float, Meta(ge=0, le=0.5)] = 0.1
    count: Annotated[int, Meta(ge=1, le=9)] = 1


class Outer(msgspec.Struct, frozen=True):
    colour: Colour = Colour.RED
    is_open: bool = True
    limit: Annotated[int, Meta(ge=0, le=5)] | None = None
    prices: Mapping[str, Annotated[float, Meta(ge=0, le=10)]] = {}
    names: Annotated[tuple[str, ...], Meta(min_length=1, description="a list of names")] = ("a",)
    inner: Inner = Inner()


def test_what_is_stated_changes_and_the_rest_stays() -> None:
    base = Outer(limit=2, inner=Inner(ratio=0.5))
    changed = struct_changed(base, {"colour": "green", "prices": {"a": 1}, "inner": {"count": 3}}, path="policy")
    assert changed == Outer(Colour.GREEN, limit=2, prices={"a": 1.0}, inner=Inner(0.5, 3))
    assert struct_changed(changed, {"limit": None, "names": ["b"]}, path="policy").names == ("b",)


@pytest.mark.parametrize(
    ("stated", "field", "message"),
    [
        ([], "policy", "policy is []; it must be an object"),
        ({"color": 1}, "color", "there is no color; there are: colour, is_open, limit, prices, names, inner"),
        ({"colour": "blue"}, "colour", "colour is 'blue'; it must be red or green"),
        ({"is_open": 1}, "is_open", "is_open is 1; it must be true or false"),
        ({"limit": 6}, "limit", "limit is 6; it must be a whole number from 0 to 5, or null"),
        ({"limit": True}, "limit", "limit is True; it must be a whole number from 0 to 5, or null"),
        ({"prices": [1]}, "prices", "prices is [1]; it must be an object"),
        ({"prices": {"a": 1, "b": 11}}, "prices.b", "prices.b is 11; it must be a number from 0 to 10"),
        ({"names": []}, "names", "names is []; it must be a list of names"),
        ({"inner": 2}, "inner", "inner is 2; it must be an object"),
        ({"inner": {"p99": 2}}, "inner.p99", "there is no inner.p99; there are: ratio, count"),
        ({"inner": {"count": 1.5}}, "inner.count", "inner.count is 1.5; it must be a whole number from 1 to 9"),
        ({"inner": {"ratio": float("nan")}}, "inner.ratio", "inner.ratio is nan; it must be a number from 0 to 0.5"),
    ],
)
def test_what_breaks_a_rule_is_named_with_what_would_be_right(stated: Any, field: str, message: str) -> None:
    with pytest.raises(InvalidField) as refused:
        struct_changed(Outer(), stated, path="policy")
    assert (refused.value.field, str(refused.value)) == (field, message)
