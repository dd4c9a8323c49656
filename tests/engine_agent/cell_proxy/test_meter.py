"""The meter over time; the clock is an argument."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_agent.cell_proxy.admission import RequestMetadata
from engine_agent.cell_proxy.batch_window import RealtimeLatency
from engine_agent.cell_proxy.meter import Meter, SlidingHistogram, Usage, cumulative
from engine_agent.cell_proxy.usage_rows import FORGET_AFTER_S, UsageCounts, UsageRows
from engine_agent.protocol.load_messages import OTHER_TENANTS, Load, UsageRow
from engine_agent.protocol.metrics import bucket_of, upper_edge_s
from engine_agent.protocol.states import ServingClass

NOBODY = RequestMetadata()
BATCH = RequestMetadata(ServingClass.BATCH, "acme", key="0a0b0c0d")


def test_without_requests_there_are_no_percentiles() -> None:
    meter = Meter(0.0)
    assert meter.realtime_latency(100.0) == RealtimeLatency()
    assert meter.load(100.0, in_flight=0, max_concurrency=4) == Load()


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
        meter.of(ServingClass.REALTIME).ttft.record(50.0, 0.2 if n < 98 else 2.0)
        meter.of(ServingClass.REALTIME).itl.record(50.0, 0.03)
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


durations_s = st.floats(min_value=1e-4, max_value=800.0)


@given(st.lists(durations_s, min_size=1, max_size=200), st.sampled_from([0.5, 0.9, 0.99, 1.0]))
def test_a_quantile_is_right_to_five_percent(values: list[float], q: float) -> None:
    histogram = SlidingHistogram(window_s=30)
    for value in values:
        histogram.record(0.0, value)
    true = sorted(values)[max(1, math.ceil(q * len(values))) - 1]
    assert histogram.quantile(0.0, q) == pytest.approx(true, rel=0.05)


@given(durations_s)
def test_a_value_lies_below_the_edge_of_its_bucket_and_above_the_one_before(value: float) -> None:
    index = bucket_of(value)
    assert value <= upper_edge_s(index) * (1 + 1e-6)
    assert index == 0 or value > upper_edge_s(index - 1) * (1 - 1e-6)


def test_the_window_forgets_and_the_total_does_not() -> None:
    histogram = SlidingHistogram(window_s=30)
    histogram.record(100.0, 1.0)
    histogram.record(120.0, 0.01)
    assert histogram.quantile(120.0, 1.0) == pytest.approx(1.0, rel=0.05)
    assert histogram.quantile(130.0, 1.0) == pytest.approx(0.01, rel=0.05)
    assert histogram.quantile(150.0, 1.0) is None
    assert histogram.count == 2
    assert histogram.sum_s == pytest.approx(1.01)


def test_cumulative_counts_end_at_the_count_and_only_grow() -> None:
    histogram = SlidingHistogram(window_s=30)
    for value in (1e-5, 2e-4, 0.5, 0.5, 3.0):
        histogram.record(0.0, value)
    counts = [count for _, count in cumulative(histogram.counts())]
    assert counts == sorted(counts)
    assert counts[-1] == histogram.count
    below = dict(cumulative(histogram.counts()))
    assert below[1e-4] == 1
    assert below[2e-4] == 2


def test_what_is_longer_than_the_last_edge_is_counted_all_the_same() -> None:
    histogram = SlidingHistogram(window_s=30)
    histogram.record(0.0, 10_000.0)
    assert cumulative(histogram.counts())[-1][1] == 0
    assert histogram.count == 1


def test_the_last_seconds_of_a_window_are_counted_by_themselves() -> None:
    histogram = SlidingHistogram(window_s=30)
    for second in range(30):
        histogram.record(float(second), 0.5)
    recent = [histogram.recent(29.5, seconds).total() for seconds in (1, 10, 30)]
    assert recent == [1, 10, 30]
    assert histogram.recent_count(29.5) == 30


REALTIME = ServingClass.REALTIME


def use_of(rows: UsageRows, tenant: str, now: float, key: str = "", of: ServingClass = REALTIME) -> UsageCounts:
    counts = rows.of(tenant, key, of, now)
    counts.requests_total += 1
    return counts


def requests_of(rows: UsageRows) -> dict[str, int]:
    return {tenant: row.requests_total for tenant, row in rows.by_tenant().items()}


def test_who_shows_no_key_has_a_row_without_a_name() -> None:
    rows = UsageRows()
    use_of(rows, "", 10.0)
    (row,) = rows.rows()
    assert (row.tenant, row.key, row.serving_class, row.requests_total) == ("", "", "realtime", 1)
    assert rows.by_tenant() == {}


def test_a_tenant_keeps_its_row() -> None:
    rows = UsageRows()
    use_of(rows, "acme", 10.0)
    use_of(rows, "acme", 99.0)
    (row,) = rows.rows()
    assert (row.requests_total, row.since) == (2, 10.0)


def test_keys_and_classes_of_a_tenant_have_rows_of_their_own_that_add_up() -> None:
    rows = UsageRows()
    use_of(rows, "acme", 30.0, "0a").cached_tokens_total = 5
    use_of(rows, "acme", 20.0, "0b")
    use_of(rows, "acme", 10.0, "0b", ServingClass.BATCH).cached_tokens_total = 2
    assert [(row.key, row.serving_class) for row in rows.rows()] == [
        ("0a", "realtime"),
        ("0b", "realtime"),
        ("0b", "batch"),
    ]
    acme = rows.by_tenant()["acme"]
    assert (acme.requests_total, acme.cached_tokens_total, acme.since) == (3, 7, 10.0)


def test_beyond_the_bound_tenants_share_a_row_of_each_class() -> None:
    rows = UsageRows(limit=2)
    for name in ("a", "b", "c", "d", "c"):
        use_of(rows, name, 10.0)
    use_of(rows, "e", 10.0, of=ServingClass.BATCH)
    assert requests_of(rows) == {"a": 1, "b": 1, OTHER_TENANTS: 4}
    shared = [(row.serving_class, row.requests_total) for row in rows.rows() if row.tenant == OTHER_TENANTS]
    assert shared == [("realtime", 3), ("batch", 1)]


def test_the_one_that_was_silent_longest_makes_place_and_begins_anew_when_it_returns() -> None:
    rows = UsageRows(limit=2)
    use_of(rows, "a", 10.0)
    use_of(rows, "b", 20.0)
    use_of(rows, "c", 11.0 + FORGET_AFTER_S)
    assert set(rows.by_tenant()) == {"b", "c"}
    use_of(rows, "a", 200.0)
    assert rows.by_tenant()["a"].since == 200.0
    assert set(rows.by_tenant()) == {"c", "a"}


def test_a_row_with_requests_in_flight_is_never_forgotten() -> None:
    rows = UsageRows(limit=1)
    use_of(rows, "a", 10.0).in_flight = 1
    use_of(rows, "b", 500.0)
    assert set(rows.by_tenant()) == {"a", OTHER_TENANTS}
