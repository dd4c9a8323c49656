"""Update policies from outside: what is filled in, and what is refused by name."""

from typing import Any

import pytest

from fleet.planning.policy import GatePolicy, InvalidPolicy, UpdatePolicy, UpdateStrategy, parse_policy, policy_as_json


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
        ({"strategy": "surge"}, "surge", "needs at least 1 cell"),
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
