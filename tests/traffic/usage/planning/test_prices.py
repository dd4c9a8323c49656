"""Exact token prices, conserved splits of costs and energy, and fits that recover the simulator's parameters."""

import random
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from engine_agent.engines.sim.batching import BatchingModel, ModelParameters, Sequence
from engine_agent.protocol.load_messages import CellWork
from fleet.capacity.planning.rates import Rate, RateKind, Rates
from tests.fleet.rows import NOW
from traffic.usage.planning.prices import (
    BOUND,
    DEFAULT_WEIGHTS,
    HOUR_MS,
    SAMPLES_LEAST,
    TokenPrice,
    TokenWeights,
    WorkSums,
    charge,
    cost_of,
    fit_steps,
    fit_tokens,
    is_good,
    parts_of_amount,
    parts_of_hours,
    sample,
    shares,
    split_hour,
    token_price,
    weights_of,
)

PRICE = TokenPrice(prompt=Decimal("0.6"), cached=Decimal("0.06"), completion=Decimal("1.8"))
ANY_PRICE = st.decimals(min_value=0, max_value=1000, places=6)
COUNT = st.integers(0, 2**50)


def test_cached_tokens_are_a_part_of_the_prompt() -> None:
    tokens = {"prompt_tokens": 1_000_000, "cached_tokens": 400_000, "completion_tokens": 10}
    assert charge(tokens, PRICE) == Decimal("0.384018")
    assert charge({**tokens, "cached_tokens": 2_000_000}, PRICE) == Decimal("0.060018")
    assert charge(tokens, None) == charge({}, PRICE) == 0


PROMPT, CACHED, COMPLETION = RateKind.PROMPT_PRICE, RateKind.CACHED_PRICE, RateKind.COMPLETION_PRICE


def rates(*stated: tuple[RateKind, str], ahead: timedelta = timedelta()) -> list[Rate]:
    return [Rate(kind, "sim", "", Decimal(value), NOW + ahead) for kind, value in stated]


@pytest.mark.parametrize(
    ("stated", "price"),
    [
        ([(PROMPT, "0.6"), (CACHED, "0.06"), (COMPLETION, "1.8")], PRICE),
        ([(PROMPT, "2"), (COMPLETION, "3")], TokenPrice(Decimal(2), Decimal(2), Decimal(3))),
        ([(PROMPT, "2"), (CACHED, "0")], TokenPrice(Decimal(2), Decimal(0), Decimal(0))),
        ([(COMPLETION, "3")], TokenPrice(Decimal(0), Decimal(0), Decimal(3))),
        ([(CACHED, "1"), (RateKind.MACHINE_PRICE, "9")], None),
    ],
)
def test_the_price_of_tokens_is_made_of_the_rates_of_their_deployment(
    stated: list[tuple[RateKind, str]], price: TokenPrice | None
) -> None:
    assert token_price(Rates(rates(*stated), NOW), "sim") == price
    assert token_price(Rates(rates(*stated), NOW), "other") is None


def test_the_price_in_force_is_the_last_that_has_begun() -> None:
    stated = [*rates((PROMPT, "1")), *rates((PROMPT, "9"), ahead=timedelta(seconds=1))]
    found = [token_price(Rates(stated, NOW + timedelta(seconds=second)), "sim") for second in (-1, 0, 1)]
    assert [price and price.prompt for price in found] == [None, 1, 9]


@given(st.lists(st.tuples(COUNT, COUNT, COUNT), max_size=20), ANY_PRICE, ANY_PRICE, ANY_PRICE)
def test_what_is_charged_in_parts_is_what_is_charged_at_once(
    parts: list[tuple[int, int, int]], prompt: Decimal, cached: Decimal, completion: Decimal
) -> None:
    price = TokenPrice(prompt, cached, completion)
    told = [{"prompt_tokens": p, "cached_tokens": min(p, c), "completion_tokens": o} for p, c, o in parts]
    whole = {name: sum(each[name] for each in told) for name in ("prompt_tokens", "cached_tokens", "completion_tokens")}
    assert sum((charge(each, price) for each in told), Decimal(0)) == charge(whole, price)


AMOUNT = st.integers(0, 10**18)
WEIGHTS = st.dictionaries(st.integers(0, 30), st.integers(0, 2**70), max_size=12)
LOOKS = st.lists(st.tuples(st.integers(0, 500_000_000), st.integers(0, 20_000), st.booleans()), max_size=40)
"""Hourly price in millionths of a dollar, milliseconds, and whether machines were busy."""


def test_the_busy_part_falls_to_accounts_by_what_their_tokens_weigh_and_the_rest_is_idle() -> None:
    split = split_hour(12_000_000, 6_000_000, {"rufus": 300, "ada": 100, "none": 0})
    assert (split.whole, split.idle) == (12_000_000, 6_000_000)
    assert split.of_accounts == {"rufus": 4_500_000, "ada": 1_500_000}


def test_an_hour_without_tokens_is_idle() -> None:
    split = split_hour(6, 6, {"rufus": 0})
    assert (split.whole, split.idle, split.of_accounts) == (6, 6, {})


def test_what_cannot_be_shared_evenly_goes_to_the_largest_remainders() -> None:
    assert shares(10, {"a": 1, "b": 1, "c": 1}) == {"a": 4, "b": 3, "c": 3}
    assert shares(3, {"a": 1, "b": 5}) == {"a": 1, "b": 2}
    assert shares(7, {"a": 3, "b": 2, "c": 2}) == {"a": 3, "b": 2, "c": 2}


@given(AMOUNT, AMOUNT, WEIGHTS)
def test_nothing_is_lost_and_nothing_is_invented(whole: int, busy: int, weights: dict[int, int]) -> None:
    split = split_hour(whole, busy, weights)
    assert sum(split.of_accounts.values()) + split.idle == split.whole == whole
    assert split.idle >= 0
    assert all(amount >= 0 for amount in split.of_accounts.values())
    assert split.of_accounts.keys() <= {account for account, weight in weights.items() if weight}


@given(AMOUNT, st.dictionaries(st.integers(0, 30), st.integers(1, 2**70), min_size=1, max_size=12))
def test_no_share_is_rounded_up_by_more_than_one_unit(amount: int, weights: dict[int, int]) -> None:
    total = sum(weights.values())
    for account, got in shares(amount, weights).items():
        assert amount * weights[account] // total <= got <= -(-amount * weights[account] // total)


@given(LOOKS, WEIGHTS)
def test_machines_that_come_go_and_change_their_price_within_an_hour_cost_what_their_milliseconds_do(
    looks: list[tuple[int, int, bool]], weights: dict[int, int]
) -> None:
    spent = sum(price * ms for price, ms, _ in looks)
    busy = sum(price * ms for price, ms, is_busy in looks if is_busy)
    exact = sum((Decimal(price) * ms / HOUR_MS for price, ms, _ in looks), Decimal(0))
    split = split_hour(cost_of(spent), cost_of(busy), weights)
    assert abs(split.whole - exact) <= Decimal("0.5") + Decimal("1e-9")
    assert sum(split.of_accounts.values()) + split.idle == split.whole


@given(st.integers(0, 2**60), st.integers(0, 90_000_000), st.integers(0, 7_200_000))
def test_an_amount_of_several_hours_is_cut_without_a_rest(amount: int, before_ms: int, after_ms: int) -> None:
    since, now = NOW - timedelta(milliseconds=before_ms), NOW + timedelta(milliseconds=after_ms)
    cut = parts_of_amount(amount, parts_of_hours(since, now))
    assert sum(cut.values()) == (amount if since < now else 0)


def test_tokens_weigh_what_their_prices_say_and_else_what_is_usual() -> None:
    price = TokenPrice(Decimal("0.6"), Decimal("0.06"), Decimal("1.8"))
    assert weights_of(price) == TokenWeights(600_000, 60_000, 1_800_000)
    assert weights_of(None) == weights_of(TokenPrice(*[Decimal(0)] * 3)) == DEFAULT_WEIGHTS
    assert TokenWeights(10, 1, 40).of(100, 60, 2) == 40 * 10 + 60 + 2 * 40
    assert TokenWeights(10, 1, 40).of(100, 600, 0) == 100


def test_time_is_cut_at_hours_and_a_long_absence_counts_a_day_at_most() -> None:
    since = NOW - timedelta(minutes=90)
    assert parts_of_hours(since, NOW) == [
        (NOW - timedelta(hours=2), 1_800_000),
        (NOW - timedelta(hours=1), 3_600_000),
    ]
    assert parts_of_hours(NOW, NOW) == []
    assert sum(ms for _, ms in parts_of_hours(NOW - timedelta(days=9), NOW)) == 24 * HOUR_MS


LOOK_S = 15.0


def simulated(parameters: ModelParameters, looks: int, seed: int) -> list[CellWork]:
    """Totals of a cell every 15 s of virtual time, with rising and falling load of short and long prompts."""
    model, chance = BatchingModel(parameters), random.Random(seed)
    now_s = busy_s = 0.0
    steps = prompts = completions = number = 0
    totals: list[CellWork] = []
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
            totals.append(CellWork(1.0, round(busy_s * 1000), steps, prompts, 0, completions))
            next_look_s += LOOK_S
    return totals


def sums_of(totals: list[CellWork]) -> WorkSums:
    found = (sample(before, after) for before, after in pairwise(totals))
    return sum((one for one in found if one is not None), WorkSums())


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "parameters",
    [
        ModelParameters(),
        pytest.param(
            ModelParameters(
                prefill_tokens_per_s=20_000, decode_step_ms=8, decode_step_per_seq_ms=0.6, max_num_seqs=128
            ),
            marks=pytest.mark.long,
        ),
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
LOOKS_OF_ENGINES = st.lists(
    st.tuples(st.integers(50, 2000), st.integers(100, 20_000), st.integers(0, 50_000), st.integers(0, 50_000)),
    min_size=SAMPLES_LEAST + 5, max_size=60, unique=True,
)  # fmt: skip


@given(TERM, TERM, TERM, TERM, LOOKS_OF_ENGINES)
def test_exact_sums_are_explained_exactly_or_not_at_all(
    step: float, sequence: float, prompt: float, cached: float, looks: list[tuple[int, int, int, int]]
) -> None:
    sums = WorkSums()
    for steps, completion, fresh, hits in looks:
        busy_s = step * steps + sequence * completion + prompt * fresh + cached * hits
        found = sample(CellWork(1.0), CellWork(1.0, round(busy_s * 1000), steps, fresh + hits, hits, completion))
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
    alike = [CellWork(1.0, 15_000 * look, 600 * look, 3000 * look, 0, 9000 * look) for look in range(100)]
    assert fit_tokens([sums_of(alike)], DEFAULT_WEIGHTS) is None
    assert fit_tokens([sums_of(simulated(ModelParameters(), 20, 1))], DEFAULT_WEIGHTS) is None, "too few"
    assert fit_tokens([], DEFAULT_WEIGHTS) is None


@pytest.mark.parametrize(
    "after",
    [
        CellWork(2.0, 20_000, 900, 900, 0, 900),
        CellWork(1.0, 4_000, 900, 900, 0, 900),
        CellWork(1.0, 20_000, 100, 900, 0, 900),
        CellWork(1.0, 5_500, 900, 900, 0, 900),
        CellWork(1.0, 20_000, 900_000_000, 900, 0, 900),
        CellWork(1.0, 20_000, 900, 10**12, 0, 900),
        CellWork(1.0, 20_000, 200, 900, 0, 900),
    ],
    ids=["another life", "time goes back", "steps go back", "too short", "steps", "tokens", "no step"],
)
def test_what_cannot_be_so_is_no_sample(after: CellWork) -> None:
    assert sample(CellWork(1.0, 5_000, 200, 100, 0, 100), after) is None


@pytest.mark.long
def test_one_node_that_lies_moves_nothing_where_there_are_three_and_is_bounded_where_it_is_alone() -> None:
    honest = [sums_of(simulated(ModelParameters(seed=seed), 120, seed)) for seed in range(3)]
    plain = fit_tokens(honest, DEFAULT_WEIGHTS)
    work = simulated(ModelParameters(), 120, 9)
    lies = [structs.replace(each, prompt_tokens=each.prompt_tokens // 5000) for each in work]
    lied = fit_tokens([*honest, sums_of(lies)], DEFAULT_WEIGHTS)
    assert plain is not None
    assert lied is not None
    assert lied.weights.completion / lied.weights.prompt == pytest.approx(
        plain.weights.completion / plain.weights.prompt, rel=0.1
    )
    short = [structs.replace(each, completion_tokens=each.completion_tokens // 400) for each in work]
    alone = fit_tokens([sums_of(short)], DEFAULT_WEIGHTS)
    assert alone is not None
    assert alone.is_bounded
    listed = DEFAULT_WEIGHTS.completion / DEFAULT_WEIGHTS.prompt
    assert alone.weights.completion / alone.weights.prompt == pytest.approx(listed * BOUND, rel=0.01)
