"""The meter over time; the clock is an argument."""

import pytest

from engine_agent.cell_proxy.admission import RequestMetadata
from engine_agent.cell_proxy.meter import Meter, Usage
from engine_agent.protocol.messages import Load, UsageRow
from engine_agent.protocol.states import ServingClass

NOBODY = RequestMetadata()
BATCH = RequestMetadata(ServingClass.BATCH, "acme", key="0a0b0c0d")


def test_without_requests_there_are_no_percentiles() -> None:
    assert Meter(0.0).load(100.0, in_flight=0, max_concurrency=4) == Load()


def test_tokens_per_second_cover_the_time_that_was_seen_and_at_most_thirty_seconds() -> None:
    meter = Meter(0.0)
    for second in range(60):
        meter.tokens(float(second), 12)
        if second == 9:
            assert meter.load(10.0, in_flight=0, max_concurrency=4).tokens_per_s == 12.0
    assert meter.load(59.5, in_flight=0, max_concurrency=4).tokens_per_s == pytest.approx(12.0)
    assert meter.load(100.0, in_flight=0, max_concurrency=4).tokens_per_s == 0.0


def test_a_correction_of_tokens_never_makes_the_rate_negative() -> None:
    meter = Meter(0.0)
    meter.tokens(0.0, 5)
    meter.tokens(40.0, -3)
    assert meter.load(40.0, in_flight=0, max_concurrency=4).tokens_per_s == 0.0


def test_percentiles_are_milliseconds_of_the_last_thirty_seconds() -> None:
    meter = Meter(0.0)
    for n in range(100):
        meter.first_token(50.0, 0.2 if n < 98 else 2.0)
        meter.next_tokens(50.0, 0.03)
    load = meter.load(60.0, in_flight=0, max_concurrency=4)
    assert load.ttft_p50_ms == pytest.approx(200, rel=0.05)
    assert load.ttft_p99_ms == pytest.approx(2000, rel=0.05)
    assert load.itl_p50_ms == pytest.approx(30, rel=0.05)
    assert meter.load(90.0, in_flight=0, max_concurrency=4).ttft_p50_ms is None


def test_what_exceeds_the_concurrency_is_queued() -> None:
    load = Meter(0.0).load(1.0, in_flight=7, max_concurrency=4)
    assert (load.in_flight, load.queued) == (7, 3)


def test_requests_errors_and_refusals_are_counted_apart_and_by_class() -> None:
    meter = Meter(0.0)
    for metadata, status, failed in (
        (NOBODY, 200, False),
        (NOBODY, 404, False),
        (BATCH, 500, True),
        (BATCH, 200, True),
    ):
        row = meter.admitted(metadata)
        meter.ended(metadata, row, status=status, failed=failed)
        meter.settled(metadata, row, Usage(3, 2), body_bytes=12)
    meter.refused(BATCH, "cell_draining")
    load = meter.load(1.0, in_flight=0, max_concurrency=4)
    assert (load.requests_total, load.errors_total) == (4, 2)
    assert meter.classes[ServingClass.REALTIME].answers == {"2xx": 1, "4xx": 1}
    batch = load.classes["batch"]
    assert (batch.requests_total, batch.errors_total, batch.refused_total, batch.in_flight) == (2, 2, 1, 0)
    assert (batch.prompt_tokens_total, batch.completion_tokens_total) == (6, 4)
    assert meter.tokens_total == 8


def test_what_was_handed_back_to_be_tried_elsewhere_is_no_error_of_a_tenant_yet() -> None:
    meter = Meter(0.0)
    for status in (503, 504, 200):
        row = meter.admitted(NOBODY)
        meter.ended(NOBODY, row, status=status, failed=True)
    load = meter.load(1.0, in_flight=0, max_concurrency=4)
    assert (load.errors_total, load.handed_back_total, load.usage[0].errors_total) == (3, 1, 2)


def test_a_tenant_is_charged_what_its_requests_used() -> None:
    meter = Meter(0.0)
    row = meter.admitted(BATCH)
    assert meter.load(1.0, in_flight=1, max_concurrency=4).usage[0].in_flight == 1
    meter.ended(BATCH, row, status=499, failed=False, cancelled=True)
    meter.settled(BATCH, row, Usage(10, 20, 4, True), body_bytes=40)
    (use,) = meter.load(1.0, in_flight=0, max_concurrency=4).usage
    assert use == UsageRow(
        use.since,
        "acme",
        "0a0b0c0d",
        "batch",
        requests_total=1,
        cancelled_total=1,
        prompt_tokens_total=10,
        cached_tokens_total=4,
        completion_tokens_total=20,
        estimated_total=1,
    )


def test_a_prompt_that_nobody_counted_is_as_long_as_others_of_its_size() -> None:
    meter = Meter(0.0)
    meter.settled(NOBODY, meter.admitted(NOBODY), Usage(None, 5), body_bytes=400)
    assert meter.classes[ServingClass.REALTIME].prompt_tokens_total == 100
    meter.settled(NOBODY, meter.admitted(NOBODY), Usage(50, 5), body_bytes=100)
    meter.settled(NOBODY, meter.admitted(NOBODY), Usage(None, 5), body_bytes=200)
    assert meter.classes[ServingClass.REALTIME].prompt_tokens_total == 100 + 50 + 100
