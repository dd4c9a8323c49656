import pytest

from fleet.planning.emptying import emptied_regions, empties_origin


@pytest.mark.parametrize(
    ("before", "after", "empties"),
    [(1, 0, True), (20, 1, True), (1000, 1, True), (10, 1, False), (2, 1, False), (0, 0, False), (0, 3, False)],
)
def test_a_region_that_keeps_less_than_a_tenth_of_its_cells_is_emptied(before: int, after: int, empties: bool) -> None:
    assert bool(emptied_regions({"a": before}, {"a": after})) is empties


def test_regions_that_are_not_named_stay() -> None:
    assert emptied_regions({"a": 2, "b": 2, "c": 3}, {"c": 0, "b": 0}) == ("b", "c")


@pytest.mark.parametrize(("shares", "empties"), [({"a": 0.1}, False), ({"a": 0.09}, True), ({"b": 1.0}, True)])
def test_a_region_that_keeps_less_than_a_tenth_of_its_requests_is_emptied(
    shares: dict[str, float], empties: bool
) -> None:
    assert empties_origin(shares, "a") is empties
