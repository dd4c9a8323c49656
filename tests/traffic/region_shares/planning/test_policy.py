"""Arithmetic on share rows, and validation of traffic policies."""

import math
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from engine_agent.protocol.request_limits import RequestLimits
from traffic.region_shares.planning.policy import (
    InvalidTrafficPolicy,
    TrafficPolicy,
    distance,
    loads,
    movement,
    parse_traffic_policy,
    step_towards,
    traffic_policy_as_json,
    whole_row,
)

rows = st.dictionaries(st.sampled_from("abcd"), st.floats(0.001, 100.0), min_size=1)


@given(row=rows)
def test_a_whole_row_sums_to_one_and_stays_close(row: dict[str, float]) -> None:
    whole = whole_row(row, "a")
    total = math.fsum(row.values())
    assert math.isclose(math.fsum(whole.values()), 1.0, abs_tol=1e-12)
    assert distance(whole, {region: share / total for region, share in row.items()}) <= 4e-4
    assert whole_row(whole, "a") == whole


def test_what_rounding_leaves_over_stays_at_home_or_with_the_greatest() -> None:
    thirds = {"a": 1.0, "b": 1.0, "c": 1.0}
    assert whole_row(thirds, "b") == {"a": 0.3333, "b": 0.3334, "c": 0.3333}
    assert whole_row(thirds, "z") == {"a": 0.3333, "b": 0.3333, "c": 0.3334}


@pytest.mark.parametrize("row", [{}, {"a": 0.0}, {"a": -1.0}])
def test_a_row_of_nothing_is_refused(row: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="no share above 0"):
        whole_row(row, "a")


def test_distance_is_the_share_that_goes_elsewhere() -> None:
    assert distance({"a": 1.0}, {"b": 1.0}) == 1.0
    assert distance({"a": 0.5, "b": 0.5}, {"a": 0.25, "b": 0.75}) == 0.25


def test_movement_is_of_all_requests() -> None:
    before = {"a": {"a": 1.0}, "b": {"b": 1.0}}
    after = {"a": {"b": 1.0}, "b": {"b": 1.0}, "new": {"b": 1.0}}
    assert movement(before, after, {"a": 30.0, "b": 60.0, "new": 10.0}) == pytest.approx(0.3)
    assert movement(before, after, {}) == 0.0


def test_loads_add_up() -> None:
    assert loads({"a": {"a": 0.5, "b": 0.5}, "b": {"b": 1.0}}, {"a": 10.0, "b": 4.0}) == {"a": 5.0, "b": 9.0}


@given(row=rows, target=rows)
@example(row={"a": 1.0}, target={"b": 1.0, "c": 2.0})
def test_equal_steps_arrive(row: dict[str, float], target: dict[str, float]) -> None:
    here, there = whole_row(row, "a"), whole_row(target, "a")
    for _ in range(math.ceil(distance(here, there) / 0.1) + 1):  # rounding may cost a step
        before, here = here, step_towards(here, there, 0.1, "a")
        assert distance(before, here) <= 0.1 + 4e-4
    assert distance(here, there) <= 1e-3


REGIONS = ("us-east-1", "eu-west-1")
WHOLE: dict[str, Any] = {
    "residency": {"eu-west-1": ["eu-west-1"]},
    "cost": {"us-east-1": 0.5},
    "cost_utilisation": 0.5,
    "cost_latency_ms": 100.0,
    "utilisation_cap": 0.7,
    "tested_concurrency": 24,
    "tested_by_type": {"trn1.32xlarge": 12},
    "load_bound": 1.5,
    "split": {"chat": 95, "chat-v2": 5},
    "routing": "exact",
    "shared_caches": True,
    "continuation": True,
    "split_sticky": False,
    "batch_at_risk": "cells",
    "request_limits": {
        "sequences": 256,
        "inputs": 2048,
        "stops": 8,
        "tools": 128,
        "tools_bytes": 524_288,
        "schema_bytes": 65_536,
        "schema_depth": 32,
        "schema_counts": 100_000,
        "top_logprobs": 20,
        "token_rules": 1024,
    },
}


def test_what_is_stated_counts_and_the_rest_is_the_default() -> None:
    policy = parse_traffic_policy({"utilisation_cap": 0.7}, REGIONS)
    assert (policy.utilisation_cap, policy.cost_utilisation) == (0.7, TrafficPolicy().cost_utilisation)


def test_a_type_may_have_been_tested_for_another_number() -> None:
    policy = parse_traffic_policy(WHOLE, REGIONS)
    assert (policy.tested_on("trn1.32xlarge"), policy.tested_on("p5.48xlarge")) == (12, 24)
    assert TrafficPolicy().tested_on("p5.48xlarge") is None, "the version's value applies"


def test_a_policy_survives_being_stored() -> None:
    policy = parse_traffic_policy(WHOLE, REGIONS)
    assert traffic_policy_as_json(policy) == traffic_policy_as_json(TrafficPolicy()) | WHOLE
    assert parse_traffic_policy(traffic_policy_as_json(policy)) == policy


def test_of_limits_of_one_request_only_the_stated_ones_change() -> None:
    policy = parse_traffic_policy({"request_limits": {"stops": 8}}, REGIONS)
    policy = parse_traffic_policy({"request_limits": {"tools": 8}}, REGIONS, policy)
    assert policy.request_limits == RequestLimits(stops=8, tools=8)


def test_residency_binds_only_the_origins_that_it_names() -> None:
    policy = parse_traffic_policy(WHOLE, REGIONS)
    assert not policy.may_serve("eu-west-1", "us-east-1")
    assert policy.may_serve("us-east-1", "eu-west-1")
    assert (policy.price("us-east-1"), policy.price("eu-west-1")) == (0.5, 1.0)


@pytest.mark.parametrize(
    ("stated", "field", "words"),
    [
        ({"latency": 1}, "latency", "there is no latency; there are: residency, cost"),
        ({"utilisation_cap": 0.9}, "utilisation_cap", "from 0.05 to 0.8"),
        ({"utilisation_cap": True}, "utilisation_cap", "must be a number"),
        ({"cost": {"mars": 1}}, "cost", "unknown region 'mars'; known: eu-west-1, us-east-1"),
        ({"cost": {"us-east-1": 0}}, "cost.us-east-1", "from 0.01 to 100"),
        ({"cost": [1]}, "cost", "must be an object"),
        ({"residency": {"eu-west-1": []}}, "residency.eu-west-1", "at least one"),
        ({"residency": {"eu-west-1": ["mars"]}}, "residency.eu-west-1", "unknown region 'mars'"),
        ({"tested_concurrency": 0}, "tested_concurrency", "from 1 to 10000, or null"),
        ({"load_bound": 0.9}, "load_bound", "from 1 to 10"),
        ({"split": {"chat": -1}}, "split.chat", "whole number from 0 to 10000"),
        ({"split": {"chat": 0.5}}, "split.chat", "whole number"),
        ({"split_sticky": 1}, "split_sticky", "true or false"),
        ({"routing": "nearest", "load_bound": 1.25}, "routing", "sticky"),
        ({"routing": "exact"}, "routing", "exact needs a load_bound"),
        ({"shared_caches": "yes"}, "shared_caches", "true or false"),
        ({"continuation": "on"}, "continuation", "true or false"),
        ({"batch_at_risk": "hope"}, "batch_at_risk", "tell"),
        ({"request_limits": {"sequences": 0}}, "request_limits.sequences", "whole number from 1 to 1024"),
        ({"request_limits": {"choices": 1}}, "request_limits.choices", "there is no request_limits.choices"),
        ({"request_limits": 128}, "request_limits", "must be an object"),
        ({"tested_concurrency": 1.5}, "tested_concurrency", "whole number"),
        ({"tested_by_type": {"trn1.32xlarge": 0}}, "tested_by_type.trn1.32xlarge", "from 1 to 10000"),
    ],
)
def test_what_breaks_a_rule_is_named_with_what_would_be_right(stated: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(InvalidTrafficPolicy, match=words) as wrong:
        parse_traffic_policy(stated, REGIONS)
    assert wrong.value.field == field
