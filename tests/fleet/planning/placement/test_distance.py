"""What distance in the network means."""

import pytest

from fleet.planning.placement.distance import (
    Path,
    common_prefix,
    depth_of,
    distance,
    failure_domain,
    free_position,
    shared_prefix,
    total_distance,
)


@pytest.mark.parametrize(
    ("one", "other", "shared", "apart"),
    [
        ((), (), 0, 3),
        (("a", "b", "c"), (), 0, 3),
        (("a",), ("b",), 0, 3),
        (("a", "b", "c"), ("a", "x", "c"), 1, 2),
        (("a", "b", "c"), ("a", "b", "d"), 2, 1),
        (("a", "b", "c"), ("a", "b", "c"), 3, 0),
        (("a",), ("a", "b", "c"), 1, 2),
    ],
)
def test_distance_is_the_levels_that_are_not_shared_and_the_unknown_is_far(
    one: Path, other: Path, shared: int, apart: int
) -> None:
    assert shared_prefix(one, other) == shared
    assert distance(one, other, 3) == distance(other, one, 3) == apart


def test_total_distance_counts_every_pair_of_every_cell() -> None:
    near = [("s", "r1"), ("s", "r1"), ("s", "r2")]
    assert total_distance([near], 2) == 0 + 1 + 1
    assert total_distance([near, [("s", "r1"), ("t", "r1")], [("s", "r1")]], 2) == 2 + 2 + 0


def test_a_pool_is_as_deep_as_its_longest_topology_and_never_flat() -> None:
    assert depth_of([(), ("a", "b"), ("a",)]) == 2
    assert depth_of([(), ()]) == depth_of([]) == 1


def test_what_nodes_share_and_what_fails_with_them() -> None:
    assert common_prefix([("a", "b", "c"), ("a", "b", "d"), ("a", "b", "c")]) == ("a", "b")
    assert (failure_domain(("a", "b")), failure_domain(())) == ("a", "")


def rack(position: int) -> Path:
    """Two machines a rack, two racks a hall."""
    return f"h{position // 4}", f"r{position // 2}"


@pytest.mark.parametrize(
    ("taken", "near", "expected"),
    [
        ([], (), 0),
        ([rack(0), rack(1)], (), 2),
        ([rack(1), rack(3)], (), 1),
        ([rack(0), rack(2)], rack(2), 3),
        ([rack(0), rack(2), rack(3)], rack(2), 1),
        ([rack(0), rack(1), rack(2), rack(3)], rack(2), 4),
        ([("elsewhere",)], rack(9), 8),
    ],
)
def test_a_new_machine_stands_at_the_first_free_place_of_the_nearest(
    taken: list[Path], near: Path, expected: int
) -> None:
    assert free_position(rack, taken, near) == expected
