"""Attention within a tree of guesses, and the accepted path."""

import pytest

from bench.models.tree_attention import accepted_path, shape_of

TREE = shape_of([[1], [0], [0, 0], [0, 1], [0, 1, 0]])
"""Positions: 0 the model's own token, 1 [0], 2 [1], 3 [0, 0], 4 [0, 1], 5 [0, 1, 0]."""


def test_a_guess_sees_its_ancestors_only() -> None:
    assert [list(TREE.ancestors(place)) for place in range(6)] == [
        [0], [1, 0], [2, 0], [3, 1, 0], [4, 1, 0], [5, 4, 1, 0],
    ]  # fmt: skip
    assert (TREE.depths, TREE.ranks) == ((0, 1, 1, 2, 2, 3), (0, 0, 1, 0, 1, 0))


@pytest.mark.parametrize(
    ("confirmed", "path"),
    [
        ([9, 9, 9, 9, 9, 9], [0]),
        ([11, 9, 9, 9, 9, 9], [0, 1]),
        ([12, 14, 9, 9, 15, 9], [0, 2]),
        ([11, 14, 9, 9, 15, 9], [0, 1, 4, 5]),
        ([11, 13, 9, 9, 15, 9], [0, 1, 3]),
    ],
)
def test_the_longest_path_that_the_model_confirms_is_accepted(confirmed: list[int], path: list[int]) -> None:
    assert accepted_path(TREE, [10, 11, 12, 13, 14, 15], confirmed) == path


def test_no_guesses_are_plain_decoding_and_an_orphan_is_refused() -> None:
    assert accepted_path(shape_of([]), [7], [3]) == [0]
    with pytest.raises(ValueError, match=r"\[0, 0\] without its parent"):
        shape_of([[0, 0]])
