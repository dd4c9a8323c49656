"""From ranks by position to accuracies, chains and trees; the number of guesses from step costs."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models_registry.speculation.planner import (
    BadCalibration,
    BadStepCost,
    StepCost,
    Task,
    TaskFigures,
    choose,
    read_calibration,
    read_step_cost,
    task_figures,
)
from models_registry.versions.planning.speculation import check_tree

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
    """Two heads: "00" gives three tokens in one step, then "--" one; the second answer has two steps of one."""
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
        ([], "does not have format 1"),
        (stated(format=2), "does not have format 1"),
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


PLAN = TaskFigures("plan", 1000, ((0.8,),) * 4, (1.0, 1.8, 2.4, 2.8, 3.1), ((0,), (0, 0)), (800, 600), (1.0, 1.8, 2.4))
CHAT = TaskFigures("chat", 1000, ((0.4,),) * 4, (1.0, 1.4, 1.55, 1.6, 1.63), ((0,),), (400,), (1.0, 1.4))
FREE = StepCost("p5", "measured", "H100", "torch", {1: {1: 0.01, 5: 0.01}, 64: {1: 0.01, 5: 0.01}}, {})
DEAR = StepCost("cpu", "given", "", "", {1: {1: 0.1, 5: 0.2}, 16: {1: 0.4, 5: 1.6}}, {1: 0.001, 16: 0.016})


def test_where_verifying_is_free_all_heads_guess_as_far_as_was_measured() -> None:
    chosen = choose(PLAN, FREE, is_tree=False)
    assert (chosen.tokens, chosen.ranges, chosen.off_from) == (4, ((1, 64, 4), (65, 65, 0)), None)
    assert chosen.gain == pytest.approx(3.1)
    assert chosen.reason.startswith("4 guessed tokens give 3.10 tokens per step, which takes 1.00 times as long")


def test_larger_batches_guess_less_and_then_nothing() -> None:
    plan, chat = (choose(each, DEAR, is_tree=False) for each in (PLAN, CHAT))
    assert plan.off_from is not None
    assert chat.off_from is not None
    assert chat.off_from < plan.off_from
    assert plan.ranges[-1][2] == 0


def test_where_no_guess_pays_it_says_so() -> None:
    never = StepCost("cpu", "given", "", "", {1: {1: 0.1, 5: 0.5}}, {})
    chosen = choose(CHAT, never, is_tree=False)
    assert (chosen.tokens, chosen.ranges, chosen.off_from) == (0, ((1, 1, 0),), 1)
    assert chosen.reason == "no guess makes chat 1.05 times as fast on cpu, even for one sequence"


def test_a_tree_is_sized_by_the_cost_of_its_paths() -> None:
    assert choose(PLAN, FREE, is_tree=True).tokens == 2


def test_a_tree_without_a_path_guesses_nothing() -> None:
    nothing = TaskFigures("noise", 10, ((0.0,),), (1.0, 1.0), (), (), (1.0,))
    assert choose(nothing, FREE, is_tree=True).ranges == ((1, 1, 0),)


@given(
    st.lists(st.floats(0.0, 1.0), min_size=4, max_size=4),
    st.dictionaries(
        st.integers(1, 64), st.tuples(st.floats(0.001, 1.0), st.floats(0.001, 4.0)), min_size=1, max_size=5
    ),
)
def test_ranges_are_what_vllm_takes_and_never_grow(more: list[float], costs: dict[int, tuple[float, float]]) -> None:
    tokens = [1.0]
    for each in more:
        tokens.append(tokens[-1] + each)
    figures = TaskFigures("x", 1, (), tuple(tokens), (), (), (1.0,))
    cost = StepCost("x", "given", "", "", {batch: {1: low, 5: low + high} for batch, (low, high) in costs.items()}, {})
    ranges = choose(figures, cost, is_tree=False).ranges
    assert ranges[0][0] == 1
    assert all(first <= last for first, last, _ in ranges)
    assert all(one[1] + 1 == two[0] and one[2] > two[2] for one, two in pairwise(ranges))
    assert ranges[-1][2] == 0


def document(**changes: Any) -> dict[str, Any]:
    steps = [{"batch": 1, "verified": each, "seconds": 0.1 * each} for each in (1, 5)]
    return {"instance_type": "local.cpu", "source": "measured", "steps": steps, **changes}


def test_contexts_are_averaged_and_what_lies_between_is_on_a_line() -> None:
    rows = [{"batch": 1, "verified": 1, "seconds": 0.3, "context": 2048}]
    cost = read_step_cost(document(steps=[*document()["steps"], *rows], guess=[{"batch": 1, "seconds": 0.01}]))
    assert cost.step_s(1, 1) == pytest.approx(0.2)
    assert cost.step_s(1, 3) == pytest.approx(0.36)
    assert cost.step_s(8, 1) == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ([], "must be an object"),
        (document(source="guessed"), "source is 'guessed'; it must be measured or given"),
        (document(instance_type=""), "instance_type, hardware and software must be texts"),
        (document(steps=[]), "steps must be a list of 1 to 1024"),
        (document(steps=[{"batch": 0, "verified": 1, "seconds": 1}]), "batch is '0'; it must be a whole number from 1"),
        (document(steps=[{"batch": 1, "verified": 65, "seconds": 1}]), "verified is '65'"),
        (document(steps=[{"batch": 1, "verified": 1, "seconds": 0}]), "seconds is '0'; it must be a number above 0"),
        (document(steps=[{"batch": 1, "verified": 1, "seconds": float("nan")}]), "seconds is 'nan'"),
        (document(steps=[{"batch": 1, "verified": 1, "seconds": 10**400}]), "seconds is '1000"),
        (
            document(steps=[{"batch": 4, "verified": 2, "seconds": 1}]),
            r"batch 4 needs a step of 1 verified .* has \[2\]",
        ),
    ],
)
def test_what_is_no_step_cost_is_refused(stated: Any, message: str) -> None:
    with pytest.raises(BadStepCost, match=message):
        read_step_cost(stated)
