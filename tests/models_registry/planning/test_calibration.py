"""From ranks position by position to accuracies, chains and trees."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models_registry.planning.calibration import BadCalibration, Task, read_calibration, task_figures
from models_registry.planning.medusa_tree import check_tree

TWO_HEADS = Task("chat", 2, ("00" + "0-" + "1-" + "--", "10" + "--"))
"""Six positions: the first head is right at rank 0 in two, at rank 1 in two."""


def stated(**changes: Any) -> dict[str, Any]:
    task = {"name": "chat", "answers": ["0---", "00"]}
    return {"format": 1, "model": "sha256:ab", "heads_sha256": "cd", "heads": 2, "tasks": [task], **changes}


def test_accuracies_are_shares_of_positions_by_head_and_rank() -> None:
    first, second = task_figures(TWO_HEADS).accuracies
    assert first[:3] == (2 / 6, 2 / 6, 0)
    assert second[:2] == (2 / 6, 0), "by itself, also behind a wrong first guess"


def test_a_chain_is_walked_as_decoding_goes_through_the_answers() -> None:
    """Two heads: "00" gives three tokens at once, then "--" its own; the second answer has two steps of one."""
    chain = task_figures(TWO_HEADS).chain
    assert chain[0] == 1.0
    assert chain[2] == 6 / 4
    assert chain[1] == 6 / 5


def test_paths_are_counted_whole_and_the_most_frequent_are_the_tree() -> None:
    found = task_figures(TWO_HEADS)
    assert found.paths == ((0,), (1,), (0, 0), (1, 0))
    assert found.counts == (2, 2, 1, 1)


RANKS = st.sampled_from("0123-")
ANSWERS = st.lists(
    st.lists(RANKS, min_size=3, max_size=60).map(lambda each: "".join(each[: len(each) // 3 * 3])),
    min_size=2,
    max_size=6,
)


@given(ANSWERS)
def test_trees_are_trees_and_larger_ones_are_no_worse(answers: list[str]) -> None:
    found = task_figures(Task("chat", 3, tuple(answers)))
    for size in range(1, len(found.paths) + 1):
        check_tree([list(path) for path in found.paths[:size]], heads=3)
    assert all(more <= fewer for fewer, more in pairwise(found.counts))
    assert all(1 <= each <= 4 for each in (*found.chain, *found.tree))


def test_what_the_trainer_writes_is_read() -> None:
    read = read_calibration(stated())
    assert (read.heads, read.tasks[0].positions) == (2, 3)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], "no format 1"),
        (stated(format=2), "no format 1"),
        (stated(heads=0), "heads is 0; it must be a whole number from 1 to 8"),
        (stated(heads=True), "heads is True"),
        (stated(model=""), "model is ''; it must be a text of 1 to 100"),
        (stated(tasks=[]), "tasks must be a list of 1 to 8"),
        (stated(tasks=[5]), "task '5' must be an object"),
        (stated(tasks=[{"name": "chat", "answers": ["0-"]}]), "answers must be a list of 2 to 4096"),
        (stated(tasks=[{"name": "chat", "answers": ["0-", "0"]}]), "answer '0' must be 2 characters for each position"),
        (stated(tasks=[{"name": "chat", "answers": ["0-", "0a"]}]), "digits or -"),
        (stated(tasks=[{"name": "chat", "answers": ["0-", "0-"]}] * 2), "two tasks have the same name"),
        (stated(tasks=[{"name": "chat", "answers": ["0-" * 200_000, "00" * 100_000]}]), "more than 524288 characters"),
    ],
)  # fmt: skip
def test_what_is_no_calibration_is_refused(document: Any, message: str) -> None:
    with pytest.raises(BadCalibration, match=message):
        read_calibration(document)
