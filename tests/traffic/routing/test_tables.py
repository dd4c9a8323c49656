"""Publication of tables, and drained cells."""

from datetime import datetime, timedelta

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from engine_agent.protocol.codec import decode_down, encode
from engine_agent.protocol.ingress_messages import Affinity
from fleet.cells.models import Cell
from fleet.reconcile.planning.states import CellState
from fleet.reconcile.selectors.snapshot import LISTENING_LEASE
from fleet.regions.services import region_change
from kernel.leases import lease_take
from tests.fleet import rows
from tests.fleet.rows import NOW
from traffic.region_shares.services.overrides import traffic_policy_change
from traffic.routing.models import IngressReport, RoutingTable
from traffic.routing.planning.tables import RoutableCell
from traffic.routing.selectors import RoutingCache, latest_tables, table_message
from traffic.routing.services.ingresses import ingress_create
from traffic.routing.services.tables import TABLES_KEPT, drained_cells_mark, tables_publish

pytestmark = pytest.mark.django_db


def ingress(region: str, port: int, *, revision: int, last_seen_at: datetime | None = NOW) -> None:
    row = ingress_create(region=rows.region(region), address="127.0.0.1", port=port, now=NOW)
    report = {"connected": True, "revision": revision, "last_seen_at": last_seen_at}
    IngressReport.objects.update_or_create(ingress=row, defaults=report)


@pytest.fixture
def listening() -> None:
    """The consumer of agents has run for a while."""
    for moment in (NOW - timedelta(minutes=1), NOW):
        lease_take(name=LISTENING_LEASE, holder="web", ttl_s=90, now=moment)


def test_a_table_is_published_once_per_change() -> None:
    ingress("us-east-1", 8080, revision=0)
    rows.cell("c1", rows.node("n-a"))
    assert tables_publish(now=NOW) == ["us-east-1"]
    assert tables_publish(now=NOW) == []
    Cell.objects.filter(id="c1").update(state=CellState.FAILED)
    assert tables_publish(now=NOW) == ["us-east-1"]
    assert [t.revision for t in RoutingTable.objects.order_by("revision")] == [1, 2]
    assert RoutingTable.objects.get(revision=2).reason == "-c1; sim-70b -> no region can serve"


def test_a_stored_table_survives_the_wire() -> None:
    ingress("us-east-1", 8080, revision=0)
    node = rows.node("n-a")
    rows.cell("c1", node)
    tables_publish(now=NOW)
    message = table_message(latest_tables()["us-east-1"])
    assert decode_down(encode(message)) == message
    (pool,) = message.pools
    assert (pool.cells[0].port, pool.cells[0].node) == (node.port(0), "n-a")


@pytest.mark.usefixtures("listening")
def test_a_cell_is_unrouted_only_when_every_ingress_has_acknowledged() -> None:
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


@pytest.mark.usefixtures("listening")
def test_an_ingress_that_is_dead_holds_up_no_drain() -> None:
    ingress("us-east-1", 8080, revision=2)
    ingress("us-west-2", 8081, revision=0, last_seen_at=NOW - timedelta(seconds=30))
    rows.cell("c1", rows.node("n-a"))
    tables_publish(now=NOW)
    Cell.objects.filter(id="c1").update(state=CellState.DRAINING)
    tables_publish(now=NOW)
    assert drained_cells_mark(now=NOW) == ["c1"]


@pytest.mark.usefixtures("listening")
def test_a_cell_that_a_table_still_routes_is_not_unrouted() -> None:
    ingress("us-east-1", 8080, revision=1)
    rows.cell("c1", rows.node("n-a"))
    tables_publish(now=NOW)
    Cell.objects.filter(id="c1").update(state=CellState.DRAINING)
    assert drained_cells_mark(now=NOW) == []


def test_nothing_is_marked_while_no_process_listens_to_ingresses() -> None:
    ingress("us-east-1", 8080, revision=1)
    rows.cell("c1", rows.node("n-a"), state=CellState.DRAINING)
    tables_publish(now=NOW)
    assert drained_cells_mark(now=NOW) == []


def test_a_table_planned_from_an_older_look_never_replaces_a_newer_one() -> None:
    """Another worker publishes after this one has read the cells."""
    ingress("us-east-1", 8080, revision=0)
    rows.cell("c1", rows.node("n-a"))

    class Overtaken(RoutingCache):
        def routable_cells(self) -> list[RoutableCell]:
            cells = super().routable_cells()
            Cell.objects.filter(id="c1").update(state=CellState.FAILED)
            assert tables_publish(now=NOW) == ["us-east-1"]
            return cells

    assert tables_publish(now=NOW, cache=Overtaken()) == []
    assert latest_tables()["us-east-1"].body["pools"][0]["cells"] == []


def test_only_the_newest_revisions_are_kept() -> None:
    region = rows.region()
    old = [
        RoutingTable(region=region, revision=n, body={"pools": []}, reason="", created_at=NOW) for n in range(1, 202)
    ]
    RoutingTable.objects.bulk_create(old)
    rows.cell("c1", rows.node("n-a"))
    tables_publish(now=NOW)
    kept = RoutingTable.objects.order_by("revision").values_list("revision", flat=True)
    assert (kept[0], len(kept)) == (202 - TABLES_KEPT + 1, TABLES_KEPT)


@pytest.mark.usefixtures("listening")
def test_a_pass_over_thirty_cells_asks_as_often_as_one_over_five() -> None:
    ingress("us-east-1", 8080, revision=0)
    query_counts = []
    for count in (5, 25):
        for index in range(count):
            rows.cell(f"c{count}-{index}", rows.node(f"n-{count}-{index}"))
        tables_publish(now=NOW)
        with CaptureQueriesContext(connection) as captured:
            assert tables_publish(now=NOW) == []
        query_counts.append(len(captured))
    assert query_counts[0] == query_counts[1] <= 15


def test_a_region_that_serves_grpc_says_so_in_its_next_table() -> None:
    rows.deployment()
    rows.region("us-west-2")
    tables_publish(now=NOW)
    region_change(name="us-west-2", columns={"grpc": True}, actor="ada", now=NOW)
    assert tables_publish(now=NOW) == ["us-west-2"]
    assert {region: table_message(table).grpc for region, table in latest_tables().items()} == {
        "us-east-1": False,
        "us-west-2": True,
    }
    assert latest_tables()["us-west-2"].reason == "gRPC on"
    assert tables_publish(now=NOW) == []


def test_a_policy_of_splits_and_prefixes_is_in_the_next_table() -> None:
    rows.deployment()
    rows.region("us-west-2")
    tables_publish(now=NOW)
    stated = {"load_bound": 1.5, "split": {"sim-70b": 1}, "split_sticky": False}
    traffic_policy_change(deployment="sim-70b", stated=stated, actor="ada", now=NOW)
    assert tables_publish(now=NOW)
    message = table_message(latest_tables()["us-east-1"])
    assert message.pools[0].affinity == Affinity(1.5)
    assert {split.model: split.shares for split in message.splits}["sim-70b"] == {"sim-70b": 1}
    assert tables_publish(now=NOW) == []


def test_cells_whose_versions_answer_alike_are_named_alike() -> None:
    ingress("us-east-1", 8080, revision=0)
    rows.deployment(nodes=1)
    rows.cell("c1", rows.node("n-a"))
    others = [
        rows.version("larger", nodes=1, max_concurrency=99),
        rows.version("longer", nodes=1, context_length=9999),
        rows.version("draft", nodes=1, state="draft"),
    ]
    for number, other in enumerate(others, start=2):
        rows.cell(f"c{number}", rows.node(f"n-{number}"), model_version=other)
    tables_publish(now=NOW)
    (pool,) = table_message(latest_tables()["us-east-1"]).pools
    first, larger, longer, draft = (cell.version for cell in pool.cells)
    assert first == larger
    assert len({first, longer, draft}) == 3


def test_a_table_names_the_cells_of_the_version_that_has_an_adapter_until_all_are_of_it() -> None:
    ingress("us-east-1", 8080, revision=0)
    rows.deployment(nodes=1)
    tuned = rows.version("2", nodes=1, adapters=[{"name": "acme/tuned"}])
    rows.cell("c1", rows.node("n-a"))
    rows.cell("c2", rows.node("n-b"), model_version=tuned, generation=3)
    cache = RoutingCache()
    for wanted in (("c2-g3",), None):
        tables_publish(now=NOW, cache=cache)
        (pool,) = table_message(latest_tables()["us-east-1"]).pools
        (adapter,) = pool.adapters
        assert (adapter.name, adapter.parent, adapter.cells) == ("acme/tuned", "sim-70b", wanted)
        Cell.objects.filter(id="c1").update(model_version=tuned)
