"""From totals to what is new: nothing twice, nothing lost between two looks, and a new life counts from 0."""

from hypothesis import given
from hypothesis import strategies as st

from traffic.planning.usage import SourceTotals, UsagePlan, plan_usage, totals_of_cell, totals_of_ingress


def report(requests: int, since: str = "7@1", subject: str = "key:0a", source: str = "ingress:i") -> SourceTotals:
    return SourceTotals(source, subject, since, {"requests": requests})


def after(*looks: SourceTotals) -> UsagePlan:
    """The plan of the last look, after the others."""
    marks: dict[tuple[str, str], SourceTotals] = {}
    plan = UsagePlan()
    for look in looks:
        plan = plan_usage([look], marks)
        marks |= {mark.place: mark for mark in plan.marks}
    return plan


def test_the_first_look_counts_everything_and_the_next_only_what_is_new() -> None:
    assert after(report(5)).used == {"key:0a": {"requests": 5}}
    assert after(report(5), report(8)).used == {"key:0a": {"requests": 3}}
    assert after(report(5), report(5)) == UsagePlan()


def test_another_life_counts_from_0() -> None:
    assert after(report(5), report(2, since="8@2")).used == {"key:0a": {"requests": 2}}


def test_a_total_that_goes_back_is_no_use() -> None:
    assert after(report(5), report(2)).used == {}


def test_two_sources_of_one_subject_add_up() -> None:
    plan = plan_usage([report(5), report(4, source="ingress:other")], {})
    assert plan.used == {"key:0a": {"requests": 9}}
    assert len(plan.marks) == 2


@given(st.lists(st.lists(st.integers(0, 100), min_size=1).map(sorted), min_size=1))
def test_however_a_source_is_looked_at_all_its_lives_count_once(lives: list[list[int]]) -> None:
    marks: dict[tuple[str, str], SourceTotals] = {}
    counted = 0
    for number, totals in enumerate(lives):
        for total in totals:
            plan = plan_usage([report(total, since=str(number))], marks)
            marks |= {mark.place: mark for mark in plan.marks}
            counted += plan.used.get("key:0a", {}).get("requests", 0)
    assert counted == sum(totals[-1] for totals in lives)


def test_what_an_ingress_says_of_keys_is_read_and_anything_else_passed_over() -> None:
    telemetry = {"keys": {"since": "7@1", "totals": {"0a": [3, 1, 0], "0b": [1], "0c": "x", "0d": [1, -1, 0]}}}
    totals = {"requests": 3, "limited": 1, "errors": 0}
    assert totals_of_ingress("i", telemetry) == [SourceTotals("ingress:i", "key:0a", "7@1", totals)]
    assert totals_of_ingress("i", {}) == totals_of_ingress("i", {"keys": 3}) == []


def test_what_a_cell_says_of_keys_and_classes_is_read_row_by_row() -> None:
    row = {"since": 1.5, "tenant": "rufus", "key": "0a", "serving_class": "batch", "requests_total": 4}
    load = {"usage": [row, {"since": 2.5, "prompt_tokens_total": 9}, {"since": 3.5, "tenant": "a\x00"}]}
    counts = {"requests": 4, "prompt_tokens": 0, "completion_tokens": 0}
    assert totals_of_cell("n-1", load) == [SourceTotals("cell:n-1:0a:batch", "tenant:rufus", "1.5", counts)]


def test_what_a_cell_of_the_release_before_says_of_tenants_is_read() -> None:
    row = {"since": 1.5, "in_flight": 1, "requests_total": 4, "prompt_tokens_total": 9, "completion_tokens_total": 7}
    totals = {"requests": 4, "prompt_tokens": 9, "completion_tokens": 7}
    assert totals_of_cell("n-1", {"tenants": {"rufus": row}}) == [
        SourceTotals("cell:n-1", "tenant:rufus", "1.5", totals)
    ]
    assert totals_of_cell("n-1", {"tenants": {"x" * 65: row, "a\x00": row}}) == []
    assert totals_of_cell("n-1", None) == totals_of_cell("n-1", {}) == []
