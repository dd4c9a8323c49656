import asyncio

import pytest

from engine_agent.engines.sim.engine import Engine, Gauges, Histogram, Meters, render
from tests.engine_agent.engines.sim.in_process import FAST


def test_a_histogram_counts_cumulatively_up_to_and_with_the_bound() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.observe(value)

    assert list(histogram.lines("h", 'a="b"')) == [
        'h_bucket{a="b",le="1.0"} 2',
        'h_bucket{a="b",le="2.0"} 3',
        'h_bucket{a="b",le="+Inf"} 4',
        'h_sum{a="b"} 12',
        'h_count{a="b"} 4',
    ]


def test_the_page_has_vllms_names_and_labels() -> None:
    meters = Meters(prompt_tokens=7, generation_tokens=11, prefix_queries=64, prefix_hits=32)
    meters.time_to_first_token_s.observe(0.03)

    page = render(meters, Gauges(running=2, waiting=1, kv_cache_usage=0.25, preemptions=3), 'odd"name')

    labels = 'engine="0",model_name="odd\\"name"'
    for sample in (
        f"vllm:num_requests_running{{{labels}}} 2",
        f"vllm:num_requests_waiting{{{labels}}} 1",
        f"vllm:kv_cache_usage_perc{{{labels}}} 0.25",
        f"vllm:num_preemptions_total{{{labels}}} 3",
        f"vllm:prompt_tokens_total{{{labels}}} 7",
        f"vllm:generation_tokens_total{{{labels}}} 11",
        f"vllm:prefix_cache_queries_total{{{labels}}} 64",
        f"vllm:prefix_cache_hits_total{{{labels}}} 32",
        f'vllm:time_to_first_token_seconds_bucket{{{labels},le="0.04"}} 1',
        f"vllm:time_to_first_token_seconds_count{{{labels}}} 1",
        f"vllm:inter_token_latency_seconds_count{{{labels}}} 0",
        "# TYPE vllm:inter_token_latency_seconds histogram",
    ):
        assert sample in page.splitlines()


@pytest.mark.asyncio
@pytest.mark.parametrize(("tells_each_token", "events"), [(True, [0, 1, 2, 3]), (False, [3])])
async def test_a_whole_answer_is_one_event_and_all_of_its_tokens_count(
    tells_each_token: bool, events: list[int]
) -> None:
    meters = Meters()
    engine = Engine(FAST, meters)
    engine.open()
    generation = engine.submit(5, 4, "length")
    generation.tells_each_token = tells_each_token
    running = asyncio.create_task(engine.run())
    await engine.idle()
    running.cancel()
    told = [generation.events.get_nowait() for _ in range(generation.events.qsize())]
    assert [event.index for event in told if hasattr(event, "index")] == events
    assert (meters.generation_tokens, generation.generated) == (4, 4)
