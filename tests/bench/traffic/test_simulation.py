"""Cells on virtual time: everybody is served, the same each time, and a slow cell gets less."""

from bench import percentile
from bench.traffic.arrivals import Arrival, heavy_tailed
from bench.traffic.routers import LeastOutstanding, RoundRobin, Simulation, Sticky, hit_rate
from engine_agent.engines.sim.batching import ModelParameters

CELL = ModelParameters(
    prefill_tokens_per_s=1000, decode_step_ms=10, decode_step_per_seq_ms=0, max_num_seqs=2, prefix_block_tokens=10,
    step_jitter=0,
)  # fmt: skip


def test_a_request_takes_as_long_as_its_tokens() -> None:
    (only,) = Simulation(RoundRobin(), CELL, [1.0], 2).run([Arrival(5.0, 90, 3)])

    assert (round(only.ttft_s, 6), round(only.ended_s, 6)) == (0.1, 5.12)


def test_who_finds_no_place_waits_for_the_first_one() -> None:
    arrivals = [Arrival(0.0, 10, 50), Arrival(0.0, 10, 50), Arrival(0.01, 10, 1)]

    *_, waited = Simulation(LeastOutstanding(with_queue=True), CELL, [1.0], 2).run(arrivals)

    assert waited.first_token_s > 0.5


def test_everybody_is_served_and_twice_the_same() -> None:
    arrivals = heavy_tailed(rate=20, count=200, seed=3)

    one, other = (Simulation(LeastOutstanding(with_queue=True), CELL, [1.0, 3.0], 2).run(arrivals) for _ in range(2))

    assert all(outcome.ended_s >= outcome.first_token_s > outcome.arrival.at_s for outcome in one)
    assert [outcome.ended_s for outcome in one] == [outcome.ended_s for outcome in other]


def test_the_least_loaded_rule_spares_a_slow_cell() -> None:
    outcomes = Simulation(LeastOutstanding(with_queue=True), CELL, [1.0, 1.0, 5.0], 2).run(heavy_tailed(2, 200, seed=1))

    assert sum(outcome.cell == 2 for outcome in outcomes) < 50


def test_affinity_finds_what_an_earlier_turn_left() -> None:
    turns = [Arrival(at_s, 50, 1, "talk", (1, 2, 3, 4)) for at_s in (0.0, 1.0, 2.0)]
    others = [Arrival(at_s, 50, 1, f"other-{at_s}", (9, int(at_s * 100))) for at_s in (0.5, 1.5)]
    arrivals = sorted(turns + others, key=lambda arrival: arrival.at_s)

    kept = Simulation(Sticky(0), CELL, [1.0] * 4, 2).run(arrivals)
    spread = Simulation(RoundRobin(), CELL, [1.0] * 4, 2).run(arrivals)

    assert [outcome.found_tokens for outcome in kept if outcome.arrival.key == "talk"] == [0, 40, 40]
    assert hit_rate(kept) > hit_rate(spread)


def test_a_percentile_is_one_of_the_values() -> None:
    assert [percentile([3, 1, 2], share) for share in (0.0, 0.5, 0.99)] == [1, 2, 3]
