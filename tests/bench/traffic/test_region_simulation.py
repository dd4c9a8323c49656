"""Several ingresses on virtual time: every request is served, the same each time, and reports keep cells from filling
twice."""

from bench.traffic.arrivals import heavy_tailed
from bench.traffic.region_simulation import RegionSimulation
from engine_agent.engines.sim.batching import ModelParameters

CELL = ModelParameters(
    prefill_tokens_per_s=1000, decode_step_ms=10, decode_step_per_seq_ms=0, max_num_seqs=4, prefix_block_tokens=10,
    step_jitter=0,
)  # fmt: skip
ARRIVALS = heavy_tailed(rate=9, count=150, seed=2)


def region(ingresses: int, every_s: float) -> RegionSimulation:
    return RegionSimulation(ingresses, CELL, [1.0, 3.0], 4, every_s=every_s)


def test_every_request_is_served_and_twice_the_same() -> None:
    one, other = (region(4, 0.1).run(ARRIVALS) for _ in range(2))
    assert all(outcome.ended_s >= outcome.first_token_s > outcome.arrival.at_s for outcome in one)
    assert [outcome.ended_s for outcome in one] == [outcome.ended_s for outcome in other]


def test_one_ingress_never_overfills_a_cell_and_four_do_unless_they_read_reports() -> None:
    most = {}
    for name, each in {"one": region(1, 0), "apart": region(4, 0), "shared": region(4, 0.02)}.items():
        each.run(ARRIVALS)
        most[name] = each.most_in_flight
    assert most["one"] == 4
    assert most["apart"] > most["shared"]
