"""Deliveries to a running cluster of Valkey: slots on several nodes, slots that move, and a node that is away."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from redis.crc import key_slot

from tests.fleet.rows import NOW
from tests.traffic.batch_sinks.servers import Server, answered, ended_batch, valkey_cluster
from tests.traffic.rows import jsonl, serving_fleet
from traffic.batch_sinks.models import BatchDelivery
from traffic.batch_sinks.planner import SinkSettings
from traffic.batch_sinks.services.deliveries import deliveries_claim, delivery_work
from traffic.batch_sinks.services.sinks import batch_sink_create
from traffic.batches.models import Batch

pytestmark = [pytest.mark.processes, pytest.mark.long, pytest.mark.django_db]
SETTINGS = SinkSettings(chunk_lines=7, timeout_s=2.0)
LINES = 40


@pytest.fixture
def nodes(settings: Any, tmp_path: Path) -> Iterator[list[Server]]:
    settings.FILES = str(tmp_path / "files")
    settings.WEBHOOK_NETWORKS = ["127.0.0.0/8"]
    serving_fleet()
    (tmp_path / "cluster").mkdir()
    with valkey_cluster(tmp_path / "cluster") as servers:
        yield servers


def deliver() -> BatchDelivery:
    Batch.objects.all().delete()
    ended_batch("answers", output=jsonl(*(answered(number) for number in range(LINES))))
    (leased,) = deliveries_claim(count=1, now=NOW, settings=SETTINGS)
    delivery_work(leased, settings=SETTINGS, clock_now=lambda: NOW)
    return BatchDelivery.objects.get()


def sink(server: Server, database: int = 0) -> None:
    url = f"valkey://127.0.0.1:{server.port}/{database}"
    stated = {"kind": "valkey", "url": url, "key_template": "answers:{custom_id}"}
    batch_sink_create(name="answers", tenant="acme", actor="ada", now=NOW, **stated)


def keys(server: Server) -> set[bytes]:
    with server.client() as client:
        return set(client.keys("*"))


def node_id(server: Server) -> str:
    with server.client(decode_responses=True) as client:
        return str(client.execute_command("CLUSTER MYID"))


def test_each_line_is_on_the_node_of_its_slot(nodes: list[Server]) -> None:
    sink(nodes[0])
    delivery = deliver()
    assert (delivery.state, delivery.lines, delivery.dead) == ("delivered", LINES, 0)
    found = [keys(node) for node in nodes]
    assert all(found)
    assert set().union(*found) == {f"answers:id-{number}".encode() for number in range(LINES)}


def test_a_slot_on_the_way_and_one_that_has_moved_are_found(nodes: list[Server]) -> None:
    sink(nodes[1])
    source, target = nodes[0], nodes[2]
    ours = [f"answers:id-{number}".encode() for number in range(LINES)]
    moving = next(key for key in ours if key_slot(key) < 16_384 // 3)
    slot = key_slot(moving)
    with source.client() as old, target.client() as new:
        new.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", node_id(source))
        old.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", node_id(target))
        assert deliver().state == "delivered"
        assert moving in keys(target)
        for client in (new, old):
            client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", node_id(target))
        new.delete(moving)
    assert deliver().state == "delivered"
    assert moving in keys(target)


def test_a_node_that_is_away_and_a_database_that_a_cluster_lacks(nodes: list[Server]) -> None:
    sink(nodes[0])
    nodes[2].stop()
    delivery = deliver()
    assert (delivery.state, delivery.attempts) == ("pending", 1)
    Batch.objects.all().delete()
    delivery.sink.delete()
    sink(nodes[0], database=3)
    assert "a cluster has only 0" in deliver().reason
