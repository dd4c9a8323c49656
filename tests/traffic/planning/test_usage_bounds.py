"""A compromised node bills nobody else, and nothing that ingresses did not send."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from traffic.planning.usage import CELL_FIELDS, CellRow, Place, SourceTotals, plan_usage
from traffic.planning.usage_bounds import (
    BYTES_KEPT,
    Claim,
    Credit,
    KeyScope,
    bound_claims,
    credit_marks,
    credit_of,
    plan_claims,
)

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
    assert left.deployments["sim"]["bytes_in"] == 10 * BYTES_KEPT, "all of it counts in this look"
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
