"""The search measures few configurations for long, and ends with the best."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models_registry.planning.configuration_search import (
    FIDELITIES,
    Choice,
    Searched,
    TooMany,
    Trial,
    choices_of,
    hopeful,
    plan_search,
)

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
    with pytest.raises(TooMany, match="1000 combinations; a search takes 512"):
        choices_of({"a": range(10), "b": range(10), "c": range(10)})


def test_what_is_predicted_far_from_the_best_is_not_measured() -> None:
    choices = choices_of({"tp": (1, 2, 4)})
    predicted = dict(zip(choices, (10.0, 6.0, 8.0), strict=True))
    assert hopeful(choices, predicted) == (choices[0], choices[2])
    assert hopeful(choices, {}) == choices


def test_halves_are_measured_for_longer() -> None:
    choices = choices_of(VARIED)
    true = {choice: float(place) for place, choice in enumerate(choices)}
    found, trials = search(choices, {}, true)
    assert [sum(trial.fidelity == fidelity for trial in trials) for fidelity in FIDELITIES] == [12, 6, 3]
    assert found.choice == choices[-1]
    assert found.reason == "11 requests a second and chip, 10 of the next"
    full = len(choices) * FIDELITIES[-1]
    assert sum(trial.fidelity for trial in trials) == 0.75 * full


def test_nothing_that_holds_is_no_choice() -> None:
    choices = choices_of({"tp": (1, 2)})
    assert search(choices, {}, dict.fromkeys(choices, 0.0))[0].choice is None
    assert plan_search((), {}, {}) == Searched(None, "no configuration held the objective at any rate")


@given(st.lists(st.floats(0.1, 100), min_size=1, max_size=40))
def test_exact_measurements_find_the_best_there_is(values: list[float]) -> None:
    choices = choices_of({"a": range(len(values))})
    true = dict(zip(choices, values, strict=True))
    found, trials = search(choices, true, true)
    assert found.choice is not None
    assert true[found.choice] == max(values)
    assert len(trials) <= 2 * len(values) + 3
