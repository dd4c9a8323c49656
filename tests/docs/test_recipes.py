"""Checks the steps of the recipes in CONTRIBUTING.md that no other test checks."""

import re

from engine_agent.engines.registry import ADAPTERS
from engine_agent.protocol.signatures import FaultSignature
from fleet.clouds.base import PROVIDERS
from fleet.faults.planning.views import SETTABLE_RULES, IncidentKind
from models_registry.versions.planning.engine_arguments import ENGINES
from models_registry.versions.planning.speculation import METHODS_OF_ENGINE
from tests.docs.pages import ROOT, text_of

RECIPES = (
    "A new accelerator", "A new fault rule", "A new routing rule", "A new provider", "A new engine",
    "A new API resource", "A new setting of deployments", "A new dashboard page", "A new field of an agent's report",
)  # fmt: skip


def python_under(folder: str) -> str:
    return "\n".join(text_of(path) for path in sorted((ROOT / folder).rglob("*.py")))


def words_under(folder: str) -> str:
    return "\n".join(text_of(path) for path in sorted((ROOT / folder).rglob("*.md")))


def test_every_recipe_is_there() -> None:
    assert not [recipe for recipe in RECIPES if f"\n### {recipe}\n" not in text_of("CONTRIBUTING.md")]


def test_agents_and_versions_know_the_same_engines() -> None:
    assert set(ADAPTERS) == set(ENGINES) == set(METHODS_OF_ENGINE), (
        "an engine is in engine_agent/engines/registry.py, in ENGINES of "
        "models_registry/versions/planning/engine_arguments.py "
        "and in METHODS_OF_ENGINE of models_registry/versions/planning/speculation.py"
    )


def test_some_agent_sees_every_signature() -> None:
    readers = python_under("engine_agent/node")
    missing = [signature for signature in FaultSignature if f"FaultSignature.{signature.name}" not in readers]
    assert not missing, f"no reader in engine_agent/node reports {missing}"


def test_every_kind_of_incident_has_a_runbook() -> None:
    runbooks = words_under("docs/runbooks")
    missing = [str(kind) for kind in IncidentKind if f"`{kind}`" not in runbooks]
    assert not missing, f"say in a runbook what to do about {missing}"


def test_every_fault_rule_is_followed_by_a_planner() -> None:
    planners = python_under("fleet/faults/planning")
    missing = [rule for rule in SETTABLE_RULES if not re.search(rf"Rule\.{rule.upper()}\b", planners)]
    assert SETTABLE_RULES
    assert not missing, f"no planner in fleet/faults/planning acts by {missing}"


def test_every_provider_is_described() -> None:
    missing = [name for name in PROVIDERS if f"`{name}`" not in words_under("docs/operate")]
    assert PROVIDERS
    assert not missing, f"say in docs/operate what these providers do: {missing}"
