"""Publication of tables, and the drain that needs no cycle between fleet and traffic."""

import pytest

from engine_agent.protocol.codec import decode_down, encode
from fleet.models import Cell
from fleet.planning.states import CellState
from tests.fleet import rows
from tests.fleet.rows import NOW
from traffic.models import IngressReport, RoutingTable
from traffic.selectors.routing import latest_tables, table_message
from traffic.services.ingress import ingress_create
from traffic.services.routing import drained_cells_mark, tables_publish

pytestmark = pytest.mark.django_db


def ingress(region: str, port: int, *, revision: int, connected: bool = True) -> None:
    row = ingress_create(region=rows.region(region), address="127.0.0.1", port=port, now=NOW)
    IngressReport.objects.update_or_create(ingress=row, defaults={"connected": connected, "revision": revision})


def test_a_table_is_published_once_per_change() -> None:
    ingress("us-east-1", 8080, revision=0)
    rows.cell("c1", rows.node("n-a"))
    assert tables_publish(now=NOW) == ["us-east-1"]
    assert tables_publish(now=NOW) == []
    Cell.objects.filter(id="c1").update(state=CellState.FAILED)
    assert tables_publish(now=NOW) == ["us-east-1"]
    assert [t.revision for t in RoutingTable.objects.order_by("revision")] == [1, 2]
    assert RoutingTable.objects.get(revision=2).reason == "-c1; sim-70b -> nobody can serve"


def test_a_stored_table_survives_the_wire() -> None:
    ingress("us-east-1", 8080, revision=0)
    node = rows.node("n-a")
    rows.cell("c1", node)
    tables_publish(now=NOW)
    message = table_message(latest_tables()["us-east-1"])
    assert decode_down(encode(message)) == message
    (pool,) = message.pools
    assert (pool.cells[0].port, pool.cells[0].agent_check_port) == (node.port_base, node.port_base + 1)


def test_a_cell_is_unrouted_only_when_every_connected_ingress_has_acknowledged() -> None:
    ingress("us-east-1", 8080, revision=1)
    ingress("us-west-2", 8081, revision=1)
    rows.cell("c1", rows.node("n-a"))
    tables_publish(now=NOW)
    Cell.objects.filter(id="c1").update(state=CellState.DRAINING)
    tables_publish(now=NOW)
    assert drained_cells_mark(now=NOW) == []
    IngressReport.objects.filter(ingress_id="i-us-east-1").update(revision=2)
    assert drained_cells_mark(now=NOW) == []
    IngressReport.objects.filter(ingress_id="i-us-west-2").update(revision=2)
    assert drained_cells_mark(now=NOW) == ["c1"]
    assert Cell.objects.get(id="c1").unrouted_at == NOW


def test_an_ingress_that_is_away_holds_up_no_drain() -> None:
    ingress("us-east-1", 8080, revision=2)
    ingress("us-west-2", 8081, revision=0, connected=False)
    rows.cell("c1", rows.node("n-a"))
    tables_publish(now=NOW)
    Cell.objects.filter(id="c1").update(state=CellState.DRAINING)
    tables_publish(now=NOW)
    assert drained_cells_mark(now=NOW) == ["c1"]


def test_a_cell_that_a_table_still_routes_is_not_unrouted() -> None:
    ingress("us-east-1", 8080, revision=1)
    rows.cell("c1", rows.node("n-a"))
    tables_publish(now=NOW)
    Cell.objects.filter(id="c1").update(state=CellState.DRAINING)
    assert drained_cells_mark(now=NOW) == []
