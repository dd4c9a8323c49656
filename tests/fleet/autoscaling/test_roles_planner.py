"""Demand from cells' counters; the ratio of prefill to decode cells against whole simulations of four cells
(docs/bench/roles.md); proportions, missing roles, and the order of a rollout."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_agent.protocol.states import CellRole
from fleet.autoscaling.planning.role_split import RoleSplit, beyond, counted, most_lacking, next_to_move, split_within
from fleet.autoscaling.planning.roles import (
    BLOCK_TOKENS,
    CountedCell,
    RatioRule,
    RatioView,
    RoleDemand,
    RoleLimits,
    RolePace,
    carries,
    demand_between,
    handover_from_tokens,
    measured_handover_s,
    mixed_carries,
    needed_cells,
    plan_ratio,
)

BEFORE = CountedCell(3, CellRole.MIXED, 100, 300_000, 0, 20_000)
AFTER = replace(BEFORE, requests=700, prompt_tokens=2_100_000, completion_tokens=140_000, in_flight=8.0)


def test_what_was_added_between_two_looks_makes_the_demand() -> None:
    demand = demand_between({"a": BEFORE}, {"a": AFTER}, 300.0, None)

    assert demand is not None
    assert (demand.per_s, demand.uncached_tokens, demand.output_tokens, demand.requests) == (2.0, 3000, 200, 600)


def test_tokens_from_caches_are_not_read() -> None:
    demand = demand_between({"a": BEFORE}, {"a": replace(AFTER, cached_tokens=1_200_000)}, 300.0, None)

    assert demand is not None
    assert demand.uncached_tokens == 1000


def test_what_prefill_cells_read_counts_though_it_was_cached_for_who_answered() -> None:
    decode = replace(AFTER, role=CellRole.DECODE, cached_tokens=1_800_000)
    prefill = CountedCell(1, CellRole.PREFILL, read_tokens=0)
    demand = demand_between(
        {"d": replace(BEFORE, role=CellRole.DECODE), "p": prefill},
        {"d": decode, "p": replace(prefill, read_tokens=1_500_000)},
        300.0,
        None,
    )

    assert demand is not None
    assert demand.uncached_tokens == 2500
    assert demand.requests == 600


@pytest.mark.parametrize(
    ("after", "seconds"),
    [
        (replace(AFTER, generation=4), 300.0),
        (replace(AFTER, requests=99), 300.0),
        (replace(AFTER, prompt_tokens=0), 300.0),
        (BEFORE, 300.0),
        (AFTER, 0.0),
        (AFTER, 86_400.0),
    ],
)
def test_another_count_no_request_or_too_long_ago_says_nothing(after: CountedCell, seconds: float) -> None:
    assert demand_between({"a": BEFORE}, {"a": after}, seconds, None) is None


def test_a_forecast_grows_what_comes_now_by_a_factor_of_ten_at_most() -> None:
    grown = demand_between({"a": BEFORE}, {"a": AFTER}, 300.0, 16.0)
    wild = demand_between({"a": BEFORE}, {"a": AFTER}, 300.0, 8e6)

    assert grown is not None
    assert grown.expected_per_s == 4.0
    assert wild is not None
    assert wild.expected_per_s == 20.0


def test_a_handover_takes_what_it_took_most_decode_cells() -> None:
    times = (0.010, None, 0.030, 5.0)
    cells = {str(number): replace(AFTER, handover_s=one) for number, one in enumerate(times)}

    assert measured_handover_s(cells) == 0.030
    assert measured_handover_s({"a": AFTER}) is None


def test_a_cell_that_lies_of_itself_moves_little() -> None:
    liar = replace(AFTER, requests=10**12, prompt_tokens=10**18, completion_tokens=10**17)
    reader = CountedCell(1, CellRole.PREFILL)
    before = {**dict.fromkeys("abc", BEFORE), "p": reader}
    after = {"a": AFTER, "b": AFTER, "c": liar, "p": replace(reader, read_tokens=10**18)}
    demand = demand_between(before, after, 300.0, None)

    assert demand is not None
    assert demand.per_s == 12.0, "as much as four cells at most"
    assert (demand.uncached_tokens, demand.output_tokens) == (3000, 200)


PACE = RolePace(0.020, 0.000_25, 1 / 8000, 2048, 64, handover_s=0.005, handover_token_s=0.33 / 12_500)
"""The simulator's default: a 70B model on eight accelerators, 0.33 MB per token at 12.5 GB/s."""
LIMITS = RoleLimits(ttft_s=1.5, itl_s=0.05)
LONG = RoleDemand(2.6, 3000, 200, requests=500)

demands = st.builds(
    RoleDemand,
    per_s=st.floats(0.01, 100),
    uncached_tokens=st.floats(1, 20_000),
    output_tokens=st.floats(1, 2000),
    requests=st.just(100),
    expected_per_s=st.none() | st.floats(0, 100),
)
paces = st.builds(
    RolePace,
    step_s=st.floats(0.001, 0.1),
    sequence_s=st.floats(0, 0.001),
    prompt_token_s=st.floats(1e-6, 0.01),
    chunk_tokens=st.integers(64, 8192),
    most_at_once=st.integers(1, 256),
    handover_s=st.floats(0, 0.1),
    handover_token_s=st.floats(0, 0.001),
)


def view(demand: RoleDemand | None, *, cells: int = 4, current: RoleSplit | None = None) -> RatioView:
    return RatioView(cells, current or RoleSplit(mixed=cells), LIMITS, PACE, demand)


@pytest.mark.parametrize(
    ("demand", "split", "rule"),
    [
        (LONG, RoleSplit(prefill=3, decode=1), RatioRule.DEMAND),
        (RoleDemand(6, 1000, 150, 500), RoleSplit(prefill=2, decode=2), RatioRule.DEMAND),
        (RoleDemand(3, 3000, 50, 500), RoleSplit(prefill=3, decode=1), RatioRule.DEMAND),
        (RoleDemand(0.5, 10_000, 500, 500), RoleSplit(mixed=4), RatioRule.HANDOVER),
        (RoleDemand(20, 100, 100, 500), RoleSplit(mixed=4), RatioRule.SHORT_PROMPTS),
        (RoleDemand(2.6, 3000, 200, requests=19), RoleSplit(mixed=4), RatioRule.UNKNOWN),
        (None, RoleSplit(mixed=4), RatioRule.UNKNOWN),
    ],
)
def test_four_cells(demand: RoleDemand | None, split: RoleSplit, rule: RatioRule) -> None:
    decision = plan_ratio(view(demand))

    assert (decision.split, decision.rule) == (split, rule)


def test_says_why_mixed_is_better() -> None:
    long = plan_ratio(view(RoleDemand(0.5, 10_000, 500, 500))).reason
    assert "reading and handing over a prompt take 1639 ms, all of 1500 ms" in long
    assert "makes a step 33 ms, within 50 ms" in plan_ratio(view(RoleDemand(20, 100, 100, 500))).reason


def test_says_what_the_demand_takes() -> None:
    decision = plan_ratio(view(LONG))

    assert decision.needed == RoleSplit(prefill=3, decode=1)
    assert decision.reason == (
        "2.60 requests per second of 3000 uncached prompt tokens and 200 of answer take 3 prefill, 1 decode; "
        "3 prefill, 1 decode carry 5.01 per second within both limits, 4 mixed 0.90"
    )


def test_a_forecast_counts_where_it_is_more_than_comes_now() -> None:
    assert needed_cells(PACE, replace(LONG, expected_per_s=5.2), LIMITS) == RoleSplit(prefill=4, decode=1)
    assert needed_cells(PACE, replace(LONG, expected_per_s=0.1), LIMITS) == needed_cells(PACE, LONG, LIMITS)


@pytest.mark.parametrize(
    ("pace", "limits", "tokens"),
    [
        (PACE, LIMITS, 128),  # 50 ms minus 20 ms and 51 answers of 0.25 ms leave 17.2 ms; a token takes 0.125 ms
        (replace(PACE, prompt_token_s=1 / 16000), LIMITS, 272),
        (PACE, replace(LIMITS, itl_s=0.1), 528),
        (PACE, replace(LIMITS, itl_s=1.0), None),  # a whole chunk fits in
        (PACE, replace(LIMITS, itl_s=0.01), 16),  # no step is as short as that
    ],
)
def test_a_handover_pays_from_the_length_on_that_would_keep_answers_waiting(
    pace: RolePace, limits: RoleLimits, tokens: int | None
) -> None:
    assert handover_from_tokens(pace, limits) == tokens


def test_what_decode_cells_were_told_stays_unless_it_moves_by_a_quarter() -> None:
    told = [plan_ratio(replace(view(LONG), from_tokens=tokens)).from_tokens for tokens in (None, 103, 102, 170, 172)]
    assert told == [128, 103, 128, 170, 128]
    short = RoleDemand(20, 100, 100, 500)
    assert plan_ratio(replace(view(short), from_tokens=300)).from_tokens == 300, "mixed cells hand nothing over"
    assert plan_ratio(replace(view(LONG), from_tokens=300, is_rolling=True)).from_tokens == 300


@given(pace=paces, itl_s=st.floats(0.001, 1))
def test_the_step_of_a_prompt_that_is_not_handed_over_is_within_the_limit(pace: RolePace, itl_s: float) -> None:
    limits = RoleLimits(1.5, itl_s)
    tokens = handover_from_tokens(pace, limits)
    beside = limits.utilisation * pace.at_once(itl_s)
    read = pace.chunk_tokens if tokens is None else tokens
    if tokens != BLOCK_TOKENS:
        assert pace.step_s + pace.sequence_s * beside + pace.prompt_token_s * read <= itl_s * (1 + 1e-9)


def test_a_single_cell_is_mixed() -> None:
    assert plan_ratio(view(LONG, cells=1)).rule is RatioRule.TOO_FEW


def test_roles_stay_unless_a_change_gains_a_fifth() -> None:
    near = RoleDemand(6, 1000, 150, 500)
    current = RoleSplit(prefill=3, decode=1)
    limits = replace(LIMITS, gain=0.3)
    decision = plan_ratio(replace(view(near, current=current), limits=limits))

    assert (decision.split, decision.rule) == (current, RatioRule.HYSTERESIS)
    assert plan_ratio(view(near, current=current)).split == RoleSplit(prefill=2, decode=2)


@given(demand=demands, pace=paces, cells=st.integers(0, 12), prefill=st.integers(0, 12), decode=st.integers(0, 12))
def test_the_split_is_of_all_cells_and_answers(
    demand: RoleDemand, pace: RolePace, cells: int, prefill: int, decode: int
) -> None:
    current = RoleSplit(prefill=prefill, decode=decode)
    decision = plan_ratio(RatioView(cells, current, LIMITS, pace, demand))

    assert decision.split.total == cells
    assert decision.split.answering >= min(1, cells)
    assert decision.reason


@given(demand=demands, pace=paces, cells=st.integers(2, 10))
def test_what_was_decided_stands_at_the_next_look(demand: RoleDemand, pace: RolePace, cells: int) -> None:
    once = plan_ratio(RatioView(cells, RoleSplit(mixed=cells), LIMITS, pace, demand))
    again = plan_ratio(RatioView(cells, once.split, LIMITS, pace, demand))

    assert again.split == once.split


@given(demand=demands, pace=paces, cells=st.integers(2, 10))
def test_apart_always_carries_the_gain_more_than_mixed(demand: RoleDemand, pace: RolePace, cells: int) -> None:
    decision = plan_ratio(RatioView(cells, RoleSplit(mixed=cells), LIMITS, pace, demand))
    mixed = cells * mixed_carries(pace, demand, LIMITS)

    if decision.split.is_apart:
        assert carries(decision.split, pace, demand, LIMITS) > mixed * 1.2


numbers = st.integers(0, 30)


@pytest.mark.parametrize(
    ("total", "prefill", "decode", "expected"),
    [
        (4, 0, 0, RoleSplit(mixed=4)),
        (4, 1, 3, RoleSplit(prefill=1, decode=3)),
        (6, 1, 3, RoleSplit(mixed=2, prefill=1, decode=3)),
        (2, 3, 1, RoleSplit(prefill=1, decode=1)),
        (3, 1, 5, RoleSplit(prefill=1, decode=2)),
        (1, 3, 1, RoleSplit(mixed=1)),
        (0, 3, 1, RoleSplit()),
        (2, 0, 5, RoleSplit(mixed=2)),
        (2, 1, 0, RoleSplit(mixed=2)),
    ],
)
def test_keeps_what_is_stated_or_its_proportion(total: int, prefill: int, decode: int, expected: RoleSplit) -> None:
    assert split_within(total, prefill, decode) == expected


@given(total=numbers, prefill=numbers, decode=numbers)
def test_a_place_with_cells_always_has_one_that_answers(total: int, prefill: int, decode: int) -> None:
    split = split_within(total, prefill, decode)

    assert split.total == total
    assert min(split.mixed, split.prefill, split.decode) >= 0
    assert split.answering >= 1 or total == 0


def test_a_first_cell_that_answers_is_missing_most() -> None:
    wanted = RoleSplit(prefill=3, decode=1)

    assert most_lacking(RoleSplit(), wanted) is CellRole.DECODE
    assert most_lacking(RoleSplit(decode=1), wanted) is CellRole.PREFILL
    assert most_lacking(wanted, wanted) is None


def test_a_rollout_moves_a_pair_first_and_then_keeps_the_proportion() -> None:
    wanted, moved, order = RoleSplit(prefill=2, decode=4), RoleSplit(), []
    while following := next_to_move(moved, wanted):
        order.append(following[0].value)
        moved = counted([*(CellRole(one) for one in order)])

    assert order == ["prefill", "decode", "decode", "prefill", "decode", "decode"]


@given(prefill=st.integers(2, 12), decode=st.integers(2, 12))
def test_while_it_moves_old_or_new_cells_have_a_pair(prefill: int, decode: int) -> None:
    wanted, moved = RoleSplit(prefill=prefill, decode=decode), RoleSplit()
    for _ in range(wanted.total):
        role = next_to_move(moved, wanted)[0]
        moved = RoleSplit(0, moved.prefill + (role is CellRole.PREFILL), moved.decode + (role is CellRole.DECODE))
        old = RoleSplit(0, prefill - moved.prefill, decode - moved.decode)
        assert (moved.prefill and moved.decode) or (old.prefill and old.decode)


@given(there=st.builds(RoleSplit, numbers, numbers, numbers), wanted=st.builds(RoleSplit, numbers, numbers, numbers))
def test_what_is_beyond_is_never_lacking(there: RoleSplit, wanted: RoleSplit) -> None:
    assert most_lacking(there, wanted) not in beyond(there, wanted)
