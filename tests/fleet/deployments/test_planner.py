"""Parsing of update policies, collisions of names, and burn rates of error budgets."""

from typing import Any

import pytest

from engine_agent.protocol.states import ServingClass
from fleet.deployments.planner import (
    WINDOWS_S,
    GatePolicy,
    InvalidObjective,
    InvalidPolicy,
    Objective,
    RequestCounts,
    ServedName,
    UpdatePolicy,
    UpdateStrategy,
    burns,
    emptied_regions,
    empties_origin,
    name_collision,
    parse_objective,
    parse_policy,
    policy_as_json,
)
from kernel.tones import Tone


def test_what_is_not_stated_is_the_default_or_the_deployments() -> None:
    assert parse_policy({}) == UpdatePolicy()
    own = UpdatePolicy(bake_s=7, gate=GatePolicy(min_samples=9))
    assert parse_policy({"gate": {"error_ratio": 3}}, own) == UpdatePolicy(bake_s=7, gate=GatePolicy(3, min_samples=9))


def test_a_policy_survives_its_row() -> None:
    policy = UpdatePolicy(UpdateStrategy.SURGE, surge=2, waves_percent=(5, 100), gate=GatePolicy(latency_ratio=1.5))
    assert parse_policy(policy_as_json(policy)) == policy


@pytest.mark.parametrize(
    ("stated", "field", "rule"),
    [
        ({"max_unavailble": 1}, "max_unavailble", "there is no max_unavailble; there are: strategy, max_unavailable"),
        ({"strategy": "blue_green"}, "strategy", "it must be in_place or surge"),
        ({"max_unavailable": 0}, "max_unavailable", "in_place must take down at least 1 cell"),
        ({"max_unavailable": "1"}, "max_unavailable", "a whole number from 0 to 1000"),
        ({"strategy": "surge"}, "surge", "needs at least 1"),
        ({"waves_percent": [50, 20, 100]}, "waves_percent", "growing list of whole percentages"),
        ({"waves_percent": [50]}, "waves_percent", "the last of them 100"),
        ({"bake_s": -1}, "bake_s", "a number from 0 to 86400"),
        ({"canary": 1}, "canary", "true or false"),
        ({"gate": {"latency_ratio": 0.5}}, "gate.latency_ratio", "a number from 1 to 100"),
        ({"gate": {"min_samples": 1}}, "gate.min_samples", "a whole number from 2 to 1000000"),
        ({"gate": {"p99": 2}}, "gate.p99", "there is no gate.p99"),
        ({"gate": 2}, "gate", "gate is 2; it must be an object"),
    ],
)
def test_what_breaks_a_rule_is_named(stated: dict[str, Any], field: str, rule: str) -> None:
    with pytest.raises(InvalidPolicy) as refused:
        parse_policy(stated)
    assert refused.value.field == field
    assert rule in str(refused.value)


@pytest.mark.parametrize(
    ("before", "after", "empties"),
    [(1, 0, True), (20, 1, True), (1000, 1, True), (10, 1, False), (2, 1, False), (0, 0, False), (0, 3, False)],
)
def test_a_region_that_keeps_less_than_a_tenth_of_its_cells_is_emptied(before: int, after: int, empties: bool) -> None:
    assert bool(emptied_regions({"a": before}, {"a": after})) is empties


def test_regions_that_are_not_named_stay() -> None:
    assert emptied_regions({"a": 2, "b": 2, "c": 3}, {"c": 0, "b": 0}) == ("b", "c")


@pytest.mark.parametrize(("shares", "empties"), [({"a": 0.1}, False), ({"a": 0.09}, True), ({"b": 1.0}, True)])
def test_a_region_that_keeps_less_than_a_tenth_of_its_requests_is_emptied(
    shares: dict[str, float], empties: bool
) -> None:
    assert empties_origin(shares, "a") is empties


DEPLOYMENT, MODEL = ServedName("chat", "chat"), ServedName("llama", "chat")
TUNED = ServedName("tuned", "chat", "llama@2")


@pytest.mark.parametrize(
    ("new", "old", "said"),
    [
        (
            ServedName("chat", "b", "m@1"),
            DEPLOYMENT,
            "adapter chat of m@1, deployment b has the same name as deploym",
        ),
        (
            ServedName("chat", "chat", "m@1"),
            DEPLOYMENT,
            "adapter chat of m@1, deployment chat has the same name as d",
        ),
        (ServedName("llama", "b", "m@1"), MODEL, "has the same name as model llama of deployment chat; rename it"),
        (ServedName("tuned", "b", "m@1"), TUNED, "has the same name as adapter tuned of llama@2, deployment chat;"),
        (ServedName("tuned", "tuned"), TUNED, "deployment tuned has the same name as adapter tuned of llama@2, dep"),
        (ServedName("tuned", "b"), TUNED, "model tuned of deployment b has the same name as adapter tuned of llama@"),
    ],
)
def test_an_adapter_has_its_name_for_itself(new: ServedName, old: ServedName, said: str) -> None:
    assert said in name_collision([ServedName("fine", "b"), new], [ServedName("other", "c"), old])


def test_versions_of_one_deployment_share_adapters_and_deployments_share_models() -> None:
    assert name_collision([ServedName("tuned", "chat", "llama@3")], [TUNED, DEPLOYMENT, MODEL]) == ""
    assert name_collision([ServedName("llama", "other"), ServedName("other", "other")], [DEPLOYMENT, MODEL]) == ""


OBJECTIVE = Objective(availability=0.99, ttft_ms=1000.0, ttft_share=0.95)


def seen(errors: int = 0, slow: int = 0, **by_window: RequestCounts) -> dict[int, RequestCounts]:
    own = {int(name[1:]): what for name, what in by_window.items()}
    return {window: own.get(window, RequestCounts(1000, errors, slow)) for window in WINDOWS_S}


def test_a_rate_of_one_uses_up_the_budget_just_in_time() -> None:
    available, quick = burns(OBJECTIVE, seen(errors=10, slow=0))
    assert available.rates[3600] == pytest.approx(1.0)
    assert available.tone is Tone.OK
    assert quick.rates[3600] == 0.0


def test_fast_burn_in_both_windows_is_bad() -> None:
    available, _ = burns(OBJECTIVE, seen(errors=200))
    assert available.tone is Tone.BAD
    assert available.reason == "burns 20.0 times too fast over the last hour and still does"


def test_what_is_over_is_no_alarm() -> None:
    calm = RequestCounts(1000)
    available, _ = burns(OBJECTIVE, seen(errors=200, _300=calm, _1800=calm, _21600=calm))
    assert available.tone is Tone.OK


def test_late_first_tokens_burn_a_budget_of_their_own() -> None:
    _, quick = burns(OBJECTIVE, seen(slow=800))
    assert quick.tone is Tone.BAD
    assert quick.rates[300] == pytest.approx(16.0)


def test_without_requests_nothing_is_judged() -> None:
    available, quick = burns(OBJECTIVE, dict.fromkeys(WINDOWS_S, RequestCounts()))
    assert (available.tone, quick.tone, available.rates[300]) == (Tone.IDLE, Tone.IDLE, None)


def test_what_is_not_stated_comes_from_the_serving_class() -> None:
    assert parse_objective({"availability": 0.9}, ServingClass.BATCH) == Objective(0.9, 600_000.0, 0.95)


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({"uptime": 1}, "unknown objective 'uptime'; known: availability, ttft_ms, ttft_share"),
        ({"availability": 1.0}, "availability is 1.0; it must be a number from 0.5 to 0.99999"),
        ({"ttft_ms": True}, "ttft_ms is True; it must be a number from 1 to 3.6e\\+06"),
    ],
)
def test_a_bad_objective_is_named(stated: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidObjective, match=message):
        parse_objective(stated, ServingClass.REALTIME)
