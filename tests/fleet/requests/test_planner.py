"""Planted causes of slow requests are found, chance is not, and few samples prove nothing."""

from dataclasses import replace
from datetime import UTC, datetime
from random import Random

import pytest

from fleet.requests.planner import Comparison, SampledRequest, compare_requests, samples_of_a_kind

AT = datetime(2026, 11, 30, 6, tzinfo=UTC)
ONE = SampledRequest(
    kind="uniform",
    at=AT,
    request="r",
    cell="c1",
    tenant="acme",
    key="1a2b3c4d",
    serving_class="realtime",
    adapter="",
    path="/v1/chat/completions",
    ingress="in-1",
    prefix="",
    is_stream=True,
    is_handed_over=False,
    in_flight=3,
    prompt_tokens=300,
    cached_tokens=16,
    completion_tokens=100,
    ingress_ms=2.0,
    queue_ms=1.0,
    first_ms=100.0,
    total_ms=1100.0,
)


def mixed(count: int, seed: int = 1) -> list[SampledRequest]:
    """Requests of many tenants, whose times depend on nothing."""
    random = Random(seed)
    return [
        replace(
            ONE,
            tenant=f"t{random.randrange(6)}",
            key=f"{random.randrange(12):08x}",
            ingress=f"in-{random.randrange(3)}",
            prompt_tokens=random.randrange(50, 9000),
            in_flight=random.randrange(40),
            first_ms=100.0 * (10 if random.random() < 0.08 else random.uniform(0.8, 1.2)),
        )
        for _ in range(count)
    ]


def texts(found: Comparison) -> list[str]:
    return [finding.text for finding in found.findings]


@pytest.mark.parametrize("seed", range(20))
def test_chance_is_no_finding(seed: int) -> None:
    found = compare_requests(mixed(600, seed))
    assert (found.findings, found.verdict[:19]) == ((), "Nothing stands out:")


def test_a_tenant_with_long_prompts_is_named() -> None:
    ordinary = mixed(400)
    guilty = [replace(ONE, tenant="big", key="feedbeef", prompt_tokens=20_000, first_ms=3000.0) for _ in range(40)]
    found = compare_requests(ordinary + guilty)
    first = found.findings[0]
    assert {first.text, *first.also} >= {"tenant big", "key feedbeef", "prompt of at least 16,384 tokens"}
    assert (first.hits, first.other_hits, first.base) == (40, 0, 0.0)
    assert first.lift > 10
    assert found.verdict.startswith(f"{first.support_percent:.0f} % of the slow requests have in common: ")


def test_the_threshold_that_explains_most_is_named_once() -> None:
    guilty = [replace(ONE, kind="slow", prompt_tokens=5000 + n, first_ms=3000.0) for n in range(60)]
    found = compare_requests([replace(each, prompt_tokens=100 + n) for n, each in enumerate(mixed(400))] + guilty)
    assert [text for text in texts(found) if text.startswith("prompt")] == ["prompt of at least 4,096 tokens"]


def test_a_prefix_group_is_named() -> None:
    guilty = [replace(each, prefix="00ab12cd34ef", first_ms=900.0) for each in mixed(40, 2)]
    found = compare_requests(mixed(400) + guilty)
    assert "prompts that begin alike, prefix 00ab12cd34ef" in texts(found)


def test_whole_answers_are_compared_with_whole_answers() -> None:
    """Otherwise every whole answer is slow, and nothing else is found."""
    whole = [replace(each, is_stream=False, first_ms=2000.0, total_ms=2000.0) for each in mixed(200, 3)]
    found = compare_requests(mixed(400) + whole)
    assert (found.whole_ms, found.findings) == (4000.0, ())
    assert found.stream_ms == pytest.approx(200.0, rel=0.1)


def test_few_requests_prove_nothing() -> None:
    few = [replace(ONE, first_ms=float(n)) for n in range(1, 20)]
    assert compare_requests(few).verdict.startswith("Too few samples to compare: 0 slow and 0 ordinary")
    assert compare_requests([]).verdict.startswith("Too few samples")
    slow = [replace(ONE, tenant="big", first_ms=3000.0) for _ in range(19)]
    found = compare_requests([*(replace(ONE, first_ms=100.0) for _ in range(30)), *slow])
    assert (found.slow, found.others, found.findings) == (19, 30, ())
    assert found.verdict == "Too few samples to compare: 19 slow and 30 ordinary requests; 20 of each are needed."


def test_even_times_have_no_slow_requests() -> None:
    even = [replace(ONE, first_ms=100.0 + n / 10) for n in range(200)]
    assert compare_requests(even).verdict.startswith("No request is slow")


def test_errors_are_left_out() -> None:
    errors = [replace(ONE, kind="error", tenant="bad", first_ms=None, total_ms=60_000.0) for _ in range(200)]
    assert texts(compare_requests(mixed(400) + errors)) == []


def test_stages_are_compared_by_medians() -> None:
    guilty = [replace(ONE, kind="slow", queue_ms=800.0, first_ms=900.0, total_ms=1900.0) for _ in range(30)]
    found = compare_requests([replace(each, first_ms=100.0) for each in mixed(380)] + guilty)
    stages = {stage.name: stage for stage in found.stages}
    assert (stages["Cell's queue"].slow_ms, stages["Cell's queue"].other_ms) == (800.0, 1.0)
    assert stages["Engine to first token"].slow_ms == pytest.approx(100.0)
    assert stages["Cell's queue"].ratio == 800.0


@pytest.mark.parametrize(
    ("rows_max", "cells", "kept"),
    [(1_000_000, 5, 16), (1_000_000, 0, 16), (1_000_000, 20, 8), (1_000_000, 2500, 1), (0, 10, 1)],
)
def test_large_fleets_store_fewer_samples_of_a_cell(rows_max: int, cells: int, kept: int) -> None:
    assert samples_of_a_kind(rows_max=rows_max, cells=cells, kinds=2) == kept
