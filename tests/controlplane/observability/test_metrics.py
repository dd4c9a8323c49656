"""Metrics for Prometheus: for permitted readers, and with names from the database only."""

import msgspec
import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from prometheus_client.parser import text_string_to_metric_families

from engine_agent.protocol.load_messages import Load, SpeculationLoad
from kernel import clock
from tests.controlplane.api.client import anonymous, bearer
from tests.controlplane.dashboard.fleets import one_more_of_everything
from tests.fleet import rows

pytestmark = pytest.mark.django_db


def samples(text: str) -> dict[str, float]:
    """`name{label=value,…}` -> value."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}"] = sample.value
    return found


def test_strangers_get_no_metrics() -> None:
    assert anonymous().get("/metrics").status_code == 401


def test_the_fleet_is_counted() -> None:
    rows.cell("c-1", rows.node("n-00000001"), rows.node("n-00000002", connected=False))
    metrics = samples(bearer("visitor").get("/metrics").content.decode())
    assert metrics["switchyard_cells{deployment=sim-70b,region=us-east-1,state=ready}"] == 1
    assert metrics["switchyard_cells_wanted{deployment=sim-70b,region=us-east-1}"] == 1
    assert metrics["switchyard_nodes{region=us-east-1,state=ready}"] == 2
    assert metrics["switchyard_nodes_connected{region=us-east-1}"] == 1
    assert metrics["switchyard_agents_listened{}"] == 0


def test_what_cells_guess_and_accept_is_told_by_version() -> None:
    load = msgspec.to_builtins(Load(speculation=SpeculationLoad(3600.0, 500, 1000, 700)))
    rows.cell("c-1", rows.node("n-00000001", report={"load": load, "last_seen_at": clock.now()}))
    metrics = samples(bearer("visitor").get("/metrics").content.decode())
    place = "deployment=sim-70b,model_version=sim-70b@1,region=us-east-1"
    told = [
        metrics[f"switchyard_speculation_tokens{{{place},what={what}}}"] for what in ("drafts", "guessed", "accepted")
    ]
    assert told == [500, 1000, 700]


def test_requests_are_counted_by_surface_and_status() -> None:
    name = "switchyard_http_requests_total{method=GET,status=404,surface=api}"
    client = bearer()
    before = samples(client.get("/metrics").content.decode()).get(name, 0)
    client.get("/api/v1/nodes/n-00000009")
    assert samples(client.get("/metrics").content.decode())[name] == before + 1


def test_a_larger_fleet_takes_no_more_queries() -> None:
    client = bearer()

    def queries() -> int:
        with CaptureQueriesContext(connection) as captured:
            assert client.get("/metrics").status_code == 200
        return len(captured)

    one_more_of_everything(0)
    few = queries()
    for number in range(1, 4):
        one_more_of_everything(number)
    assert queries() == few
