"""Deliveries to a running Valkey: keys with TTL, retries without loss, refusals, TLS and confined addresses."""

import datetime
import ipaddress
import json
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from kernel.models import Event
from kernel.refusals import Conflict, InvalidInput
from tests.fleet.rows import NOW
from tests.traffic.batch_sinks.servers import Server, answered, ended_batch, failed, tls_in_front, valkey
from tests.traffic.rows import jsonl, serving_fleet
from traffic.batch_sinks.models import BatchDelivery, BatchSink
from traffic.batch_sinks.planner import SinkSettings
from traffic.batch_sinks.services.deliveries import deliveries_claim, deliveries_skip, delivery_work
from traffic.batch_sinks.services.sinks import (
    batch_delivery_retry,
    batch_sink_change,
    batch_sink_create,
    batch_sink_delete,
    sink_password,
)
from traffic.batches.models import Batch

pytestmark = [pytest.mark.processes, pytest.mark.django_db]
SETTINGS = SinkSettings(chunk_lines=3, timeout_s=2.0, attempts_most=3)
OUTPUT = jsonl(*(answered(number) for number in range(8)))


@pytest.fixture(autouse=True)
def _fleet(settings: Any, tmp_path: Path) -> None:
    settings.FILES = str(tmp_path / "files")
    settings.WEBHOOK_NETWORKS = ["127.0.0.0/8"]
    serving_fleet()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with valkey(tmp_path_factory.mktemp("valkey")) as server:
        yield server


@pytest.fixture
def server(shared: Server) -> Server:
    with shared.client() as client:
        client.flushall()
    return shared


def sink(server: Server, **columns: Any) -> BatchSink:
    stated = {"kind": "valkey", "url": f"valkey://127.0.0.1:{server.port}/0", "key_template": "answers:{custom_id}"}
    return batch_sink_create(name="answers", tenant="acme", actor="ada", now=NOW, **{**stated, **columns})


def deliver(now: datetime.datetime = NOW, settings: SinkSettings = SETTINGS) -> BatchDelivery:
    deliveries_skip(now=now)
    for leased in deliveries_claim(count=9, now=now, settings=settings):
        delivery_work(leased, settings=settings, clock_now=lambda: now)
    return BatchDelivery.objects.get()


def stored_keys(server: Server) -> dict[str, Any]:
    with server.client(decode_responses=True) as client:
        return {key: client.get(key) for key in client.keys("*")}


def test_each_line_is_a_key_that_expires(server: Server) -> None:
    sink(server, ttl_s=600)
    ended_batch("answers", output=OUTPUT, errors=jsonl(failed(9)))
    delivery = deliver()
    assert (delivery.state, delivery.lines, delivery.dead) == ("delivered", 8, 0)
    found = stored_keys(server)
    assert sorted(found) == [f"answers:id-{number}" for number in range(8)]
    assert json.loads(found["answers:id-3"]) == answered(3)["response"]["body"]
    with server.client() as client:
        assert 0 < client.ttl("answers:id-3") <= 600


def test_failed_lines_are_delivered_if_wanted_and_a_key_may_stay(server: Server) -> None:
    sink(server, errors=True, ttl_s=0, value="line", key_template="{batch}/{custom_id}")
    batch = ended_batch("answers", output=OUTPUT, errors=jsonl(failed(9)))
    assert deliver().lines == 9
    found = stored_keys(server)
    assert json.loads(found[f"{batch.id}/id-9"]) == failed(9)
    with server.client() as client:
        assert client.ttl(f"{batch.id}/id-9") == -1


def test_a_server_that_is_away_is_tried_again_from_the_last_chunk(tmp_path: Path) -> None:
    with valkey(tmp_path) as server:
        sink(server)
        ended_batch("answers", output=OUTPUT)
        server.stop()
        away = deliver()
        assert (away.state, away.attempts, away.due_at) == ("pending", 1, NOW + timedelta(seconds=1))
        assert "refused" in away.reason.lower()
        deliver(NOW + timedelta(seconds=1))
        done = deliver(NOW + timedelta(seconds=3))
        assert (done.state, done.attempts) == ("failed", 2)
        assert "3 attempts in a row" in done.reason
        assert Event.objects.filter(kind="batch_delivery.failed").count() == 1
        server.start()
        row = batch_delivery_retry(delivery_id=done.pk, actor="ada", now=NOW)
        with pytest.raises(Conflict, match="pending"):
            batch_delivery_retry(delivery_id=row.pk, actor="ada", now=NOW)
        with pytest.raises(Conflict, match="are pending"):
            batch_sink_delete(name="answers", actor="ada", now=NOW)


def test_what_was_delivered_is_not_written_again_and_a_lost_lease_writes_no_more(
    server: Server,
) -> None:
    sink(server)
    ended_batch("answers", output=OUTPUT)
    (lost,) = deliveries_claim(count=1, now=NOW, settings=SETTINGS)
    later = NOW + timedelta(seconds=SETTINGS.lease_s)
    (held,) = deliveries_claim(count=1, now=later, settings=SETTINGS)
    delivery_work(lost, settings=SETTINGS, clock_now=lambda: later)
    assert stored_keys(server) == {}
    size = sum(len(each) for each in OUTPUT.splitlines(keepends=True)[:6])
    BatchDelivery.objects.update(position=size, lines=6)
    delivery_work(held, settings=SETTINGS, clock_now=lambda: later)
    assert sorted(stored_keys(server)) == ["answers:id-6", "answers:id-7"]
    assert (BatchDelivery.objects.get().state, BatchDelivery.objects.get().lines) == ("delivered", 8)


def test_keys_that_a_user_may_not_write_are_dead_letters(server: Server) -> None:
    with server.client() as client:
        client.execute_command("ACL", "SETUSER", "writer", "on", ">a secret", "+@all", "~answers:id-[0-4]")
    sink(server, username="writer", password="a secret")
    ended_batch("answers", output=OUTPUT)
    delivery = deliver()
    assert (delivery.state, delivery.lines, delivery.dead) == ("delivered", 5, 3)
    assert [letter["custom_id"] for letter in delivery.dead_letters] == ["id-5", "id-6", "id-7"]
    Batch.objects.all().delete()
    ended_batch("answers", output=OUTPUT)
    refused = deliver(settings=replace(SETTINGS, dead_most=2))
    assert (refused.state, "3 lines cannot be delivered" in refused.reason) == ("failed", True)


def test_a_wrong_password_ends_the_delivery_and_a_new_one_continues_it(server: Server) -> None:
    with server.client() as client:
        client.execute_command("ACL", "SETUSER", "reader", "on", ">a secret", "+@all", "~*")
    row = sink(server, username="reader", password="another")
    assert ("another" in row.sealed_password, sink_password(row)) == (False, "another")
    ended_batch("answers", output=OUTPUT)
    delivery = deliver()
    assert (delivery.state, "user or password is not accepted" in delivery.reason) == ("failed", True)
    batch_sink_change(name="answers", actor="ada", now=NOW, password="a secret")
    batch_delivery_retry(delivery_id=delivery.pk, actor="ada", now=NOW)
    assert deliver().state == "delivered"
    changed = batch_sink_change(name="answers", actor="ada", now=NOW, username="writer")
    assert sink_password(changed) == "", "another user needs it again"


def test_results_that_are_gone_end_it_and_a_failed_batch_has_none(server: Server) -> None:
    sink(server)
    batch = ended_batch("answers", output=OUTPUT)
    Batch.objects.filter(id=batch.id).update(output_file_id=f"file-{'0' * 32}")
    assert "deleted" in deliver().reason
    Batch.objects.all().delete()
    Batch.objects.filter(id=ended_batch("answers", output=OUTPUT).id).update(state="failed")
    assert deliver().state == "skipped"


def test_a_name_that_resolves_elsewhere_gets_nothing(server: Server, settings: Any) -> None:
    sink(server, url=f"valkey://localhost:{server.port}/0")
    ended_batch("answers", output=OUTPUT)
    settings.WEBHOOK_NETWORKS = []
    delivery = deliver()
    assert (delivery.state, "not a public address" in delivery.reason) == ("failed", True)
    assert stored_keys(server) == {}


@pytest.mark.parametrize(
    ("columns", "field"),
    [
        ({"url": "http://127.0.0.1"}, "url"),
        ({"url": "valkey://10.0.0.1"}, "url"),
        ({"url": "valkey://8.8.8.8"}, "url"),
        ({"key_template": "answers"}, "key_template"),
        ({"key_template": "{custom_id}{week}"}, "key_template"),
        ({"ttl_s": 10**9}, "ttl_s"),
        ({"ca_pem": "x"}, "ca_pem"),
        ({"url": "valkeys://127.0.0.1", "ca_pem": "x"}, "ca_pem"),
        ({"kind": "s3", "url": "s3://acme-data/out/{batch}", "key_template": ""}, "url"),
        ({"kind": "memcached"}, "kind"),
    ],
)
def test_a_sink_that_could_take_nothing_is_refused(server: Server, columns: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        sink(server, **columns)
    assert caught.value.field == field


def certificate(name: str) -> tuple[str, str]:
    """A certificate of a new authority for a name and 127.0.0.1, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    names = x509.SubjectAlternativeName([x509.DNSName(name), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    built = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(names, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return built.public_bytes(serialization.Encoding.PEM).decode(), secret.decode()


@pytest.mark.parametrize(
    ("name", "trusts", "reason"),
    [("localhost", True, ""), ("localhost", False, "verify failed"), ("other.example", True, "ostname mismatch")],
)
def test_tls_checks_the_name_and_the_authority(
    server: Server, tmp_path: Path, name: str, trusts: bool, reason: str
) -> None:
    pem, key = certificate(name)
    (tmp_path / "cert.pem").write_text(pem + key)
    with tls_in_front(server, tmp_path / "cert.pem") as port:
        sink(server, url=f"valkeys://localhost:{port}/0", ca_pem=pem if trusts else certificate(name)[0])
        ended_batch("answers", output=OUTPUT)
        delivery = deliver()
    assert (delivery.state, delivery.lines) == (("pending", 0) if reason else ("delivered", 8))
    assert reason in delivery.reason
    assert len(stored_keys(server)) == delivery.lines
