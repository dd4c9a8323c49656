"""Which batch is worked on first, and what is told of its time."""

from datetime import UTC, datetime, timedelta
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from traffic.planning.batch import WINDOW
from traffic.planning.batch_order import BatchJob, deadline_refusal, feasible_s, plan_order, window_text

NOW = datetime(2026, 11, 26, 12, tzinfo=UTC)
JOBS = st.lists(
    st.builds(
        BatchJob,
        id=st.uuids().map(str),
        tenant=st.sampled_from(["a", "b", "c"]),
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
    return BatchJob(name, tenant, remaining, NOW + timedelta(hours=hours), priority, 1.0)


def test_the_least_slack_goes_first_not_the_first_deadline() -> None:
    assert plan_order([job("soon", 2), job("large", 3, remaining=10_000)], NOW) == ("large", "soon")


def test_priority_moves_what_has_time() -> None:
    assert plan_order([job("usual", 10), job("urgent", 12, priority=9)], NOW) == ("urgent", "usual")


def test_tenants_take_turns_whatever_one_of_them_hands_in() -> None:
    many = [job(f"a{number}", 1 + number) for number in range(5)]
    assert plan_order([*many, job("b", 20, tenant="b")], NOW)[:2] == ("a0", "b")


@given(JOBS)
def test_every_batch_has_its_turn_and_no_order_of_rows_matters(jobs: list[BatchJob]) -> None:
    order = plan_order(jobs, NOW)
    assert sorted(order) == sorted(job.id for job in jobs)
    assert plan_order(reversed(jobs), NOW) == order
    tenants = {job.tenant for job in jobs}
    first = [next(job.tenant for job in jobs if job.id == id) for id in order[: len(tenants)]]
    assert sorted(first) == sorted(tenants)


@given(JOBS.filter(bool), st.data())
def test_more_urgent_in_any_way_is_never_later(jobs: list[BatchJob], data: st.DataObject) -> None:
    chosen = data.draw(st.sampled_from(jobs))
    sooner = BatchJob(
        chosen.id,
        chosen.tenant,
        chosen.remaining + data.draw(st.integers(0, 1000)),
        chosen.expires_at - timedelta(seconds=data.draw(st.integers(0, 1000))),
        min(9, chosen.priority + data.draw(st.integers(0, 3))),
        chosen.rate,
    )
    changed = [sooner if job is chosen else job for job in jobs]
    assert plan_order(changed, NOW).index(chosen.id) <= plan_order(jobs, NOW).index(chosen.id)


@given(st.integers(1, 10**6), st.integers(0, 10**6), st.floats(0.01, 1000))
def test_a_feasible_window_has_room_for_all_and_is_one(lines: int, ahead: int, rate: float) -> None:
    seconds = feasible_s(lines, ahead, rate)
    assert seconds is not None
    found = WINDOW.fullmatch(text := window_text(seconds))
    if seconds <= 3600 * 9999:
        assert found is not None, text
        assert int(found[1]) * {"m": 60, "h": 3600}[found[2]] >= seconds
    assert seconds * rate >= lines + ahead


def test_what_cannot_be_done_in_its_time_is_told_the_time_that_can_be_met() -> None:
    late: dict[str, Any] = {"lines": 20_000, "ahead": 1600, "rate": 2.0}
    said = deadline_refusal(asked_s=3600, is_usual=False, **late)
    assert said is not None
    assert said.endswith("a window of 4h can be met")
    assert deadline_refusal(asked_s=4 * 3600, is_usual=False, **late) is None
    assert deadline_refusal(asked_s=3600, is_usual=True, **late) is None


def test_without_a_measured_rate_nobody_knows() -> None:
    assert feasible_s(1, 0, 0.0) is None
