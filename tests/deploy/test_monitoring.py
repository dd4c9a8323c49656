"""The dashboard and the alert rules name only metrics that the code exposes, and those who load them can read them."""

import json
import re
from pathlib import Path

import pytest
import yaml
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from controlplane.observability.fleet import FleetGauges
from engine_agent.cell_proxy.exposition import exposition
from engine_agent.node.telemetry.exposition import agent_exposition
from kernel.metrics import OURS
from tests.engine_agent.node.telemetry.test_exposition import INGRESS_REPORT, REPORT

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
NAME = re.compile(r"\bswitchyard_\w+")
OF_AGENTS = ("switchyard_proxy_", "switchyard_node_", "switchyard_ingress_")
SERIES = {"counter": ("_total",), "histogram": ("_bucket", "_count", "_sum"), "gauge": ("",)}


def series(families: list[Metric]) -> set[str]:
    return {family.name + ending for family in families for ending in SERIES[family.type]}


def read(text: str) -> set[str]:
    return series(list(text_string_to_metric_families(text)))


@pytest.fixture
def exposed(db: None) -> set[str]:
    """Every series of web and workers, agents, ingresses and cell proxies."""
    registry = CollectorRegistry()
    registry.register(FleetGauges())
    standing = series(list(registry.collect()))
    agents = agent_exposition("n-1", True, REPORT) + agent_exposition("i-1", True, INGRESS_REPORT)
    source = Path(exposition.__code__.co_filename).read_text()
    proxy = {f"switchyard_proxy_{name}{ending}" for name, ending in proxy_families(source)}
    return series(list(OURS.collect())) | standing | read(agents) | proxy


def proxy_families(source: str) -> list[tuple[str, str]]:
    """(name, ending) of what the cell proxy's formatter names."""
    found = re.findall(r'_(?:by_class|single|family)\("(\w+)", "(\w+)"', source)
    return [
        (name.removesuffix("_total") if kind == "counter" else name, ending)
        for name, kind in found
        for ending in SERIES[kind]
    ]


def expressions() -> list[str]:
    dashboard = json.loads((DEPLOY / "grafana/switchyard.json").read_text())
    shown = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    rules = yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text())
    return shown + [rule["expr"] for group in rules["groups"] for rule in group["rules"]]


def test_every_metric_that_is_asked_for_is_exposed(exposed: set[str]) -> None:
    asked = {name for expression in expressions() for name in NAME.findall(expression)}
    assert len(asked) > 25
    assert asked <= exposed


def test_every_metric_of_web_is_shown_or_watched(exposed: set[str]) -> None:
    asked = " ".join(expressions())
    ours = {
        name
        for name in exposed
        if not name.startswith(("switchyard_proxy_", "switchyard_node_", "switchyard_ingress_"))
    }
    forgotten = {name for name in ours if not name.endswith(("_count", "_sum", "_head")) and name not in asked}
    assert forgotten == set()


def test_brackets_of_every_expression_match() -> None:
    for expression in expressions():
        for opening, closing in ("()", "[]", "{}"):
            assert expression.count(opening) == expression.count(closing), expression


def test_rules_say_how_bad_it_is_and_what_it_is() -> None:
    rules = yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text())
    for rule in (rule for group in rules["groups"] for rule in group["rules"]):
        assert rule["labels"]["severity"] in {"page", "ticket"}
        assert rule["annotations"]["summary"]


def test_the_example_loads_the_rules() -> None:
    example = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())
    assert all((DEPLOY / "prometheus" / name).is_file() for name in example["rule_files"])


def test_panels_have_numbers_of_their_own_and_fit_the_grid() -> None:
    panels = json.loads((DEPLOY / "grafana/switchyard.json").read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in panels)
