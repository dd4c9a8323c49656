"""Chains: their objective, the join of requests by trace, what each part took, and the burn of the sum."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.chains.planner import (
    Chain,
    InvalidChain,
    LinkedRequest,
    chain_burn,
    chain_cycle,
    chain_figures,
    join_by_trace,
    parse_chain,
)
from kernel.tones import Tone

NOW = datetime(2026, 11, 30, 12, tzinfo=UTC)
CHAIN = Chain("planner", ttft_ms=1000.0, planner_ms=300.0)


def linked(
    at_s: float, *, total_ms: float = 100.0, first_ms: float | None = None, ingress_ms: float | None = 0.0, **more: Any
) -> LinkedRequest:
    return LinkedRequest(
        at=NOW + timedelta(seconds=at_s),
        request=more.get("request", "r"),
        tenant=more.get("tenant", "t"),
        trace=more.get("trace", "a" * 32),
        cell="c",
        ingress_ms=ingress_ms,
        first_ms=first_ms,
        total_ms=total_ms,
    )


@pytest.mark.parametrize(
    ("stated", "field"),
    [
        ({"planner": "p"}, "ttft_ms"),
        ({"ttft_ms": 1000}, "planner"),
        ({"planner": "", "ttft_ms": 1000}, "planner"),
        ({"planner": 3, "ttft_ms": 1000}, "planner"),
        ({"planner": "p", "ttft_ms": True}, "ttft_ms"),
        ({"planner": "p", "ttft_ms": "1000"}, "ttft_ms"),
        ({"planner": "p", "ttft_ms": 0}, "ttft_ms"),
        ({"planner": "p", "ttft_ms": 1000, "ttft_share": 1}, "ttft_share"),
        ({"planner": "p", "ttft_ms": 1000, "planner_ms": 1000}, "planner_ms"),
        ({"planner": "p", "ttft_ms": float("nan")}, "ttft_ms"),
        ({"planner": "p", "ttft_ms": 1000, "budget": 3}, "budget"),
    ],
)
def test_an_invalid_chain_names_its_field(stated: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidChain) as error:
        parse_chain(stated)
    assert error.value.field == field


def test_a_chain_has_defaults_and_an_empty_one_is_none() -> None:
    assert parse_chain({}) is None
    assert parse_chain({"planner": "p", "ttft_ms": 1500, "planner_ms": None}) == Chain("p", 1500.0, 0.99, None)


def test_a_cycle_is_named() -> None:
    planners = {"b": "c", "c": "a"}
    assert chain_cycle("a", "b", planners) == ("a", "b", "c", "a")
    assert chain_cycle("d", "b", planners) == ()
    assert chain_cycle("d", "b", {"b": "c", "c": "b"}) == ()


def test_the_sum_is_from_the_planners_arrival_to_the_first_token() -> None:
    planner = linked(0.0, total_ms=180.0, ingress_ms=20.0)
    request = linked(0.3, total_ms=5000.0, first_ms=400.0, ingress_ms=30.0)
    (chained,) = join_by_trace([planner], [request])
    assert (round(chained.planner_ms), round(chained.between_ms), round(chained.own_ms)) == (200, 90, 430)
    assert round(chained.sum_ms) == 720


def test_a_request_joins_the_last_planner_of_its_trace_and_tenant_before_it() -> None:
    planners = [
        linked(-400.0, request="old", trace="b" * 32),
        linked(0.0, request="first"),
        linked(1.0, request="last"),
        linked(1.5, request="other", tenant="u"),
        linked(9.0, request="later"),
    ]
    requests = [linked(2.0), linked(0.0, trace="b" * 32), linked(3.0, trace="c" * 32), linked(2.0, tenant="v")]
    assert [each.planner.request for each in join_by_trace(planners, requests)] == ["last"]


def test_clocks_that_differ_make_no_negative_part() -> None:
    (chained,) = join_by_trace([linked(0.0, total_ms=500.0)], [linked(0.2, first_ms=100.0)])
    assert (chained.between_ms, chained.sum_ms) == (0.0, 600.0)


def test_figures_have_each_part_and_its_share() -> None:
    pairs = [(linked(0.0, total_ms=200.0), linked(0.2, first_ms=float(first))) for first in (100, 300, 900)]
    found = [join_by_trace([planner], [request])[0] for planner, request in pairs]
    figures = chain_figures(CHAIN, found)
    assert figures.count == 3
    assert [(part.name, round(part.p50_ms), round(part.p99_ms)) for part in figures.parts] == [
        ("planner", 200, 200),
        ("application", 0, 0),
        ("deployment", 300, 900),
        ("sum", 500, 1100),
    ]
    assert [round(part.percent) for part in figures.parts] == [32, 0, 68, 100]
    assert figures.late_percent is not None
    assert (round(figures.late_percent), figures.planner_late_percent) == (33, 0)
    assert [round(each.sum_ms) for each in figures.slowest] == [1100, 500, 300]
    assert chain_figures(CHAIN, []).parts == ()


def test_late_sums_burn_the_budget() -> None:
    def chain_at(age_s: float, first_ms: float) -> Any:
        return join_by_trace([linked(-age_s)], [linked(0.1 - age_s, first_ms=first_ms)])[0]

    good = [chain_at(60.0 + number, 100.0) for number in range(50)]
    calm = chain_burn(CHAIN, good, NOW, 6 * 3600)
    assert (calm.tone, calm.rates[300], calm.rates[3 * 86_400]) == (Tone.OK, 0.0, None)
    burning = chain_burn(CHAIN, [*good, *(chain_at(30.0, 5000.0) for _ in range(50))], NOW, 6 * 3600)
    assert burning.tone is Tone.BAD
    assert burning.rates[300] == pytest.approx(50.0)
    assert chain_burn(CHAIN, [], NOW, 6 * 3600).tone is Tone.IDLE


@given(st.lists(st.tuples(st.integers(-600, 600), st.sampled_from("ab")), max_size=20))
def test_no_request_joins_a_planner_after_it(times: list[tuple[int, str]]) -> None:
    half = len(times) // 2
    planners = [linked(float(at), trace=trace * 32) for at, trace in times[:half]]
    requests = [linked(float(at), trace=trace * 32) for at, trace in times[half:]]
    for each in join_by_trace(planners, requests):
        assert each.planner.arrived_at <= each.request.arrived_at
        assert each.planner.trace == each.request.trace
        assert each.sum_ms >= each.planner_ms + each.own_ms
