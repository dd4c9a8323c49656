"""Three steps tell what a step costs, and that tells the goodput."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_agent.engines.sim.batching import ModelParameters
from models_registry.planning.step_model import NoFit, StepModel, StepSample, fit_step_model
from models_registry.planning.workload import Slo, Workload
from tests.models_registry.planning.virtual_cell import mean_field_knee

TRUE = StepModel(0.020, 0.00025, 1 / 8000)
STEPS = ((1, 0), (32, 0), (8, 2048))


def steps(model: StepModel, errors: tuple[float, float, float] = (1, 1, 1)) -> list[StepSample]:
    return [StepSample(n, p, model.step_s(n, p) * error) for (n, p), error in zip(STEPS, errors, strict=True)]


def test_three_steps_give_the_parts_back() -> None:
    fitted = fit_step_model(steps(TRUE))
    assert fitted.base_s == pytest.approx(TRUE.base_s)
    assert fitted.per_sequence_s == pytest.approx(TRUE.per_sequence_s)
    assert fitted.per_prompt_token_s == pytest.approx(TRUE.per_prompt_token_s)


@pytest.mark.parametrize(
    "samples", [[], steps(TRUE)[:2], [StepSample(4, 0, 0.02)] * 3, [StepSample(n, 0, 0.02) for n in (1, 2, 3)]]
)
def test_steps_that_are_alike_tell_nothing(samples: list[StepSample]) -> None:
    with pytest.raises(NoFit, match="three steps that differ"):
        fit_step_model(samples)


@given(st.tuples(*[st.floats(0.98, 1.02)] * 3))
def test_what_follows_is_near_what_is_true_though_steps_vary(errors: tuple[float, float, float]) -> None:
    slo = Slo(3.0, 0.040)
    true = mean_field_knee(ModelParameters(), Workload("synthetic", 1000, 150), slo)
    predicted = fit_step_model(steps(TRUE, errors)).goodput(1000, 150, slo, 64)
    assert 0.7 * true < predicted < 1.3 * true


def test_no_rate_holds_where_an_empty_engine_is_too_slow() -> None:
    assert TRUE.goodput(1000, 150, Slo(3.0, 0.019), 64) == 0
    assert TRUE.goodput(100_000, 150, Slo(3.0, 0.1), 64) == 0


def test_few_places_bound_the_rate() -> None:
    slo = Slo(3.0, 0.5)
    assert TRUE.goodput(1000, 150, slo, 2) < TRUE.goodput(1000, 150, slo, 64)
