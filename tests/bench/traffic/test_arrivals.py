"""The traces as they are read, and prompts that a sim cell reads as they were meant."""

import json

import pytest

from bench.traffic.arrivals import Arrival, azure, best_hit_rate, faster, heavy_tailed, lru_hit_rate, mooncake
from bench.traffic.sim_cells import body_of
from engine_agent.engines.sim.api.chat import parse_chat
from engine_agent.engines.sim.prefix_cache import block_hashes


def test_the_mooncake_trace_is_whole_and_in_order() -> None:
    arrivals = mooncake()

    assert len(arrivals) == 12_031
    assert arrivals == sorted(arrivals, key=lambda arrival: arrival.at_s)
    assert all(len(arrival.blocks) == arrival.prompt_tokens // 512 for arrival in arrivals)
    assert best_hit_rate(arrivals) == pytest.approx(0.373, abs=0.001)
    assert lru_hit_rate(arrivals, 8_000_000) == pytest.approx(0.271, abs=0.001)


def test_the_azure_trace_is_whole() -> None:
    arrivals = azure()

    assert len(arrivals) == 19_366
    assert (arrivals[0].prompt_tokens, arrivals[0].output_tokens) == (374, 44)
    assert 3400 < arrivals[-1].at_s < 3700


def test_a_faster_trace_has_the_same_requests() -> None:
    slow = heavy_tailed(10, 50, seed=1)

    assert [arrival.at_s for arrival in faster(slow, 2)] == [arrival.at_s / 2 for arrival in slow]


@pytest.mark.parametrize("prompt_tokens", [3, 8, 17, 24, 30])
def test_a_sim_cell_reads_a_prompt_as_long_as_it_was_recorded(prompt_tokens: int) -> None:
    arrival = Arrival(0.0, prompt_tokens, 5, "k", tuple(range(prompt_tokens // 8)))

    ask = parse_chat(json.dumps(body_of(arrival, "m", 8)).encode())

    assert (ask.prompt.tokens, ask.output_limit, ask.exact_length) == (prompt_tokens, 5, True)


def test_equal_blocks_of_two_prompts_are_equal_blocks_in_the_engine() -> None:
    def blocks_read(*blocks: int) -> tuple[int, ...]:
        arrival = Arrival(0.0, 8 * len(blocks) + 3, 1, "k", blocks)
        return block_hashes(parse_chat(json.dumps(body_of(arrival, "m", 8)).encode()).prompt.context.split(), 8)

    one, other = blocks_read(0, 4, 5, 6), blocks_read(0, 4, 5, 7)

    assert len(one) == 4
    assert one[:3] == other[:3]
    assert one[3] != other[3]
