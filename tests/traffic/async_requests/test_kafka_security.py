"""Topics of brokers that require TLS and a user, and what operators read if a certificate or a password is wrong."""

import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.db import connections

from tests.ports import free_port
from tests.traffic.async_requests.brokers import Broker, running_broker
from tests.traffic.async_requests.secure_front import SecureFront
from tests.traffic.async_requests.test_kafka import count_is, declared, in_database, reading_until
from tests.traffic.batch_sinks.test_valkey import certificate
from tests.traffic.rows import BODY
from traffic.async_requests.models import RequestQueue

pytestmark = [pytest.mark.processes, pytest.mark.django_db(transaction=True), pytest.mark.asyncio]
USER, PASSWORD = "switchyard", "a secret, with commas=signs"


@dataclass
class Secure:
    """A broker whose front is at `front.port`."""

    broker: Broker
    front: SecureFront
    ca_pem: str

    def settings(self, **changes: str) -> dict[str, Any]:
        """A topic's settings that this front accepts."""
        tls, user = self.front.context is not None, self.front.user
        stated = {"security": {(True, True): "SASL_SSL", (True, False): "SSL"}.get((tls, bool(user)), "SASL_PLAINTEXT")}
        stated |= {"ca_pem": self.ca_pem} if tls else {}
        stated |= {"username": user, "password": self.front.password, "mechanism": "SCRAM-SHA-256"} if user else {}
        return {**stated, **changes}


@pytest.fixture(scope="module")
def identity(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """An authority that is also the certificate of `localhost` and 127.0.0.1, and the file with it and its key."""
    pem, key = certificate("localhost")
    path = tmp_path_factory.mktemp("broker") / "identity.pem"
    path.write_text(pem + key)
    return pem, path


@pytest.fixture(scope="module")
def behind() -> Iterator[tuple[Broker, int]]:
    """A broker, and the port of the front to which it sends clients."""
    port = free_port()
    with running_broker(port) as broker:
        yield broker, port


@asynccontextmanager
async def secure(
    behind: tuple[Broker, int], identity: tuple[str, Path], *, tls: bool, user: str
) -> AsyncIterator[Secure]:
    broker, port = behind
    pem, path = identity
    context, options = None, dict[str, Any]()
    if tls:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(path)
        options["ssl_context"] = ssl.create_default_context(cadata=pem)
    if user:
        options |= {"sasl_mechanism": "PLAIN", "sasl_plain_username": user, "sasl_plain_password": PASSWORD}
    protocol = {(True, True): "SASL_SSL", (True, False): "SSL", (False, True): "SASL_PLAINTEXT"}[tls, bool(user)]
    front = SecureFront(broker.address, context, user, PASSWORD)
    async with front.serving(port):
        yield Secure(Broker(port, {**options, "security_protocol": protocol}), front, pem)


@pytest.mark.parametrize(
    ("tls", "user", "mechanism"),
    [(True, "", ""), (True, USER, "SCRAM-SHA-512"), (True, USER, "PLAIN"), (False, USER, "SCRAM-SHA-256")],
)
async def test_a_topic_behind_tls_and_a_password_is_read(
    behind: tuple[Broker, int], identity: tuple[str, Path], tls: bool, user: str, mechanism: str
) -> None:
    async with secure(behind, identity, tls=tls, user=user) as there:
        queue = await declared(there.broker, **there.settings(**({"mechanism": mechanism} if mechanism else {})))
        await there.broker.send(queue.name, BODY)
        before = there.front.logins
        await reading_until(queue, count_is(1))
        assert (there.front.logins > before) == bool(user)
    await in_database(connections.close_all)


async def _reason(queue: RequestQueue) -> str:
    """Why the topic cannot be read, as operators see it after a minute."""

    async def is_known() -> bool:
        return bool(await in_database(lambda: RequestQueue.objects.get(pk=queue.pk).reason))

    await reading_until(queue, is_known, ahead=timedelta(minutes=2))
    reason: str = await in_database(lambda: RequestQueue.objects.get(pk=queue.pk).reason)
    await in_database(connections.close_all)
    return reason


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"ca_pem": "another"}, "its certificate is not accepted: "),
        ({"ca_pem": ""}, "(checked by the host's authorities, because the queue has no ca_pem)"),
        ({"password": "wrong"}, "it does not accept the user or password"),
        ({"mechanism": "PLAIN", "password": "wrong"}, "it does not accept the user or password"),
        ({"security": "SASL_PLAINTEXT", "ca_pem": ""}, "it closed the connection: does this port take SASL_PLAINTEXT?"),
    ],
)
async def test_what_is_wrong_is_said(
    behind: tuple[Broker, int], identity: tuple[str, Path], changes: dict[str, str], text: str
) -> None:
    async with secure(behind, identity, tls=True, user=USER) as there:
        if changes.get("ca_pem") == "another":
            changes = {"ca_pem": certificate("localhost")[0]}
        queue = await declared(there.broker, **there.settings(**changes))
        reason = await _reason(queue)
    assert there.broker.address in reason
    assert text in reason


async def test_a_port_without_tls_is_said(behind: tuple[Broker, int], identity: tuple[str, Path]) -> None:
    async with secure(behind, identity, tls=False, user=USER) as there:
        queue = await declared(there.broker, **there.settings(security="SASL_SSL"))
        assert "does this port take SASL_SSL?" in await _reason(queue)


async def test_a_name_that_the_certificate_lacks_is_said(behind: tuple[Broker, int], tmp_path: Path) -> None:
    pem, key = certificate("elsewhere.example")
    path = tmp_path / "other.pem"
    path.write_text(pem + key)
    async with secure(behind, (pem, path), tls=True, user="") as there:
        queue = await declared(there.broker, **there.settings())
        url = f"kafka://localhost:{behind[1]}/{queue.name}"
        await in_database(lambda: RequestQueue.objects.filter(pk=queue.pk).update(url=url))
        assert "Hostname mismatch" in await _reason(queue)
