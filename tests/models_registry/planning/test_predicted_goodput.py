"""Points of one configuration predict others of its shape: on virtual cells of `sim`, whose steps are known."""

import pytest

from engine_agent.engines.sim.batching import ModelParameters
from models_registry.planning.configuration_search import choices_of, shape_of
from models_registry.planning.goodput import GoodputRules, MeasuredShape, Usual, predict_goodput
from models_registry.planning.step_model import LoadedStep, NoFit, StepModel, fit_loaded_steps
from models_registry.planning.workload import Arrival, Slo, Workload
from tests.models_registry.planning.virtual_cell import VirtualCell, search

TRUE = StepModel(0.020, 0.00025, 1 / 8000)
PROMPT, OUTPUT = 1000, 150
WORK_S = PROMPT / 8000 + 0.00025 * OUTPUT
SLO = Slo(3.0, 0.040)


def loaded(rate: float) -> LoadedStep:
    return LoadedStep(rate, TRUE.base_s / (1 - rate * WORK_S))


def test_two_loads_tell_a_step_from_the_work_of_a_request() -> None:
    model = fit_loaded_steps([loaded(1.0), loaded(3.0), loaded(2.0)], PROMPT)
    assert model.base_s == pytest.approx(TRUE.base_s)
    assert model.per_prompt_token_s * PROMPT == pytest.approx(WORK_S)
    assert model.goodput(PROMPT, OUTPUT, SLO, 1000) == pytest.approx(TRUE.goodput(PROMPT, OUTPUT, SLO, 1000))


@pytest.mark.parametrize(
    "points", [[], [loaded(1.0)], [loaded(1.0)] * 3, [LoadedStep(1.0, 0.05), LoadedStep(3.0, 0.02)]]
)
def test_one_load_or_steps_that_become_faster_tell_nothing(points: list[LoadedStep]) -> None:
    with pytest.raises(NoFit):
        fit_loaded_steps(points, PROMPT)


@pytest.mark.slow
@pytest.mark.parametrize("places", [4, 8, 16, 64])
def test_what_is_predicted_of_other_limits_is_near_what_is_measured(places: int) -> None:
    choices = choices_of({"engine_options.max_num_seqs": (places,)})
    shape = MeasuredShape((loaded(1.0), loaded(2.5)), PROMPT, OUTPUT, 1.0)
    predicted = predict_goodput(choices, {shape_of(choices[0]): shape}, SLO, Usual(64))
    workload = Workload("synthetic", PROMPT, OUTPUT, arrival=Arrival.UNIFORM)
    cell = VirtualCell(ModelParameters(max_num_seqs=places), workload, SLO, GoodputRules(min_requests=100))
    measured = search(cell)[0].estimate
    assert 0.75 * measured < predicted[choices[0]] < 1.35 * measured


def test_few_tokens_of_a_step_bound_the_rate() -> None:
    free = TRUE.goodput(PROMPT, OUTPUT, SLO, 64)
    assert TRUE.goodput(PROMPT, OUTPUT, SLO, 64, 100_000) == free
    assert TRUE.goodput(PROMPT, OUTPUT, SLO, 64, 64) < free
    assert TRUE.goodput(PROMPT, OUTPUT, Slo(0.1, 0.04), 64, 64) == 0, "16 steps until the first token"


def test_of_cells_apart_points_of_their_own_tell_nothing() -> None:
    (choice,) = choices_of({"cells": ({"prefill": 1, "decode": 3},)})
    shape = MeasuredShape((loaded(1.0), loaded(2.5)), PROMPT, OUTPUT, 1.0)
    assert predict_goodput([choice], {shape_of(choice): shape}, SLO, Usual(64)) == {}


def test_what_no_point_tells_of_is_not_predicted() -> None:
    choices = choices_of({"engine_options.max_num_seqs": (4, 8), "parallelism.tp": (1, 2)})
    one = MeasuredShape((loaded(1.0),), PROMPT, OUTPUT, 1.0)
    assert predict_goodput(choices, {shape_of(choices[0]): one}, SLO, Usual(64)) == {}
    two = MeasuredShape((loaded(1.0), loaded(2.0)), PROMPT, OUTPUT, 0.5)
    assert set(predict_goodput(choices, {shape_of(choices[0]): two}, SLO, Usual(64))) == {choices[0], choices[2]}
