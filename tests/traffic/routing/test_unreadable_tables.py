"""An unreadable stored table opens an incident for its region only. Tables that earlier releases stored can be read."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fleet.cells.models import Cell
from fleet.faults.models import Incident
from fleet.reconcile.planning.states import CellState
from tests.fleet import rows
from tests.fleet.rows import NOW
from traffic.async_requests.selectors import deployments_of_model
from traffic.region_shares.models import TrafficMatrix, TrafficRule
from traffic.region_shares.services.autopilot import autopilot_run
from traffic.routing.models import RoutingTable
from traffic.routing.selectors import (
    RoutingCache,
    UnreadableTable,
    ingresses_waiting,
    latest_tables,
    routed_cells,
    table_message,
)
from traffic.routing.services.ingresses import ingress_create
from traffic.routing.services.tables import BAD_STEERING, UNREADABLE, drained_cells_mark, tables_publish

pytestmark = pytest.mark.django_db

STORED = sorted((Path(__file__).parent / "tables").glob("*.json"))


def without_generation(body: dict[str, Any]) -> None:
    del body["pools"][0]["cells"][0]["generation"]


def of_another_type(body: dict[str, Any]) -> None:
    body["pools"] = {"a": "b"}


def without_pools(body: dict[str, Any]) -> None:
    del body["pools"]


def with_a_bad_split(body: dict[str, Any]) -> None:
    body["splits"] = [1]


@pytest.fixture
def regions() -> None:
    for number, region in enumerate(("us-east-1", "us-west-2")):
        ingress_create(region=rows.region(region), address="127.0.0.1", port=8080 + number, now=NOW)
    rows.cell("c1", rows.node("n-a"))
    assert set(tables_publish(now=NOW)) == {"us-east-1", "us-west-2"}


def spoil(how: Callable[[dict[str, Any]], None]) -> None:
    table = latest_tables()["us-east-1"]
    how(table.body)
    RoutingTable.objects.filter(pk=table.pk).update(body=table.body)


@pytest.mark.usefixtures("regions")
@pytest.mark.parametrize("how", [without_generation, of_another_type, without_pools, with_a_bad_split])
def test_another_table_takes_its_place_and_other_regions_go_on(how: Callable[[dict[str, Any]], None]) -> None:
    spoil(how)
    Cell.objects.filter(id="c1").update(generation=7)
    assert "us-east-1" in tables_publish(now=NOW)
    incident = Incident.objects.get(kind=UNREADABLE)
    assert (incident.region, incident.resolution) == ("us-east-1", "a new table replaced it")
    assert "us-east-1 revision 1 cannot be read" in incident.summary
    assert routed_cells(table_message(latest_tables()["us-east-1"])) == {"c1"}
    assert tables_publish(now=NOW) == []


@pytest.mark.usefixtures("regions")
def test_until_then_readers_of_tables_continue() -> None:
    spoil(without_generation)
    Cell.objects.filter(id="c1").update(state=CellState.DRAINING)
    assert RoutingCache().tables_in_force()["us-east-1"].routed == {"c1"}, (
        "it counts as routing to every cell of its region"
    )
    assert drained_cells_mark(now=NOW) == []
    assert deployments_of_model("us-east-1", "sim-70b") is None
    assert deployments_of_model("us-west-2", "sim-70b") is not None
    assert isinstance(ingresses_waiting(), tuple)


@pytest.mark.usefixtures("regions")
def test_the_reader_names_the_table_and_the_place() -> None:
    spoil(without_generation)
    with pytest.raises(UnreadableTable, match=r"us-east-1 revision 1 cannot be read: .*generation.*pools"):
        table_message(latest_tables()["us-east-1"])


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.stem)
def test_a_table_that_an_earlier_version_stored_can_be_read(path: Path) -> None:
    """Add a file when the shape of tables changes; never change one."""
    table = RoutingTable(region=rows.region("us-east-1"), revision=3, body=json.loads(path.read_text()))
    assert routed_cells(table_message(table)) == {"c1"}
    assert table.region_id == "us-east-1"


@pytest.mark.usefixtures("regions")
def test_what_is_stored_today_is_of_a_shape_that_is_kept() -> None:
    today = {key for pool in latest_tables()["us-east-1"].body["pools"] for key in pool}
    kept = {key for path in STORED for pool in json.loads(path.read_text())["pools"] for key in pool}
    assert today <= kept, f"store a table with {today - kept} in tests/traffic/routing/tables"


def bad_policy(deployment: str) -> None:
    TrafficRule.objects.create(deployment_id=deployment, stated={"cost": [1]}, actor="ada", changed_at=NOW)


def bad_shares(deployment: str) -> None:
    TrafficMatrix.objects.create(deployment_id=deployment, shares={"us-west-2": {"us-east-1": "half"}}, looked_at=NOW)


@pytest.mark.usefixtures("regions")
@pytest.mark.parametrize("spoil_row", [bad_policy, bad_shares])
def test_a_bad_policy_or_bad_shares_cost_their_own_deployment_an_incident(spoil_row: Callable[[str], None]) -> None:
    before = table_message(latest_tables()["us-west-2"]).pools
    spoil_row("sim-70b")
    Cell.objects.filter(id="c1").update(generation=7)
    assert tables_publish(now=NOW) == ["us-east-1"]
    assert table_message(latest_tables()["us-west-2"]).pools == before, "shares are kept"
    incident = Incident.objects.get(kind=BAD_STEERING)
    assert (incident.deployment, incident.state) == ("sim-70b", "open")
    autopilot_run(now=NOW)
    TrafficRule.objects.all().delete()
    TrafficMatrix.objects.all().delete()
    tables_publish(now=NOW)
    assert not Incident.objects.filter(kind=BAD_STEERING, state="open").exists()
