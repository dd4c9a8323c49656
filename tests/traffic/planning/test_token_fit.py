"""What tokens take of an engine: the fit finds the parameters of the simulator, and says when it cannot."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_agent.engines.sim.batching import BatchingModel, ModelParameters, Sequence
from traffic.planning.machine_cost import DEFAULT_WEIGHTS
from traffic.planning.token_fit import (
    BOUND,
    SAMPLES_LEAST,
    WorkSums,
    WorkTotals,
    fit_steps,
    fit_tokens,
    is_good,
    sample,
)

LOOK_S = 15.0


def simulated(parameters: ModelParameters, looks: int, seed: int) -> list[WorkTotals]:
    """Totals of a cell every 15 s of virtual time, under a load that rises, falls and mixes short and long prompts."""
    model, chance = BatchingModel(parameters), random.Random(seed)
    now_s = busy_s = 0.0
    steps = prompts = completions = number = 0
    totals: list[WorkTotals] = []
    prompt_of: dict[str, int] = {}
    next_look_s, next_arrival_s = LOOK_S, 0.0
    while len(totals) < looks:
        while next_arrival_s <= now_s:
            ask = Sequence(f"s{number}", chance.choice([60, 300, 1200, 3500]), chance.choice([1, 30, 120, 300]))
            model.submit(ask)
            prompt_of[ask.id] = ask.prompt_tokens
            number += 1
            level = (0.2, 1.0, 3.0, 0.5)[int(now_s // 120) % 4]
            next_arrival_s += chance.expovariate(level)
        step = model.begin_step(now_s)
        if step is None:
            now_s = next_arrival_s
        else:
            busy_s += step.ends_at_s - now_s
            now_s = step.ends_at_s
            steps += 1
            for token in model.finish_step():
                completions += 1
                prompts += prompt_of[token.sequence] if token.index == 0 else 0
        while now_s >= next_look_s:
            totals.append(WorkTotals(1.0, round(busy_s * 1000), steps, prompts, 0, completions))
            next_look_s += LOOK_S
    return totals


def sums_of(totals: list[WorkTotals]) -> WorkSums:
    found = (sample(before, after) for before, after in pairwise(totals))
    return sum((one for one in found if one is not None), WorkSums())


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "parameters",
    [
        ModelParameters(),
        ModelParameters(prefill_tokens_per_s=20_000, decode_step_ms=8, decode_step_per_seq_ms=0.6, max_num_seqs=128),
    ],
)
def test_the_simulators_own_parameters_are_found_within_five_per_cent(parameters: ModelParameters, seed: int) -> None:
    fit = fit_steps(sums_of(simulated(replace(parameters, seed=seed), 400, seed)))
    assert fit is not None
    assert is_good(fit)
    assert fit.prompt_s == pytest.approx(1 / parameters.prefill_tokens_per_s, rel=0.05)
    own = (parameters.decode_step_ms / fit.sequences + parameters.decode_step_per_seq_ms) / 1000
    assert fit.completion_s == pytest.approx(own, rel=0.05)
    assert fit.step_s == pytest.approx(parameters.decode_step_ms / 1000, rel=0.05)
    assert fit.cached_s == 0.0


TERM = st.floats(1e-6, 1e-2)
LOOKS = st.lists(
    st.tuples(st.integers(50, 2000), st.integers(100, 20_000), st.integers(0, 50_000), st.integers(0, 50_000)),
    min_size=SAMPLES_LEAST + 5, max_size=60, unique=True,
)  # fmt: skip


@given(TERM, TERM, TERM, TERM, LOOKS)
def test_exact_sums_are_explained_exactly_or_not_at_all(
    step: float, sequence: float, prompt: float, cached: float, looks: list[tuple[int, int, int, int]]
) -> None:
    sums = WorkSums()
    for steps, completion, fresh, hits in looks:
        busy_s = step * steps + sequence * completion + prompt * fresh + cached * hits
        found = sample(WorkTotals(1.0), WorkTotals(1.0, round(busy_s * 1000), steps, fresh + hits, hits, completion))
        sums += found or WorkSums()
    fit = fit_steps(sums)
    if fit is not None:
        assert min(fit.step_s, fit.sequence_s, fit.cached_s) >= 0
        assert fit.prompt_s > 0
        assert fit.error < 0.02
        own = sequence + step / fit.sequences
        if fit.weight_error < 0.01:
            assert fit.completion_s / fit.prompt_s == pytest.approx(own / prompt, rel=0.1)


def test_looks_that_are_all_alike_tell_nothing() -> None:
    alike = [WorkTotals(1.0, 15_000 * look, 600 * look, 3000 * look, 0, 9000 * look) for look in range(100)]
    assert fit_tokens([sums_of(alike)], DEFAULT_WEIGHTS) is None
    assert fit_tokens([sums_of(simulated(ModelParameters(), 20, 1))], DEFAULT_WEIGHTS) is None, "too few"
    assert fit_tokens([], DEFAULT_WEIGHTS) is None


@pytest.mark.parametrize(
    "after",
    [
        WorkTotals(2.0, 20_000, 900, 900, 0, 900),
        WorkTotals(1.0, 4_000, 900, 900, 0, 900),
        WorkTotals(1.0, 20_000, 100, 900, 0, 900),
        WorkTotals(1.0, 5_500, 900, 900, 0, 900),
        WorkTotals(1.0, 20_000, 900_000_000, 900, 0, 900),
        WorkTotals(1.0, 20_000, 900, 10**12, 0, 900),
        WorkTotals(1.0, 20_000, 200, 900, 0, 900),
    ],
    ids=["another life", "time goes back", "steps go back", "too short", "steps", "tokens", "no step"],
)
def test_what_cannot_be_so_is_no_sample(after: WorkTotals) -> None:
    assert sample(WorkTotals(1.0, 5_000, 200, 100, 0, 100), after) is None


@pytest.mark.slow
def test_one_node_that_lies_moves_nothing_where_there_are_three_and_is_bounded_where_it_is_alone() -> None:
    honest = [sums_of(simulated(ModelParameters(seed=seed), 120, seed)) for seed in range(3)]
    plain = fit_tokens(honest, DEFAULT_WEIGHTS)
    lies = [replace(each, prompt_tokens=each.prompt_tokens // 5000) for each in simulated(ModelParameters(), 120, 9)]
    lied = fit_tokens([*honest, sums_of(lies)], DEFAULT_WEIGHTS)
    assert plain is not None
    assert lied is not None
    assert lied.weights.completion / lied.weights.prompt == pytest.approx(
        plain.weights.completion / plain.weights.prompt, rel=0.1
    )
    short = [
        replace(each, completion_tokens=each.completion_tokens // 400) for each in simulated(ModelParameters(), 120, 9)
    ]
    alone = fit_tokens([sums_of(short)], DEFAULT_WEIGHTS)
    assert alone is not None
    assert alone.is_bounded
    listed = DEFAULT_WEIGHTS.completion / DEFAULT_WEIGHTS.prompt
    assert alone.weights.completion / alone.weights.prompt == pytest.approx(listed * BOUND, rel=0.01)
