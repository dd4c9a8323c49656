"""Samples of requests: uniform, the slowest, failed ones; bounded, and fair between tenants."""

from collections import Counter
from collections.abc import Callable

import msgspec
import pytest

from engine_agent.cell_proxy import request_samples
from engine_agent.cell_proxy.request_samples import RequestSampler
from engine_agent.protocol.request_messages import (
    MAX_WINDOW_SAMPLES,
    SAMPLES_OF_A_KIND,
    WINDOW_S,
    RequestSample,
    RequestWindow,
    SampleKind,
)

NOW = 1_795_000_000.0


def described(number: int, tenant: str = "") -> Callable[[], RequestSample]:
    return lambda: RequestSample(f"r-{number}", NOW, SampleKind.UNIFORM, 200, float(number), tenant=tenant)


def window_of(sampler: RequestSampler, after: int = 0) -> RequestWindow:
    (window,) = sampler.closed(NOW + WINDOW_S, after).windows
    return window


def of_kind(window: RequestWindow, kind: SampleKind) -> list[str]:
    return [sample.request for sample in window.samples if sample.kind is kind]


def test_every_request_has_the_same_chance_in_the_uniform_sample() -> None:
    kept: Counter[bool] = Counter()
    for _ in range(200):
        sampler = RequestSampler("c", 1, NOW)
        for number in range(200):
            sampler.answered(NOW, 1.0, described(number))
        kept.update(int(name[2:]) < 100 for name in of_kind(window_of(sampler), SampleKind.UNIFORM))
    assert sum(kept.values()) == 200 * SAMPLES_OF_A_KIND
    assert 0.45 < kept[True] / sum(kept.values()) < 0.55  # 8 standard deviations


def test_the_slowest_are_kept_and_come_first() -> None:
    sampler = RequestSampler("c", 1, NOW)
    for number in range(500):
        sampler.answered(NOW, float(number), described(number))
    window = window_of(sampler)
    uniform, slow = set(of_kind(window, SampleKind.UNIFORM)), of_kind(window, SampleKind.SLOW)
    slowest = [f"r-{number}" for number in range(499, 499 - SAMPLES_OF_A_KIND, -1)]
    assert slow == [name for name in slowest if name not in uniform]
    assert (window.answered, window.failed, window.cell, window.generation) == (500, 0, "c", 1)


def test_slow_streams_and_slow_whole_answers_are_kept_side_by_side() -> None:
    sampler = RequestSampler("c", 1, NOW)
    for number in range(200):
        sampler.answered(NOW, float(number), described(number))
        sampler.answered(NOW, 1000.0 + number, described(1000 + number), is_stream=False)
    slow = of_kind(window_of(sampler), SampleKind.SLOW)
    assert len([name for name in slow if len(name) < 6]) > SAMPLES_OF_A_KIND // 2
    assert len([name for name in slow if len(name) == 6]) > SAMPLES_OF_A_KIND // 2


def test_a_request_is_described_only_if_it_is_kept() -> None:
    sampler, calls = RequestSampler("c", 1, NOW), 0

    def counting() -> RequestSample:
        nonlocal calls
        calls += 1
        return described(0)()

    for _ in range(10_000):
        sampler.answered(NOW, 1.0, counting)
    assert calls < 300


def test_a_few_requests_are_all_in_the_uniform_sample_once() -> None:
    sampler = RequestSampler("c", 1, NOW)
    for number in range(5):
        sampler.answered(NOW, float(number), described(number))
    window = window_of(sampler)
    assert sorted(of_kind(window, SampleKind.UNIFORM)) == [f"r-{number}" for number in range(5)]
    assert of_kind(window, SampleKind.SLOW) == []


def test_no_tenant_hides_the_errors_of_another() -> None:
    sampler = RequestSampler("c", 1, NOW)
    for number in range(1000):
        sampler.failed(NOW, "loud", described(number, "loud"))
    for number in range(3):
        sampler.failed(NOW, "quiet", described(number, "quiet"))
    for number in range(1000):
        sampler.failed(NOW, "loud", described(number, "loud"))
    window = window_of(sampler)
    assert Counter(each.tenant for each in window.samples) == {"loud": SAMPLES_OF_A_KIND - 3, "quiet": 3}
    assert (window.failed, {each.kind for each in window.samples}) == (2003, {SampleKind.ERROR})


def test_windows_are_closed_by_time_and_given_once() -> None:
    sampler = RequestSampler("c", 1, NOW)
    assert sampler.closed(NOW + 10 * WINDOW_S, 0).windows == ()  # a window without requests is none
    later = NOW + 10 * WINDOW_S
    sampler.answered(later, 1.0, described(1))
    assert sampler.closed(later + 1, 0).windows == ()
    closed = sampler.closed(later + WINDOW_S, 0)
    assert (closed.upto, len(closed.windows), closed.windows[0].since) == (1, 1, later)
    assert sampler.closed(later + WINDOW_S, closed.upto).windows == ()
    assert len(sampler.closed(later + WINDOW_S, 7).windows) == 1  # the reader knows another proxy


def test_only_the_last_windows_are_kept() -> None:
    sampler = RequestSampler("c", 1, NOW)
    for number in range(10):
        sampler.answered(NOW + number * WINDOW_S, 1.0, described(number))
    windows = sampler.closed(NOW + 20 * WINDOW_S, 0).windows
    assert [window.samples[0].request for window in windows] == ["r-8", "r-9"]


def test_a_clock_that_is_set_back_closes_the_window() -> None:
    sampler = RequestSampler("c", 1, NOW)
    sampler.answered(NOW, 1.0, described(1))
    sampler.answered(NOW - 3600, 1.0, described(2))
    assert len(sampler.closed(NOW - 3600, 0).windows) == 1


def test_a_full_window_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_samples, "random", lambda: 0.999)
    sampler = RequestSampler("c" * 160, 1, NOW)
    name, longest = "n" * 64, RequestSample("r" * 128, NOW, SampleKind.UNIFORM, 999, 1e9)
    full = msgspec.structs.replace(
        longest, tenant=name, key="k" * 16, adapter=name, path=name, ingress=name, prefix="0" * 12, reason=name
    )
    for number in range(100):
        sampler.answered(NOW, float(number), lambda: full)
        sampler.answered(NOW, float(number), lambda: full, is_stream=False)
        sampler.failed(NOW, name, lambda: full)
    for number in range(SAMPLES_OF_A_KIND):
        sampler.answered(NOW, 0.0, lambda: full, trace=trace(number))
    window = window_of(sampler)
    assert len(window.samples) == MAX_WINDOW_SAMPLES
    assert len(msgspec.json.encode(window)) < 64 * 1024


def trace(number: int) -> str:
    return f"{number:032x}"


def traces_of(*numbers: int) -> set[str]:
    """Traces that a cell keeps of requests with these traces."""
    sampler = RequestSampler("c", 1, NOW)
    for number in numbers:
        sampler.answered(NOW, 1.0, described(number), trace=trace(number))
    return {sample.trace for sample in window_of(sampler).samples if sample.trace}


def test_two_cells_keep_the_same_traces() -> None:
    kept = traces_of(*range(300))
    assert len(kept) == SAMPLES_OF_A_KIND
    assert traces_of(*reversed(range(300))) == kept
    half = [number for number in range(300) if number % 2]
    assert kept & set(map(trace, half)) <= traces_of(*half), "a cell with fewer requests keeps more of the traces"


def test_a_linked_request_is_sampled_once_and_without_a_trace_not_at_all() -> None:
    sampler = RequestSampler("c", 1, NOW)
    for number in range(100):
        sampler.answered(NOW, float(number), described(number), trace=trace(number % 50))
        sampler.answered(NOW, float(number), described(1000 + number))
    window = window_of(sampler)
    names = [sample.request for sample in window.samples]
    assert len(names) == len(set(names)) <= MAX_WINDOW_SAMPLES
    traced = [sample.trace for sample in window.samples if sample.trace]
    assert len(traced) == len(set(traced)) == SAMPLES_OF_A_KIND
    assert all(sample.trace for sample in window.samples if sample.kind is SampleKind.LINKED)
