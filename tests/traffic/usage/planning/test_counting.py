"""New usage from repeated totals; claims of a compromised node are limited to what ingresses counted; states of
budgets."""

from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from traffic.usage.planning.counting import (
    BYTES_KEPT,
    CELL_FIELDS,
    BudgetRules,
    BudgetStanding,
    BudgetUnit,
    CellRow,
    Claim,
    Credit,
    KeyScope,
    Place,
    SourceTotals,
    UsagePlan,
    bound_claims,
    credit_marks,
    credit_of,
    keys_of_ingress,
    month_of,
    plan_budget,
    plan_claims,
    plan_usage,
    pools_of_ingress,
    rows_of_cell,
    used_percent,
)

Marks = dict[Place, SourceTotals]


def report(requests: int, since: str = "7@1", subject: str = "key:0a", source: str = "ingress:i") -> SourceTotals:
    return SourceTotals(source, subject, since, {"requests": requests})


def look(marks: Marks, *reported: SourceTotals) -> int:
    """New usage as requests; moves the marks."""
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
    """The highest reported total of each life counts, in any order of reports."""
    reports = [report(total, since=str(life)) for life, totals in enumerate(lives) for total in totals]
    reports += random.choices(reports, k=len(reports))
    random.shuffle(reports)
    marks: Marks = {}
    assert sum(look(marks, each) for each in reports) == sum(max(totals) for totals in lives)


@given(st.lists(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 50)), max_size=4), max_size=6))
def test_a_worker_that_dies_before_its_transaction_ended_changes_nothing(passes: list[list[tuple[str, int]]]) -> None:
    """Marks and rows share a transaction, so any pass may be lost as a whole."""
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


KEYS = {
    "aaaa": KeyScope("rufus"),
    "bbbb": KeyScope("rufus", frozenset({"other"})),
    "cccc": KeyScope("ada"),
}


def row(key: str = "aaaa", tenant: str = "rufus", node: str = "n", since: str = "1.0", **counts: int) -> CellRow:
    totals = dict.fromkeys(CELL_FIELDS, 0) | counts
    subject = f"{key or '@' + tenant}/realtime"
    return CellRow(SourceTotals(f"cell:{node}", subject, since, totals), tenant, key, "realtime")


def claims(*rows: CellRow, deployment: str = "sim", context: int = 100) -> list[Claim]:
    return plan_claims(rows, deployment, context, KEYS)


def credit(requests: int = 0, bytes_in: int = 0, bytes_out: int = 0, **keys: int) -> Credit:
    return Credit({"sim": {"requests": requests, "bytes_in": bytes_in, "bytes_out": bytes_out}}, keys)


def believed(claimed: list[Claim], left: Credit, marks: dict[Place, SourceTotals] | None = None) -> Any:
    return [dict(each.totals) for each in bound_claims(claimed, marks or {}, left)]


def test_a_key_is_billed_to_its_own_tenant_whatever_the_node_says() -> None:
    (claim,) = claims(row("aaaa", tenant="ada"))
    assert claim.account.tenant == "rufus"


def test_keys_that_are_unknown_or_do_not_open_the_deployment_are_not_billed() -> None:
    assert claims(row("dddd"), row("bbbb"), row("", tenant="nobody")) == []


def test_a_row_of_an_older_agent_draws_the_credit_of_the_tenants_keys() -> None:
    (claim,) = claims(row("", tenant="rufus", requests=5))
    assert claim.keys == ("aaaa",)
    left = credit(10, aaaa=3)
    assert believed([claim], left)[0]["requests"] == 3
    assert (left.keys["aaaa"], left.deployments["sim"]["requests"]) == (0, 7)


def test_requests_without_a_key_are_bounded_by_the_deployment_alone() -> None:
    left = credit(4)
    assert believed(claims(row("", tenant="", requests=9)), left)[0]["requests"] == 4


def test_a_key_gets_no_more_requests_than_ingresses_counted_for_it() -> None:
    left = credit(100, aaaa=3, cccc=50)
    one = believed(claims(row(requests=9, cancelled=9, errors=9, estimated=9, prompt_tokens=10_000)), left)[0]
    assert {one[name] for name in ("requests", "cancelled", "errors", "estimated")} == {3}
    assert one["prompt_tokens"] == 300
    assert left.deployments["sim"]["requests"] == 97


def test_tokens_beyond_a_context_for_each_request_need_as_many_bytes() -> None:
    left = credit(2, bytes_in=500, bytes_out=50, aaaa=2)
    many = row(requests=2, prompt_tokens=10_000, cached_tokens=9_999, completion_tokens=230)
    one = believed(claims(many), left)[0]
    assert (one["prompt_tokens"], one["cached_tokens"], one["completion_tokens"]) == (700, 700, 230)
    assert left.deployments["sim"] == {"requests": 0, "bytes_in": 0, "bytes_out": 20}


def test_what_waits_is_believed_once_ingresses_have_reported() -> None:
    marks: dict[Place, SourceTotals] = {}
    counted = 0
    for told in (credit(1, aaaa=1), credit(0, aaaa=0), credit(4, aaaa=4)):
        plan = plan_usage(bound_claims(claims(row(requests=5)), marks, told), marks)
        marks.update({mark.place: mark for mark in plan.marks})
        counted += sum(counts["requests"] for counts in plan.used.values())
    assert counted == 5


def test_credit_is_what_came_through_and_is_remembered() -> None:
    sent = [
        SourceTotals("ingress:i", "pool:sim", "1", {"requests": 8, "bytes_in": 10 * BYTES_KEPT, "bytes_out": 7}),
        SourceTotals("ingress:i", "key:aaaa", "1", {"requests": 9, "limited": 4, "errors": 0}),
    ]
    left = credit_of(plan_usage(sent, {}), {})
    assert left.deployments["sim"]["bytes_in"] == 10 * BYTES_KEPT, "all of it counts in this pass"
    assert left.keys == {"aaaa": 5}
    marks = {mark.place: mark for mark in credit_marks(left, {})}
    kept = credit_of(plan_usage([], {}), marks)
    assert kept.deployments["sim"] == {"requests": 8, "bytes_in": BYTES_KEPT, "bytes_out": 7}
    assert kept.keys == {"aaaa": 5}
    assert credit_marks(kept, marks) == []


LIES = st.lists(
    st.tuples(
        st.sampled_from(["n1", "n2"]),
        st.sampled_from(["aaaa", "bbbb", "cccc", "dddd", ""]),
        st.sampled_from(["rufus", "ada", "stranger", ""]),
        st.sampled_from(["1.0", "2.0", "nan"]),
        st.dictionaries(st.sampled_from(CELL_FIELDS), st.integers(0, 2**53)),
    ),
    max_size=8,
)


@given(
    st.lists(st.tuples(LIES, st.integers(0, 20), st.integers(0, 20), st.integers(0, 1000)), max_size=5),
)
def test_whatever_nodes_claim_again_and_again_no_bill_exceeds_what_ingresses_counted(
    looks: list[tuple[Any, int, int, int]],
) -> None:
    marks: dict[Place, SourceTotals] = {}
    of_key: dict[str, int] = {}
    billed_requests = billed_prompt = 0
    sent = {"pool": 0, "aaaa": 0, "cccc": 0, "bytes": 0}
    for lies, of_a, of_c, size in looks:
        sent = {"pool": sent["pool"] + of_a + of_c, "aaaa": sent["aaaa"] + of_a, "cccc": sent["cccc"] + of_c,
                "bytes": sent["bytes"] + size}  # fmt: skip
        seen = plan_usage(
            [
                SourceTotals("ingress:i", "pool:sim", "1", {"requests": sent["pool"], "bytes_in": sent["bytes"]}),
                *(
                    SourceTotals("ingress:i", f"key:{key}", "1", {"requests": sent[key], "limited": 0, "errors": 0})
                    for key in ("aaaa", "cccc")
                ),
            ],
            marks,
        )
        left = credit_of(seen, marks)
        rows = [row(key, tenant, node, since, **counts) for node, key, tenant, since, counts in lies]
        told = claims(*rows)
        plan = plan_usage(bound_claims(told, marks, left), marks)
        accounts = {claim.row.totals.place: claim.account for claim in told}
        for place, counts in plan.used.items():
            billed_requests += counts["requests"]
            billed_prompt += counts["prompt_tokens"]
            tenant = accounts[place].tenant
            assert tenant in {"rufus", "ada", ""}
            of_key[tenant] = of_key.get(tenant, 0) + counts["requests"]
        fresh = [*seen.marks, *plan.marks, *credit_marks(left, marks)]
        marks.update({mark.place: mark for mark in fresh})
    assert billed_requests <= sent["pool"]
    assert of_key.get("rufus", 0) <= sent["aaaa"]
    assert of_key.get("ada", 0) <= sent["cccc"]
    assert billed_prompt <= 100 * sent["pool"] + sent["bytes"]


NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)
NOVEMBER, OCTOBER = date(2026, 11, 1), date(2026, 10, 1)
TOKENS, USD = BudgetUnit.TOKENS, BudgetUnit.USD
RULES = BudgetRules(TOKENS, Decimal(1000), hard_stop=True)
MORE = BudgetRules(TOKENS, Decimal(4000), hard_stop=True)
NOTHING = BudgetStanding(NOVEMBER)


@pytest.mark.parametrize(
    ("rules", "used", "was", "level", "stopped", "changes"),
    [
        (RULES, "499", NOTHING, 0, False, ()),
        (RULES, "500", NOTHING, 50, False, ("reached 50 % of its budget: 500 of 1,000 tokens",)),
        (RULES, "999", BudgetStanding(NOVEMBER, 80), 80, False, ()),
        (RULES, "1000", BudgetStanding(NOVEMBER, 80), 100, True, (
            "reached 100 % of its budget: 1,000 of 1,000 tokens", "its keys are refused: 1,000 of 1,000 tokens")),
        (RULES, "1000", BudgetStanding(NOVEMBER, 100, stopped=True), 100, True, ()),
        (RULES, "0", BudgetStanding(OCTOBER, 100, stopped=True), 0, False, (
            "November 2026 began", "its keys are accepted again")),
        (RULES, "0", BudgetStanding(OCTOBER), 0, False, ()),
        (RULES, "600", BudgetStanding(OCTOBER, 50), 50, False, (
            "November 2026 began", "reached 50 % of its budget: 600 of 1,000 tokens")),
        (MORE, "1000", BudgetStanding(NOVEMBER, 100, stopped=True), 0, False, (
            "is below 100 % of its budget: 1,000 of 4,000 tokens", "its keys are accepted again")),
        (BudgetRules(TOKENS, Decimal(1000)), "5000", NOTHING, 100, False, (
            "reached 100 % of its budget: 5,000 of 1,000 tokens",)),
        (BudgetRules(TOKENS, Decimal(1000), alert_at=(200,), hard_stop=True), "1000", NOTHING, 0, True, (
            "its keys are refused: 1,000 of 1,000 tokens",)),
        (BudgetRules(USD, Decimal(2)), "1.7", NOTHING, 80, False, (
            "reached 80 % of its budget: 1.70 of 2.00 USD",)),
    ],
)  # fmt: skip
def test_where_a_budget_stands(
    rules: BudgetRules, used: str, was: BudgetStanding, level: int, stopped: bool, changes: tuple[str, ...]
) -> None:
    plan = plan_budget(rules, Decimal(used), was, NOW)
    assert plan.standing == BudgetStanding(NOVEMBER, level, stopped)
    assert plan.changes == changes


def test_months_are_those_of_utc() -> None:
    tokyo = timezone(timedelta(hours=9))
    assert month_of(datetime(2026, 12, 1, 8, 59, tzinfo=tokyo)) == NOVEMBER


TOKEN_LIMITS = st.integers(1, 10**12).map(Decimal)
MONEY = st.decimals(min_value="0.000001", max_value=10**6, places=6)
ALERTS = st.sets(st.integers(1, 1000), max_size=5).map(lambda each: tuple(sorted(each)))
RULED = st.one_of(
    st.builds(BudgetRules, st.just(TOKENS), TOKEN_LIMITS, ALERTS, st.booleans()),
    st.builds(BudgetRules, st.just(USD), MONEY, ALERTS, st.booleans()),
)
USED = st.one_of(st.integers(0, 10**13).map(Decimal), st.decimals(min_value=0, max_value=10**7, places=12))
WAS = st.builds(BudgetStanding, st.sampled_from([NOVEMBER, OCTOBER]), st.integers(0, 1000), st.booleans())


@given(RULED, USED, WAS)
def test_a_stop_is_exactly_a_hard_budget_that_is_used_up_whatever_was_before(
    rules: BudgetRules, used: Decimal, was: BudgetStanding
) -> None:
    plan = plan_budget(rules, used, was, NOW)
    assert plan.standing.stopped == (rules.hard_stop and used >= rules.limit)
    assert plan.standing.level <= used_percent(rules, used)
    again = plan_budget(rules, used, plan.standing, NOW)
    assert (again.standing, again.changes) == (plan.standing, ()), "announced once"


@given(RULED, WAS)
def test_a_tenant_without_usage_is_never_stopped(rules: BudgetRules, was: BudgetStanding) -> None:
    assert not plan_budget(rules, Decimal(0), was, NOW).standing.stopped
