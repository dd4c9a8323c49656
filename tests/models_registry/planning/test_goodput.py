"""The search finds the rate at which objectives break, in few points, and says how sure it is."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_agent.engines.sim.batching import ModelParameters
from models_registry.planning.goodput import (
    Found,
    GoodputRules,
    Measure,
    Outcome,
    PointVerdict,
    first_rate,
    judge_early,
    judge_whole,
    length_s,
    plan_goodput,
    rules_at,
    warm_up_s,
)
from models_registry.planning.workload import Arrival, Slo, Workload
from tests.models_registry.planning.virtual_cell import VirtualCell, mean_field_knee, search

RULES = GoodputRules()
HELD, BROKEN = PointVerdict.HELD, PointVerdict.BROKEN


def outcomes(inside: int, outside: int) -> list[Outcome]:
    return [Outcome(True, 1.0)] * inside + [Outcome(False, 3.0)] * outside


def searched(knee: float, first: float, rules: GoodputRules = RULES) -> tuple[Found, list[float]]:
    """The end of a search where what is below the knee holds, and the rates that it measured."""
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
        4096.0, None, False, "4096/s held, and more than 4096/s is not tried"
    )
    assert searched(knee=0.0, first=0.03)[0].reason.startswith("even 0.007812/s broke")
    given_up = searched(knee=1e9, first=1.0, rules=replace(RULES, most_points=3))[0]
    assert (given_up.rate, given_up.reason) == (4.0, "4/s held after 3 points, the most that one run takes")


def test_the_first_rate_lies_between_one_at_a_time_and_all_at_once() -> None:
    assert first_rate(2.0, 64, RULES) == 4.0
    assert first_rate(0.0, 10**9, RULES) == RULES.highest_rate


def test_a_point_that_clearly_breaks_ends_at_the_first_look() -> None:
    assert judge_early(outcomes(23, 1), RULES) is None, "no look is due"
    early = judge_early(outcomes(20, 5), RULES)
    assert early is not None
    assert (early.verdict, early.is_early, early.is_proven) == (BROKEN, True, True)
    assert early.low < 0.8 < early.high < 0.99


def test_few_requests_prove_nothing_and_many_do() -> None:
    assert judge_early(outcomes(400, 0), RULES) is None
    late = judge_early(outcomes(800, 0), RULES)
    assert late is not None
    assert late.verdict is HELD


def test_requests_that_are_under_way_at_once_are_one_look() -> None:
    burst = outcomes(20, 5)
    assert judge_early(burst, RULES) is not None
    assert judge_early(burst, RULES, rate=10.0) is None, "14 at once met one burst"
    assert judge_early(outcomes(800, 0), RULES, rate=10.0) is None, "80 looks prove no 99 %"
    clearly = judge_early(outcomes(0, 25), RULES, rate=10.0)
    assert clearly is not None
    assert clearly.verdict is BROKEN
    wide, narrow = judge_whole(outcomes(198, 2), RULES, rate=10.0), judge_whole(outcomes(198, 2), RULES)
    assert (wide.verdict, wide.inside, wide.requests) == (HELD, 198, 200)
    assert wide.high - wide.low > narrow.high - narrow.low


@given(st.lists(st.booleans(), min_size=1, max_size=200), st.floats(0, 100))
def test_looks_are_never_more_than_requests(known: list[bool], rate: float) -> None:
    judged = judge_whole([Outcome(inside, 1.0) for inside in known], RULES, rate)
    assert 0 <= judged.low <= judged.high <= 1
    assert judged.requests == len(known)


def test_at_its_end_a_point_is_judged_by_its_share() -> None:
    assert judge_whole(outcomes(198, 2), RULES).verdict is HELD
    broken = judge_whole(outcomes(197, 3), RULES)
    assert (broken.verdict, broken.is_proven) == (BROKEN, False)
    assert judge_whole([], RULES).verdict is BROKEN


def test_looking_often_hardly_ever_errs() -> None:
    """All errors together stay below what one look may err: halves of halves."""
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
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(("prompt", "output", "itl_ms"), [(1000, 150, 40.0), (3000, 50, 80.0), (600, 100, 30.0)])
def test_on_sim_the_knee_is_the_computed_one(prompt: int, output: int, itl_ms: float, seed: int) -> None:
    """Within 5 % of what its parameters say, in ten points at most; repeats with other jitter within 3 %."""
    workload = Workload("synthetic", prompt, output, arrival=Arrival.UNIFORM)
    slo = Slo(3.0, itl_ms / 1000)
    parameters = ModelParameters(seed=seed)
    found, points = search(VirtualCell(parameters, workload, slo))
    knee = mean_field_knee(parameters, workload, slo)
    assert abs(found.estimate / knee - 1) <= 0.05
    assert len(points) <= 10
    again, _ = search(VirtualCell(replace(parameters, seed=seed + 7), workload, slo))
    assert abs(again.estimate / found.estimate - 1) <= 0.03
