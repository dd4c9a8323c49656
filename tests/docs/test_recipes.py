"""What the recipes of CONTRIBUTING.md ask for and no other test would miss."""

import re

import pytest

from controlplane.api.urls import router
from controlplane.cli.resources import RESOURCES
from engine_agent.engines.registry import ADAPTERS
from engine_agent.protocol.signatures import FaultSignature
from fleet.planning.fault_rules import SETTABLE_RULES, IncidentKind
from fleet.providers import PROVIDERS
from models_registry.planning.engine_arguments import ENGINES
from models_registry.planning.instance_types import INSTANCE_TYPES
from models_registry.planning.speculation import METHODS_OF_ENGINE
from tests.docs.pages import ROOT, text_of
from traffic.api.traffic_policy import TrafficPolicyChangeSerializer, TrafficPolicySerializer
from traffic.planning.traffic_policy import TrafficPolicy

NOT_IN_THE_CLI = {"apply", "plan", "me", "audit", "key-rings", "approval-rules", "webhook-deliveries"}
"""Verbs of their own, or read on pages."""
RECIPES = (
    "A new accelerator", "A new fault rule", "A new routing rule", "A new provider", "A new engine",
    "A new API resource", "A new dashboard page", "A new field of an agent's report",
)  # fmt: skip


def python_under(folder: str) -> str:
    return "\n".join(text_of(path) for path in sorted((ROOT / folder).rglob("*.py")))


def words_under(folder: str) -> str:
    return "\n".join(text_of(path) for path in sorted((ROOT / folder).rglob("*.md")))


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_recipe_is_there(recipe: str) -> None:
    assert f"\n### {recipe}\n" in text_of("CONTRIBUTING.md")


def test_agents_and_versions_know_the_same_engines() -> None:
    assert set(ADAPTERS) == set(ENGINES) == set(METHODS_OF_ENGINE), (
        "an engine is in engine_agent/engines/registry.py, in ENGINES of models_registry/planning/engine_arguments.py "
        "and in METHODS_OF_ENGINE of models_registry/planning/speculation.py"
    )


@pytest.mark.parametrize("signature", FaultSignature)
def test_some_agent_sees_every_signature(signature: FaultSignature) -> None:
    assert f"FaultSignature.{signature.name}" in python_under("engine_agent/telemetry"), (
        f"no reader in engine_agent/telemetry reports {signature}"
    )


@pytest.mark.parametrize("kind", IncidentKind)
def test_every_kind_of_incident_has_a_runbook(kind: IncidentKind) -> None:
    assert f"`{kind}`" in words_under("docs/runbooks"), f"say in a runbook what to do about `{kind}`"


@pytest.mark.parametrize("rule", SETTABLE_RULES)
def test_every_fault_rule_is_followed_by_a_planner(rule: str) -> None:
    assert re.search(rf"Rule\.{rule.upper()}\b", python_under("fleet/planning/faults")), (
        f"no planner in fleet/planning/faults acts by {rule}"
    )


@pytest.mark.parametrize("field", TrafficPolicy.__struct_fields__)
def test_every_part_of_a_traffic_policy_is_in_the_api(field: str) -> None:
    shown, changed = TrafficPolicySerializer().fields, TrafficPolicyChangeSerializer().fields
    assert field in shown, f"show {field} in TrafficPolicySerializer"
    assert field in changed, f"let {field} be changed in TrafficPolicyChangeSerializer"


@pytest.mark.parametrize("name", PROVIDERS)
def test_every_provider_is_described(name: str) -> None:
    assert f"`{name}`" in text_of("docs/operations.md"), f"say in docs/operations.md what the provider {name} does"


def test_the_command_line_knows_every_resource() -> None:
    there = {prefix for prefix, _, _ in router.registry} - NOT_IN_THE_CLI
    assert {resource.path for resource in RESOURCES} == there, "give each list a row in controlplane/cli/resources.py"


@pytest.mark.parametrize("name", INSTANCE_TYPES)
def test_every_instance_type_says_what_it_is(name: str) -> None:
    shape = INSTANCE_TYPES[name]
    assert shape.accelerator, f"{name} names no accelerator"
    assert min(shape.cores, shape.memory_gib, shape.tensor_parallel_degree) > 0, (
        f"{name}: state cores, memory and degree in models_registry/planning/instance_types.py"
    )
