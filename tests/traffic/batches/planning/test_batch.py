"""States of a batch, its order among others, and estimates of its time."""

import json
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from traffic.batches.planning.batch import (
    ALLOWED,
    BATCH_TONE,
    ENDED,
    MOST_KINDS,
    STAMPS,
    WINDOW,
    BatchJob,
    BatchState,
    Merged,
    Tally,
    cancel_refusal,
    deadline_refusal,
    feasible_s,
    merged_from,
    parse_new_batch,
    plan_order,
    window_text,
)
from traffic.tenants.planner import ApplicationRefused

FILE = "file-" + "0" * 32
ASKED: dict[str, Any] = {
    "input_file_id": FILE,
    "endpoint": "/v1/embeddings",
    "completion_window": "24h",
}
NOW = datetime(2026, 11, 26, 12, tzinfo=UTC)


def test_every_state_can_end_has_a_tone_and_says_since_when() -> None:
    assert {BatchState.COMPLETED, BatchState.FAILED, BatchState.EXPIRED, BatchState.CANCELLED} == ENDED
    assert set(BATCH_TONE) == set(BatchState)
    assert set(STAMPS) == set(BatchState) - {BatchState.VALIDATING}
    reached, before = {BatchState.VALIDATING}, set[BatchState]()
    while reached != before:
        before = set(reached)
        reached |= {following for state in before for following in ALLOWED[state]}
    assert reached == set(BatchState)


def test_what_is_being_written_or_has_ended_is_not_cancelled() -> None:
    refused = {state for state in BatchState if cancel_refusal(state)}
    assert refused == {BatchState.FINALIZING, BatchState.COMPLETED, BatchState.FAILED, BatchState.EXPIRED}


def test_openais_fields_alone_mean_a_day_and_the_usual_priority() -> None:
    asked = parse_new_batch({**ASKED, "metadata": None})
    assert (asked.window_s, asked.priority, asked.metadata, asked.output_kept_s) == (86_400, 5, {}, None)
    assert asked.expires_at(NOW) == NOW + timedelta(days=1)


@pytest.mark.parametrize(
    ("window", "seconds"), [("10m", 600), ("90m", 5400), ("4h", 14_400), ("7d", 604_800), ("24h", 86_400)]
)
def test_other_windows_are_ours(window: str, seconds: int) -> None:
    asked = parse_new_batch({**ASKED, "switchyard": {"completion_window": window, "priority": 0}})
    assert (asked.window, asked.window_s, asked.priority) == (window, seconds, 0)


@pytest.mark.parametrize("window", ["9m", "8d", "0h", "4", "h", "4 h", "-4h", "4H", "٤h", 4, None, "99999999h"])
def test_a_window_that_is_none_is_refused(window: object) -> None:
    with pytest.raises(ApplicationRefused, match="from 10m to 7d, such as"):
        parse_new_batch({**ASKED, "switchyard": {"completion_window": window}})


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: (
            st.lists(inner)
            | st.dictionaries(st.sampled_from([*ASKED, "metadata", "switchyard", "priority", "x"]), inner)
        ),
    )
)
def test_whatever_is_asked_it_is_accepted_or_refused_by_field(payload: object) -> None:  # fmt: skip
    try:
        asked = parse_new_batch(payload)
    except ApplicationRefused as refusal:
        status = refusal.status
    else:
        status = 200 if asked.window_s >= 600 else 500
    assert status < 500


@given(*[st.builds(Tally, *[st.integers(0, 10**9)] * 6)] * 3)
def test_tallies_add_up_in_any_order(one: Tally, two: Tally, three: Tally) -> None:
    assert one.plus(two).plus(three) == three.plus(one.plus(two))
    usage = one.plus(two).usage_json()
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]


JOBS = st.lists(
    st.builds(
        BatchJob,
        id=st.uuids().map(str),
        tenant=st.sampled_from(["a", "b", "c"]),
        region=st.just("east"),
        model=st.just("m"),
        remaining=st.integers(1, 10**6),
        expires_at=st.integers(1, 10**6).map(lambda seconds: NOW + timedelta(seconds=seconds)),
        priority=st.integers(0, 9),
        rate=st.floats(0, 1000),
    ),
    max_size=12,
    unique_by=lambda job: job.id,
)


def job(
    name: str, hours: float, remaining: int = 100, tenant: str = "a", priority: int = 5, rate: float = 1.0
) -> BatchJob:
    return BatchJob(name, tenant, "east", "m", remaining, NOW + timedelta(hours=hours), priority, 1.0)


def order_of(jobs: Iterable[BatchJob]) -> tuple[str, ...]:
    return tuple(each.id for each in plan_order(jobs, NOW))


def test_the_least_slack_goes_first_not_the_first_deadline() -> None:
    assert order_of([job("soon", 2), job("large", 3, remaining=10_000)]) == ("large", "soon")


def test_priority_moves_what_has_time() -> None:
    assert order_of([job("usual", 10), job("urgent", 12, priority=9)]) == ("urgent", "usual")


def test_tenants_take_turns_whatever_one_of_them_hands_in() -> None:
    many = [job(f"a{number}", 1 + number) for number in range(5)]
    assert order_of([*many, job("b", 20, tenant="b")])[:2] == ("a0", "b")


@given(JOBS)
def test_every_batch_has_its_turn_and_no_order_of_rows_matters(jobs: list[BatchJob]) -> None:
    order = order_of(jobs)
    assert sorted(order) == sorted(job.id for job in jobs)
    assert order_of(reversed(jobs)) == order
    tenants = {job.tenant for job in jobs}
    first = [next(job.tenant for job in jobs if job.id == id) for id in order[: len(tenants)]]
    assert sorted(first) == sorted(tenants)


@given(JOBS.filter(bool), st.data())
def test_more_urgent_in_any_way_is_never_later(jobs: list[BatchJob], data: st.DataObject) -> None:
    chosen = data.draw(st.sampled_from(jobs))
    sooner = BatchJob(
        chosen.id,
        chosen.tenant,
        chosen.region,
        chosen.model,
        chosen.remaining + data.draw(st.integers(0, 1000)),
        chosen.expires_at - timedelta(seconds=data.draw(st.integers(0, 1000))),
        min(9, chosen.priority + data.draw(st.integers(0, 3))),
        chosen.rate,
    )
    changed = [sooner if job is chosen else job for job in jobs]
    assert order_of(changed).index(chosen.id) <= order_of(jobs).index(chosen.id)


@given(st.integers(1, 10**6), st.integers(0, 10**6), st.floats(0.01, 1000))
def test_a_feasible_window_has_room_for_all_and_is_one(lines: int, ahead: int, rate: float) -> None:
    seconds = feasible_s(lines, ahead, rate)
    assert seconds is not None
    found = WINDOW.fullmatch(text := window_text(seconds))
    if seconds <= 3600 * 9999:
        assert found is not None, text
        assert int(found[1]) * {"m": 60, "h": 3600}[found[2]] >= seconds
    assert seconds * rate >= lines + ahead


def test_an_infeasible_batch_gets_a_feasible_window() -> None:
    late: dict[str, Any] = {"lines": 20_000, "ahead": 1600, "rate": 2.0}
    said = deadline_refusal(asked_s=3600, is_usual=False, **late)
    assert said is not None
    assert said.endswith("use a window of 4h")
    assert deadline_refusal(asked_s=4 * 3600, is_usual=False, **late) is None
    assert deadline_refusal(asked_s=3600, is_usual=True, **late) is None


def test_without_a_measured_rate_the_time_is_unknown() -> None:
    assert feasible_s(1, 0, 0.0) is None


def test_progress_is_read_as_it_was_stored() -> None:
    merged = Merged(7, {"output": ["a", "b"]}, Tally(3, 1, 4, 0, 5, 0))
    merged.count_error(("code", "message"))
    assert merged_from(json.loads(json.dumps(merged.as_json()))) == merged
    assert merged_from({}) == Merged()


def test_only_so_many_kinds_of_errors_are_counted() -> None:
    merged = Merged()
    for number in range(MOST_KINDS + 5):
        merged.count_error(("code", str(number)))
    merged.count_error(("code", "0"))
    assert (len(merged.errors), merged.errors["code", "0"]) == (MOST_KINDS, 2)
