"""Parameters that may be varied, the draft of each choice, and a search that measures few configurations at full length
and finds the best.
"""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.versions import LOCAL, P5, spec
from models_registry.benchmarks.planning.configuration_search import (
    FIDELITIES,
    Choice,
    InvalidVaried,
    Searched,
    SearchLimits,
    Spent,
    Standing,
    TooMany,
    Trial,
    budget_of,
    cells_count,
    cells_of,
    choice_text,
    choices_of,
    frozen_choice,
    hopeful,
    is_apart,
    parse_varied,
    places_of,
    plan_search,
    shape_of,
    standings,
    varied_columns,
    without,
)

NGRAM = {"method": "ngram", "tokens": 3}
ON_P5 = {"max_concurrency": 2}
BASE = spec("vllm", LOCAL, {"tp": 1}, engine_options={"max-num-seqs": 8, "dtype": "float32"})


@pytest.mark.parametrize(
    ("stated", "told"),
    [
        ({}, "nothing is varied"),
        ({"golden_prompts": [[]]}, "'golden_prompts' cannot be varied; it must be engine_options.NAME"),
        ({"engine_options": [{}]}, "cannot be varied"),
        ({"parallelism.depth": [1]}, "cannot be varied"),
        ({"max_concurrency": []}, "must have a list of 1 to 32 values"),
        ({"max_concurrency": "8"}, "must have a list"),
        ({"max_concurrency": list(range(1, 40))}, "1 to 32"),
        ({"max_concurrency": [0]}, "a whole number from 1"),
        ({"parallelism.tp": [True]}, "a whole number from 1"),
        ({"speculation": ["ngram"]}, "must be an object"),
        ({"engine_options.x": [[1]]}, "a number, a text, true, false or null"),
        ({"engine_options.x": [1, 1]}, "a value twice"),
        ({"cells": [0]}, "a whole number from 1"),
        ({"cells": ["1p+3d"]}, "a whole number from 1"),
        ({"cells": [{"prefill": 1}]}, "prefill and decode from 1"),
        ({"cells": [{"prefill": 0, "decode": 2}]}, "prefill and decode from 1"),
        ({"cells": [{"prefill": 1, "decode": 2, "more": 1}]}, "prefill and decode from 1"),
        ({"cells": [4, {"prefill": 1, "decode": 3}, {"prefill": 1, "decode": 3}]}, "a value twice"),
    ],
)
def test_what_cannot_be_varied_says_what_can(stated: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidVaried, match=told):
        parse_varied(stated)


def test_names_of_options_are_spelt_one_way() -> None:
    assert parse_varied({"engine_options.max-num-seqs": [1, None]}) == {"engine_options.max_num_seqs": (1, None)}


@pytest.mark.parametrize(
    ("choice", "columns"),
    [
        ([("engine_options.max_num_seqs", 32)], {"engine_options": {"max-num-seqs": 32, "dtype": "float32"}}),
        ([("engine_options.max_num_seqs", None)], {"engine_options": {"dtype": "float32"}}),
        ([("engine_options.new", True)], {"engine_options": {**BASE.engine_options, "new": True}}),
        ([("parallelism.tp", 2)], {"parallelism": {"local.cpu": {"tp": 2}}}),
        ([("parallelism.tp", 2), ("parallelism.pp", 2)], {"parallelism": {"local.cpu": {"tp": 2, "pp": 2}}}),
        ([("max_concurrency", 4), ("speculation", NGRAM)], {"max_concurrency": 4, "speculation": NGRAM}),
        ([("roles", {"prefill": {"max_concurrency": 4}})], {"roles": {"prefill": {"max_concurrency": 4}}}),
    ],
)
def test_a_choice_becomes_columns(choice: list[tuple[str, Any]], columns: dict[str, Any]) -> None:
    assert varied_columns(BASE, choice, LOCAL.name) == columns
    assert BASE.engine_options == {"max-num-seqs": 8, "dtype": "float32"}, "the base stays"


@pytest.mark.parametrize(
    ("choice", "columns"),
    [
        (
            [("engine_options.max_num_seqs", 32)],
            {"by_type": {P5.name: {**ON_P5, "engine_options": {"max-num-seqs": 32}}}},
        ),
        ([("engine_options.dtype", None)], {"by_type": {P5.name: {**ON_P5, "engine_options": {"dtype": None}}}}),
        ([("max_concurrency", 4)], {"by_type": {P5.name: {"max_concurrency": 4}}}),
        ([("parallelism.tp", 2)], {"parallelism": {"local.cpu": {"tp": 1}, P5.name: {"tp": 2}}}),
        ([("max_concurrency", 2), ("engine_options.max_num_seqs", 8), ("parallelism.tp", 4)], {}),
    ],
)
def test_a_choice_for_one_of_several_instance_types_is_for_that_one_alone(
    choice: list[tuple[str, Any]], columns: dict[str, Any]
) -> None:
    several = replace(BASE, parallelism={LOCAL.name: {"tp": 1}, P5.name: {"tp": 4}}, by_type={P5.name: ON_P5})
    assert varied_columns(several, choice, P5.name) == columns


def test_cells_are_no_column_and_are_read_off_a_choice() -> None:
    pools = {"prefill": 1, "decode": 2, "mixed": 1}
    assert varied_columns(BASE, [("cells", pools)], LOCAL.name) == {}
    choice = frozen_choice([["cells", pools], ["max_concurrency", 4]])
    assert (cells_of(choice), is_apart(choice)) == (pools, True)
    assert choice_text(choice) == "cells=1p+2d+1m, max_concurrency=4"
    assert (cells_of([("cells", 4)]), is_apart([("cells", 4)]), cells_of([])) == (4, False, None)
    assert (cells_count(pools), cells_count(4)) == (4, 4)


def test_limits_are_read_off_a_choice() -> None:
    choice = [
        ("max_concurrency", 4),
        ("engine_options.max_num_seqs", 6),
        ("engine_options.max_num_batched_tokens", 512),
    ]
    assert (places_of(choice, 16), budget_of(choice)) == (6, 512)
    assert (places_of([], 16), budget_of([])) == (16, None)


def test_a_choice_reads_in_a_line_and_can_be_a_key() -> None:
    stored: list[list[Any]] = [
        ["engine_options.max_num_seqs", 8],
        ["speculation", {"method": "ngram"}],
        ["quantization", {}],
    ]
    choice = frozen_choice(stored)
    assert choice_text(choice) == "max_num_seqs=8, speculation=ngram, quantization=none"
    assert {choice: 1}[frozen_choice(stored)] == 1
    assert choice_text(()) == "unchanged"


VARIED = {"max_num_batched_tokens": (512, 2048, 8192), "tp": (1, 2), "speculation": ("", "ngram")}


def search(
    choices: tuple[Choice, ...], predicted: dict[Choice, float], true: dict[Choice, float]
) -> tuple[Searched, list[Trial]]:
    measured: dict[tuple[Choice, float], float] = {}
    trials = []
    while isinstance(step := plan_search(choices, predicted, measured), Trial):
        assert (step.choice, step.fidelity) not in measured
        measured[step.choice, step.fidelity] = true[step.choice]
        trials.append(step)
    return step, trials


def test_every_combination_is_one_choice() -> None:
    choices = choices_of(VARIED)
    assert len(set(choices)) == 12
    assert dict(choices[0]) == {"max_num_batched_tokens": 512, "tp": 1, "speculation": ""}
    with pytest.raises(TooMany, match="1000 combinations; a search accepts 512"):
        choices_of({"a": range(10), "b": range(10), "c": range(10)})


def test_what_is_predicted_far_from_the_best_is_not_measured() -> None:
    choices = choices_of({"tp": (1, 2, 4)})
    predicted = dict(zip(choices, (10.0, 6.0, 8.0), strict=True))
    assert hopeful(choices, predicted, {}) == (choices[0], choices[2])
    assert hopeful(choices, {}, {}) == choices
    assert hopeful(choices, predicted, {(choices[1], 0.25): 1.0})[-1] == choices[1], "it was measured already"


def test_halves_are_measured_for_longer() -> None:
    choices = choices_of(VARIED)
    true = {choice: float(place) for place, choice in enumerate(choices)}
    found, trials = search(choices, {}, true)
    assert [sum(trial.fidelity == fidelity for trial in trials) for fidelity in FIDELITIES] == [12, 6, 3]
    assert found.choice == choices[-1]
    assert found.reason == "11 requests per second and chip, 10 for the next best"
    full = len(choices) * FIDELITIES[-1]
    assert sum(trial.fidelity for trial in trials) == 0.75 * full


def test_nothing_that_holds_is_no_choice() -> None:
    choices = choices_of({"tp": (1, 2)})
    assert search(choices, {}, dict.fromkeys(choices, 0.0))[0].choice is None
    assert plan_search((), {}, {}) == Searched(None, "no configuration met the objective at any rate")


@given(st.lists(st.floats(0.1, 100), min_size=1, max_size=40))
def test_exact_measurements_find_the_best_there_is(values: list[float]) -> None:
    choices = choices_of({"a": range(len(values))})
    true = dict(zip(choices, values, strict=True))
    found, trials = search(choices, true, true)
    assert found.choice is not None
    assert true[found.choice] == max(values)
    assert len(trials) <= 2 * len(values) + 3


# --- shapes, limits, standings ---------------------------------------------------------------------------------------

SHAPES = choices_of({"engine_options.max_num_seqs": (8, 16, 32), "parallelism.tp": (1, 2)})


def test_configurations_that_differ_in_limits_alone_have_one_shape() -> None:
    assert len({shape_of(choice) for choice in SHAPES}) == 2


def test_one_of_each_shape_is_measured_first() -> None:
    measured: dict[tuple[Choice, float], float] = {}
    first = []
    for _ in range(2):
        step = plan_search(SHAPES, {}, measured)
        assert isinstance(step, Trial)
        measured[step.choice, step.fidelity] = 1.0
        first.append(dict(step.choice))
    assert sorted(one["parallelism.tp"] for one in first) == [1, 2]
    assert {one["engine_options.max_num_seqs"] for one in first} == {32}, "the widest tells most"


@pytest.mark.parametrize(
    ("spent", "told"),
    [(Spent(trials=4), "after 4 trials, the limit"), (Spent(seconds=7200.0), "after 2.0 hours, the limit")],
)
def test_at_its_limits_the_best_so_far_is_what_was_found(spent: Spent, told: str) -> None:
    measured = {(SHAPES[0], 0.25): 3.0, (SHAPES[1], 0.25): 5.0}
    step = plan_search(SHAPES, {}, measured, SearchLimits(most_trials=4, most_s=7200.0), spent)
    assert isinstance(step, Searched)
    assert (step.choice, step.is_whole) == (SHAPES[1], False)
    assert told in step.reason
    assert "25% of the length" in step.reason


def test_what_cannot_be_measured_is_never_the_best() -> None:
    measured = {(SHAPES[0], 0.25): 3.0, (SHAPES[1], 0.25): 5.0}
    left = without(SHAPES[:2], {SHAPES[1]})
    step = plan_search(left, {}, measured, SearchLimits(most_trials=1), Spent(trials=1))
    assert isinstance(step, Searched)
    assert step.choice == SHAPES[0]


def test_it_is_told_of_each_why_it_is_where_it_is() -> None:
    a, b, c, d, e, f = SHAPES
    measured = {(a, 0.25): 4.0, (b, 0.25): 8.0, (c, 0.25): 7.0}
    found = standings(SHAPES, {d: 1.0, e: 6.0}, measured, {f: "tp is 2; it must be 1"})
    assert found[f] == (Standing.REFUSED, "tp is 2; it must be 1")
    assert found[d] == (Standing.PRUNED, "predicted 1/s per chip, below 70% of the best, 8")
    assert found[e] == (Standing.WAITING, "to be measured at 25% of the length, 6/s per chip predicted")
    assert found[b] == (Standing.LEFT, "8/s per chip at 25% of the length")
    then = standings(SHAPES, {d: 1.0}, measured | {(e, 0.25): 6.5}, {f: "no"})
    assert then[a] == (Standing.DROPPED, "4/s per chip at 25% of the length, not in the better half")
    assert then[b] == (Standing.WAITING, "to be measured at 50% of the length")
    ended = standings(SHAPES, {d: 1.0, e: 6.0}, measured, {f: "no"}, is_over=True)
    why = "the search ended before it was measured at 25% of the length, 6/s per chip predicted"
    assert ended[e] == (Standing.UNMEASURED, why)
    assert {kind for kind, _ in ended.values()}.isdisjoint({Standing.WAITING})


@given(
    st.lists(st.floats(0, 100), min_size=6, max_size=6),
    st.dictionaries(st.sampled_from(SHAPES), st.floats(0, 100)),
    st.integers(1, 12),
)
def test_it_ends_and_each_configuration_has_a_standing(
    values: list[float], predicted: dict[Choice, float], most: int
) -> None:
    true = dict(zip(SHAPES, values, strict=True))
    measured: dict[tuple[Choice, float], float] = {}
    limits = SearchLimits(most_trials=most)
    while isinstance(step := plan_search(SHAPES, predicted, measured, limits, Spent(len(measured))), Trial):
        measured[step.choice, step.fidelity] = true[step.choice]
        left = {choice: value for choice, value in predicted.items() if (choice, 0.25) not in measured}
        assert set(standings(SHAPES, left, measured, {})) == set(SHAPES)
    assert len(measured) <= most
    assert step.choice is None or true[step.choice] > 0
