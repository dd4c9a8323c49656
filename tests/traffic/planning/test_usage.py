"""From totals to what is new: nothing twice, nothing lost between two looks, and a new life counts from 0."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from traffic.planning.usage import (
    CELL_FIELDS,
    Place,
    SourceTotals,
    UsagePlan,
    keys_of_ingress,
    plan_usage,
    pools_of_ingress,
    rows_of_cell,
)

Marks = dict[Place, SourceTotals]


def report(requests: int, since: str = "7@1", subject: str = "key:0a", source: str = "ingress:i") -> SourceTotals:
    return SourceTotals(source, subject, since, {"requests": requests})


def look(marks: Marks, *reported: SourceTotals) -> int:
    """What is new, as requests; the marks go on."""
    plan = plan_usage(reported, marks)
    marks.update({mark.place: mark for mark in plan.marks})
    return sum(counts["requests"] for counts in plan.used.values())


def test_the_first_look_counts_everything_and_the_next_only_what_is_new() -> None:
    marks: Marks = {}
    assert [look(marks, report(requests)) for requests in (5, 8, 8)] == [5, 3, 0]
    assert plan_usage([report(8)], marks) == UsagePlan()


def test_another_life_counts_from_0() -> None:
    marks: Marks = {}
    assert [look(marks, report(5)), look(marks, report(2, since="8@2"))] == [5, 2]


def test_an_old_report_is_no_use_whichever_life_it_is_about() -> None:
    marks: Marks = {}
    looks = [report(5), report(3), report(5), report(2, since="8@2"), report(6), report(2, since="8@2")]
    assert [look(marks, each) for each in looks] == [5, 0, 0, 2, 1, 0]


def test_two_sources_of_one_subject_add_up_and_one_that_is_there_twice_counts_once() -> None:
    assert look({}, report(5), report(4, source="ingress:other"), report(5)) == 9


@given(st.lists(st.lists(st.integers(0, 100), min_size=1, max_size=5), min_size=1, max_size=5), st.randoms())
def test_reports_that_are_lost_repeated_or_late_count_each_life_once(lives: list[list[int]], random: Any) -> None:
    """The most that was ever reported of each life is what is counted, in whatever order it came."""
    reports = [report(total, since=str(life)) for life, totals in enumerate(lives) for total in totals]
    reports += random.choices(reports, k=len(reports))
    random.shuffle(reports)
    marks: Marks = {}
    assert sum(look(marks, each) for each in reports) == sum(max(totals) for totals in lives)


@given(st.lists(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 50)), max_size=4), max_size=6))
def test_a_worker_that_dies_before_its_transaction_ended_changes_nothing(passes: list[list[tuple[str, int]]]) -> None:
    """Marks and rows are written together, so every second look may be lost whole."""
    marks: Marks = {}
    counted, most = 0, dict.fromkeys("ab", 0)
    for number, told in enumerate(passes):
        reported = [report(total, subject=f"key:{key}") for key, total in told]
        if number % 2:
            plan_usage(reported, marks)
            continue
        counted += look(marks, *reported)
        for key, total in told:
            most[key] = max(most[key], total)
    assert counted == sum(most.values())


def test_what_an_ingress_says_of_keys_is_read_and_anything_else_passed_over() -> None:
    bad = {"0b0b": [1], "0c0c": "x", "0d0d": [1, -1, 0], "../x": [1, 0, 0], "0e0e": [True, 0, 0]}
    telemetry = {"keys": {"since": "7@1", "totals": {"0a0a": [3, 1, 0], **bad}}}
    totals = {"requests": 3, "limited": 1, "errors": 0}
    assert keys_of_ingress("i", telemetry) == [SourceTotals("ingress:i", "key:0a0a", "7@1", totals)]
    assert keys_of_ingress("i", {}) == keys_of_ingress("i", {"keys": 3}) == []


def test_what_an_ingress_sent_is_read_by_deployment_in_its_workers_life() -> None:
    pools = {"a": {"requests_total": 3, "bytes_in_total": 9, "bytes_out_total": 8}, "b": {"requests_total": 0}, "c": 1}
    counts = {"requests": 3, "bytes_in": 9, "bytes_out": 8}
    told = {"worker_pid": 7, "life": "7@1", "pools": pools}
    assert pools_of_ingress("i", told) == [SourceTotals("ingress:i", "pool:a", "7@1", counts)]
    before = {"worker_pid": 7, "pools": {"a": {"requests_total": 3}}}
    counts = {"requests": 3, "bytes_in": 0, "bytes_out": 0}
    assert pools_of_ingress("i", before) == [SourceTotals("ingress:i", "pool:a", "7", counts)]


def test_what_a_cell_says_of_keys_and_classes_is_read_row_by_row() -> None:
    row = {"since": 1.5, "tenant": "rufus", "key": "0a0a", "serving_class": "batch", "requests_total": 4}
    nobody = {"since": 2.5, "prompt_tokens_total": 9, "cached_tokens_total": 3}
    one, other = rows_of_cell("n-1", {"usage": [row, nobody]})
    assert (one.tenant, one.key, one.serving_class) == ("rufus", "0a0a", "batch")
    assert one.totals.place == ("cell:n-1", "0a0a/batch", "1.5")
    assert one.totals.totals == dict.fromkeys(CELL_FIELDS, 0) | {"requests": 4}
    assert other.totals.place == ("cell:n-1", "@/realtime", "2.5")
    assert other.totals.totals["cached_tokens"] == 3


@pytest.mark.parametrize(
    "wrong",
    [
        {"tenant": "a\x00"},
        {"tenant": "x" * 65},
        {"tenant": 3},
        {"key": "../x"},
        {"serving_class": "x"},
        {"requests_total": -1},
        {"requests_total": 1.5},
    ],
)  # fmt: skip
def test_a_row_that_cannot_be_meant_is_passed_over(wrong: dict[str, Any]) -> None:
    assert rows_of_cell("n-1", {"usage": [{"since": 1.0, "tenant": "rufus", "key": "0a0a", **wrong}]}) == []
    assert rows_of_cell("n-1", None) == rows_of_cell("n-1", {}) == []
