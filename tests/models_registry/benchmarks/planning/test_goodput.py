"""The search finds the rate at which an objective breaks, in few points and with its confidence; predictions for other
configurations of a shape, on virtual cells of `sim` with known steps; exact confidence intervals.
"""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_agent.engines.sim.batching import ModelParameters
from models_registry.benchmarks.planning.configuration_search import choices_of, shape_of
from models_registry.benchmarks.planning.goodput import (
    Found,
    GoodputRules,
    Measure,
    MeasuredShape,
    Outcome,
    PointVerdict,
    Usual,
    at_least_by_chance,
    at_most_by_chance,
    early_verdict,
    final_verdict,
    first_rate,
    length_s,
    plan_goodput,
    predict_goodput,
    rules_at,
    share_interval,
    warm_up_s,
)
from models_registry.benchmarks.planning.measurements import LoadedStep, NoFit, StepModel, fit_loaded_steps
from models_registry.benchmarks.planning.workload import Arrival, Slo, Workload
from tests.models_registry.benchmarks.planning.virtual_cell import VirtualCell, mean_field_knee, search

RULES = GoodputRules()
HELD, BROKEN = PointVerdict.HELD, PointVerdict.BROKEN


def outcomes(inside: int, outside: int) -> list[Outcome]:
    return [Outcome(True, 1.0)] * inside + [Outcome(False, 3.0)] * outside


def searched(knee: float, first: float, rules: GoodputRules = RULES) -> tuple[Found, list[float]]:
    """The result of a search in which rates below the knee hold, and the measured rates."""
    points: dict[float, PointVerdict] = {}
    while isinstance(step := plan_goodput(points, first, rules), Measure):
        assert step.rate not in points, "no rate is measured twice"
        points[step.rate] = HELD if step.rate <= knee else BROKEN
    return step, list(points)


def test_rates_double_until_one_breaks_and_are_bisected() -> None:
    found, rates = searched(knee=5.0, first=1.0)
    assert [round(rate, 3) for rate in rates] == [1.0, 2.0, 4.0, 8.0, 5.657, 4.757, 5.187, 4.967, 5.076]
    assert (round(found.rate, 3), round(found.broke_at or 0, 3), found.is_exact) == (4.967, 5.076, True)


def test_rates_are_halved_until_one_holds() -> None:
    assert searched(knee=0.3, first=2.0)[1][:4] == [2.0, 1.0, 0.5, 0.25]


@given(st.floats(0.1, 1000), st.floats(0.2, 7.9))
def test_the_knee_is_found_within_three_percent_in_ten_points(knee: float, away: float) -> None:
    found, rates = searched(knee, first=knee / away)
    assert found.is_exact
    assert found.rate <= knee < (found.broke_at or 0) <= 1.03 * found.rate
    assert len(rates) <= 10


@given(st.floats(0.1, 1000), st.floats(0.3, 7), st.floats(0.3, 7))
def test_wherever_it_begins_the_answer_is_the_same(knee: float, one: float, other: float) -> None:
    assert searched(knee, knee / one)[0] == searched(knee, knee / other)[0]


@given(st.lists(st.tuples(st.floats(0.01, 4000), st.sampled_from(PointVerdict)), max_size=12))
def test_it_ends_whatever_points_say(noise: list[tuple[float, PointVerdict]]) -> None:
    points = dict(noise)
    for _ in range(RULES.most_points + 2):
        step = plan_goodput(points, 1.0, RULES)
        if isinstance(step, Found):
            break
        points[step.rate] = BROKEN if len(points) % 2 else HELD
    assert isinstance(plan_goodput(points, 1.0, RULES), Found)


def test_what_never_breaks_and_what_never_holds_end_with_a_reason() -> None:
    assert searched(knee=1e9, first=1024.0)[0] == Found(
        4096.0, None, False, "4096/s held, and the highest rate to try is 4096/s"
    )
    assert searched(knee=0.0, first=0.03)[0].reason.startswith("even 0.007812/s broke")
    given_up = searched(knee=1e9, first=1.0, rules=replace(RULES, most_points=3))[0]
    assert (given_up.rate, given_up.reason) == (4.0, "4/s held after 3 points, the limit of one benchmark")


def test_the_first_rate_lies_between_one_at_a_time_and_all_at_once() -> None:
    assert first_rate(2.0, 64, RULES) == 4.0
    assert first_rate(0.0, 10**9, RULES) == RULES.highest_rate


def test_a_point_that_clearly_breaks_ends_at_the_first_look() -> None:
    assert early_verdict(outcomes(23, 1), RULES) is None, "no look is due"
    early = early_verdict(outcomes(20, 5), RULES)
    assert early is not None
    assert (early.verdict, early.is_early, early.is_proven) == (BROKEN, True, True)
    assert early.low < 0.8 < early.high < 0.99


def test_few_requests_prove_nothing_and_many_do() -> None:
    assert early_verdict(outcomes(400, 0), RULES) is None
    late = early_verdict(outcomes(800, 0), RULES)
    assert late is not None
    assert late.verdict is HELD


def test_requests_that_are_under_way_at_once_are_one_look() -> None:
    burst = outcomes(20, 5)
    assert early_verdict(burst, RULES) is not None
    assert early_verdict(burst, RULES, rate=10.0) is None, "14 at once met one burst"
    assert early_verdict(outcomes(800, 0), RULES, rate=10.0) is None, "80 looks prove no 99 %"
    clearly = early_verdict(outcomes(0, 25), RULES, rate=10.0)
    assert clearly is not None
    assert clearly.verdict is BROKEN
    wide, narrow = final_verdict(outcomes(198, 2), RULES, rate=10.0), final_verdict(outcomes(198, 2), RULES)
    assert (wide.verdict, wide.inside, wide.requests) == (HELD, 198, 200)
    assert wide.high - wide.low > narrow.high - narrow.low


@given(st.lists(st.booleans(), min_size=1, max_size=200), st.floats(0, 100))
def test_looks_are_never_more_than_requests(known: list[bool], rate: float) -> None:
    judged = final_verdict([Outcome(inside, 1.0) for inside in known], RULES, rate)
    assert 0 <= judged.low <= judged.high <= 1
    assert judged.requests == len(known)


def test_at_its_end_a_point_is_judged_by_its_share() -> None:
    assert final_verdict(outcomes(198, 2), RULES).verdict is HELD
    broken = final_verdict(outcomes(197, 3), RULES)
    assert (broken.verdict, broken.is_proven) == (BROKEN, False)
    assert final_verdict([], RULES).verdict is BROKEN


def test_looking_often_hardly_ever_errs() -> None:
    """The total error of all interim tests stays below that of one: a half, a quarter, and so on."""
    spent = sum((1 - RULES.confidence) / 2 / 2 ** (look + 1) for look in range(20))
    assert spent <= (1 - RULES.confidence) / 2


def test_points_of_a_share_of_the_length_are_so_much_shorter_and_stay_within_bounds() -> None:
    bounds = {"min_s": (1.0, 600.0), "min_requests": (20, 1000), "share": (0.5, 0.999)}
    usual = {"min_s": 60.0, "min_requests": 200, "share": 0.99}
    assert rules_at(0.25, usual, bounds) == {"min_s": 15.0, "min_requests": 50, "share": 0.99}
    assert rules_at(0.25, {"min_s": 2.0, "min_requests": 30}, bounds) == {"min_s": 1.0, "min_requests": 20}
    assert rules_at(1.0, usual, bounds) == usual


@pytest.mark.parametrize(
    ("rate", "durations_s", "lasts_s"),
    [
        (10.0, [], 60.0),
        (1.0, [], 200.0),
        (10.0, [5.0] * 100, 100.0),
        (0.1, [], 600.0),
        (10.0, [1.0] * 99 + [50.0], 60.0),
    ],
)
def test_a_point_lasts_as_long_as_its_slowest_rule(rate: float, durations_s: list[float], lasts_s: float) -> None:
    assert length_s(rate, durations_s, RULES) == lasts_s


def test_a_warm_up_is_as_long_as_a_request_may_take() -> None:
    assert [warm_up_s(longest_s, RULES) for longest_s in (1.0, 8.0, 1e9)] == [5.0, 8.0, RULES.most_s]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize(("prompt", "output", "itl_ms"), [(1000, 150, 40.0), (3000, 50, 80.0), (600, 100, 30.0)])
def test_on_sim_the_knee_is_the_computed_one(prompt: int, output: int, itl_ms: float, seed: int) -> None:
    """Within 5 % of the computed knee, in at most ten points; repeats with other jitter within 3 %."""
    workload = Workload("synthetic", prompt, output, arrival=Arrival.UNIFORM)
    slo = Slo(3.0, itl_ms / 1000)
    parameters = ModelParameters(seed=seed)
    found, points = search(VirtualCell(parameters, workload, slo))
    knee = mean_field_knee(parameters, workload, slo)
    assert abs(found.estimate / knee - 1) <= 0.05
    assert len(points) <= 10
    again, _ = search(VirtualCell(replace(parameters, seed=seed + 7), workload, slo))
    assert abs(again.estimate / found.estimate - 1) <= 0.03


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


@pytest.mark.long
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


def test_the_interval_is_the_published_one() -> None:
    """Rule of three, exactly: with no failure of n the upper bound is 1 - (0.025)^(1/n)."""
    low, high = share_interval(0, 10)
    assert (low, round(high, 6)) == (0.0, round(1 - 0.025**0.1, 6))
    assert [round(bound, 4) for bound in share_interval(198, 200)] == [0.9643, 0.9988]


def test_both_tails_meet_in_the_number_itself() -> None:
    both = at_most_by_chance(7, 20, 0.4) + at_least_by_chance(7, 20, 0.4)
    own = math.comb(20, 7) * 0.4**7 * 0.6**13
    assert both - 1 == pytest.approx(own)


@pytest.mark.parametrize(("successes", "trials"), [(1, 0), (3, 2), (-1, 4)])
def test_no_share_has_no_interval(successes: int, trials: int) -> None:
    with pytest.raises(ValueError, match="is not a share"):
        share_interval(successes, trials)


@given(st.integers(1, 400), st.data())
def test_the_share_that_was_seen_lies_within(trials: int, data: st.DataObject) -> None:
    successes = data.draw(st.integers(0, trials))
    low, high = share_interval(successes, trials)
    assert 0 <= low <= successes / trials <= high <= 1
