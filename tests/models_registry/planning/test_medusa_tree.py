"""The tree is the best there is, by every tree there could be, and bad trees are named."""

from itertools import combinations, product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models_registry.planning.medusa_tree import (
    Accuracies,
    BadTree,
    Path,
    build_tree,
    check_tree,
    expected_accepted,
)

TWO_HEADS: Accuracies = ((0.6, 0.2, 0.1), (0.5, 0.1))


@st.composite
def accuracies(draw: st.DrawFn, heads: int = 3, guesses: int = 2) -> Accuracies:
    """Few heads of few guesses, in hundredths, whose shares sum to at most 1."""
    drawn = []
    for _ in range(draw(st.integers(1, heads))):
        left, shares = 100, []
        for _ in range(draw(st.integers(1, guesses))):
            shares.append(draw(st.integers(0, left)))
            left -= shares[-1]
        drawn.append(tuple(share / 100 for share in shares))
    return tuple(drawn)


def all_paths(heads: Accuracies, depth: int) -> list[Path]:
    return [
        path for length in range(1, depth + 1) for path in product(*(range(len(shares)) for shares in heads[:length]))
    ]


def best_by_trying_every_tree(heads: Accuracies, size: int, depth: int) -> float:
    """The largest expectation of any prefix-closed set of at most `size` paths."""
    paths = all_paths(heads, depth)
    return max(
        expected_accepted(tree, heads)
        for count in range(size + 1)
        for tree in combinations(paths, count)
        if all(len(path) == 1 or path[:-1] in tree for path in tree)
    )


def test_the_most_probable_paths_are_taken_and_prefixes_come_first() -> None:
    tree = build_tree(TWO_HEADS, size=4, depth=2)
    assert tree.as_json() == [[0], [0, 0], [1], [2]]  # 0.6, 0.3, 0.2, 0.1
    assert tree.expected_accepted == pytest.approx(1.2)


def test_equal_paths_go_to_the_shorter_and_then_the_lower_guess() -> None:
    assert build_tree(((0.5, 0.5), (1.0,)), size=3, depth=2).as_json() == [[0], [1], [0, 0]]


def test_depth_limits_paths() -> None:
    assert max(map(len, build_tree(((0.9,), (0.9,), (0.9,)), size=9, depth=2).paths)) == 2


def test_guesses_that_are_never_right_are_left_out() -> None:
    assert build_tree(((0.5, 0.0), (0.0,)), size=9, depth=2).as_json() == [[0]]


@given(heads=accuracies(), size=st.integers(1, 5), data=st.data())
def test_no_tree_of_this_size_and_depth_is_expected_to_accept_more(
    heads: Accuracies, size: int, data: st.DataObject
) -> None:
    depth = data.draw(st.integers(1, len(heads)))
    tree = build_tree(heads, size=size, depth=depth)
    assert tree.expected_accepted == pytest.approx(best_by_trying_every_tree(heads, size, depth))
    assert tree.expected_accepted == pytest.approx(expected_accepted(tree.paths, heads))


@given(heads=accuracies(heads=5, guesses=10), size=st.integers(1, 80))
def test_every_built_tree_passes_the_check(heads: Accuracies, size: int) -> None:
    tree = build_tree(heads, size=size, depth=len(heads))
    assert len(tree.paths) <= size
    if tree.paths:
        assert set(check_tree(tree.as_json(), heads=len(heads), top_k=10)) == set(tree.paths)


@pytest.mark.parametrize(
    ("given_heads", "size", "depth", "message"),
    [
        ((), 1, 1, "there are no accuracies"),
        (((0.5,), ()), 1, 1, "head 1 has no accuracies"),
        (((1.5,),), 1, 1, r"accuracy of head 0, guess 0 is 1.5; it must be from 0 to 1"),
        (((float("nan"),),), 1, 1, "is nan"),
        (((0.6, 0.8),), 1, 1, r"sum to 1.4000; at most one guess of a head is right.*not the share of the top k"),
        (TWO_HEADS, 0, 1, "size is 0; it must be a whole number from 1"),
        (TWO_HEADS, 1, 3, "depth is 3; it must be from 1 to the number of heads, 2"),
    ],
)
def test_a_tree_that_cannot_be_built_says_why(given_heads: Accuracies, size: int, depth: int, message: str) -> None:
    with pytest.raises(BadTree, match=message):
        build_tree(given_heads, size=size, depth=depth)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ([], "must be a list of paths"),
        ({"0": 1}, "must be a list of paths"),
        ([[]], r"path \[\] must be a list of whole numbers from 0, with at least one"),
        ([[0], [True]], r"path \[True\] must be"),
        ([[0], [-1]], r"path \[-1\] must be"),
        ([[0], [0]], r"path \[0\] occurs twice"),
        ([[0], [0, 0], [0, 0, 0]], r"path \[0, 0, 0\] has 3 guesses, but there are 2 heads"),
        ([[4]], r"takes guess 4, but guesses go from 0 to 3"),
        ([[0], [1, 0]], r"path \[1, 0\] lacks its prefix \[1\]"),
    ],
)
def test_a_bad_tree_is_named(tree: Any, message: str) -> None:
    with pytest.raises(BadTree, match=message):
        check_tree(tree, heads=2, top_k=4)
