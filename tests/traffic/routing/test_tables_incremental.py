"""A publisher that reads only changed rows publishes the same tables as one that reads all."""

import random
from collections.abc import Callable
from datetime import timedelta

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from engine_agent.protocol.states import ServingClass
from fleet.cells.models import Cell, CellMember
from fleet.deployments.models import Deployment
from fleet.nodes.models import Node
from fleet.reconcile.planning.states import CellState
from fleet.reconcile.selectors.snapshot import LISTENING_LEASE
from kernel.leases import lease_take
from models_registry.versions.models import ModelVersion
from tests.fleet import rows
from tests.fleet.rows import NOW
from tests.kernel.servers_away import statement_breaks_off
from traffic.keys.models import KeyPolicy
from traffic.region_shares.models import TrafficMatrix, TrafficOverride
from traffic.region_shares.planning.policy import EvacuationMode, OverrideKind
from traffic.routing.models import Ingress, IngressReport, RoutingTable
from traffic.routing.selectors import RoutingCache, latest_revisions
from traffic.routing.services.ingresses import ingress_create
from traffic.routing.services.tables import drained_cells_mark, tables_publish

pytestmark = pytest.mark.django_db(transaction=True)  # in one transaction every row would be of the newest

REGIONS = ("us-east-1", "us-west-2")
CELLS = 5


@pytest.fixture(autouse=True)
def fleet() -> None:
    for number, region in enumerate(REGIONS):
        ingress_create(region=rows.region(region), address="127.0.0.1", port=8080 + number, now=NOW)
    for number in range(CELLS):
        rows.cell(f"c{number}", rows.node(f"n-{number}a"), rows.node(f"n-{number}b"))


def _cell(chance: random.Random) -> str:
    return f"c{chance.randrange(CELLS)}"


def _move(chance: random.Random) -> None:
    Cell.objects.filter(id=_cell(chance)).update(state=chance.choice(list(CellState)))


def _start_again(chance: random.Random) -> None:
    Cell.objects.filter(id=_cell(chance)).update(state=CellState.READY, generation=chance.randrange(100))


def _replace_leader(chance: random.Random) -> None:
    CellMember.objects.filter(cell=_cell(chance), rank=0).delete()


def _give_address(chance: random.Random) -> None:
    Node.objects.filter(id=f"n-{chance.randrange(CELLS)}a").update(address=f"10.0.0.{chance.randrange(250)}")


def _test_anew(chance: random.Random) -> None:
    ModelVersion.objects.update(max_concurrency=chance.randrange(1, 99))


def _share(chance: random.Random) -> None:
    east = chance.choice([0.25, 0.5, 1.0])
    shares = {"us-east-1": {"us-east-1": east, "us-west-2": 1.0 - east}}
    TrafficMatrix.objects.update_or_create(deployment_id="sim-70b", defaults={"shares": shares, "revision": 1})


def _spoil_the_table(chance: random.Random) -> None:
    """Writes a table as another release may."""
    region = chance.choice(REGIONS)
    revision = latest_revisions().get(region, 0) + 1
    RoutingTable.objects.create(region_id=region, revision=revision, body={"pools": [1]}, reason="", created_at=NOW)


def _require_keys(chance: random.Random) -> None:
    version = chance.randrange(1, 1000)
    KeyPolicy.objects.update_or_create(pk=1, defaults={"version": version, "required": chance.random() < 0.5})


def _move_an_ingress(chance: random.Random) -> None:
    Ingress.objects.filter(id=f"i-{chance.choice(REGIONS)}").update(port=chance.randrange(1024, 65536))


def _serve_otherwise(chance: random.Random) -> None:
    Deployment.objects.update(serving_class=chance.choice(list(ServingClass)))


def _evacuate(chance: random.Random) -> None:
    TrafficOverride.objects.update(ended_at=NOW)
    TrafficOverride.objects.create(
        kind=OverrideKind.EVACUATION, region_id=chance.choice(REGIONS), mode=EvacuationMode.REAL,
        why="a drill", actor="test", created_at=NOW, expires_at=NOW + timedelta(hours=1),
    )  # fmt: skip


def _another_publishes(chance: random.Random) -> None:
    _move(chance)
    tables_publish(now=NOW)


CHANGES: list[Callable[[random.Random], None]] = [
    *(_move, _start_again, _replace_leader, _give_address, _test_anew, _share, _spoil_the_table, _another_publishes),
    *(_require_keys, _move_an_ingress, _serve_otherwise, _evacuate),
]


@pytest.mark.slow
def test_nothing_is_left_to_publish_after_a_pass_over_what_has_changed() -> None:
    chance, cache = random.Random(7), RoutingCache()
    for first in range(3 * len(CHANGES)):
        made = [CHANGES[first % len(CHANGES)], *chance.choices(CHANGES, k=chance.randrange(2))]
        for change in made:
            change(chance)
        _make_pass(cache)
        assert tables_publish(now=NOW) == [], f"after {[change.__name__ for change in made]}"
        assert tables_publish(now=NOW, cache=cache) == []
        for _ in range(chance.randrange(4)):
            _make_pass(cache)


def _make_pass(cache: RoutingCache) -> None:
    """As the loop of the publisher."""
    if not cache.is_at_rest() and not tables_publish(now=NOW, cache=cache):
        cache.rest()


def test_the_publisher_rests_with_one_query_until_something_is_written() -> None:
    cache = RoutingCache()
    for _ in range(3):
        _make_pass(cache)
    with CaptureQueriesContext(connection) as queries:
        assert cache.is_at_rest()
    assert len(queries) == 1
    Cell.objects.filter(id="c0").update(state=CellState.DRAINING)
    assert not cache.is_at_rest()
    for _ in range(3):
        _make_pass(cache)
    assert not cache.is_at_rest(), "time may end a drain, so the publisher does not rest"


def test_a_pass_that_breaks_off_in_the_middle_loses_nothing() -> None:
    cache = RoutingCache()
    tables_publish(now=NOW, cache=cache)
    Cell.objects.filter(id="c0").update(state=CellState.FAILED)

    with statement_breaks_off("models_registry_modelversion"):
        tables_publish(now=NOW, cache=cache)
    assert tables_publish(now=NOW, cache=cache) == ["us-east-1"]


def test_a_drained_cell_is_judged_by_the_newest_tables() -> None:
    for moment in (NOW - timedelta(minutes=1), NOW):
        lease_take(name=LISTENING_LEASE, holder="web", ttl_s=90, now=moment)
    cache = RoutingCache()
    tables_publish(now=NOW, cache=cache)
    Cell.objects.filter(id="c0").update(state=CellState.DRAINING)
    assert drained_cells_mark(now=NOW, cache=cache) == [], "the tables send it requests"
    tables_publish(now=NOW)
    for region, revision in latest_revisions().items():
        IngressReport.objects.create(ingress_id=f"i-{region}", connected=True, revision=revision, last_seen_at=NOW)
    assert drained_cells_mark(now=NOW, cache=cache) == ["c0"]
