"""Requests reach their cell, and no other, through HAProxy with the sender's key."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
from asgiref.sync import sync_to_async
from django.db import connections
from django.utils import timezone

from tests.engine_agent.ingress.cells import FakeCell
from tests.engine_agent.ingress.ingresses import RunningIngress, pool
from tests.fleet.rows import NOW
from tests.traffic.rows import BODY, accepted, serving_fleet
from traffic.async_requests.models import AsyncRequest
from traffic.async_requests.planner import AsyncSettings
from traffic.async_requests.services.sender import AsyncSender
from traffic.keys.selectors import keys_for_ingresses
from traffic.keys.services import key_create

pytestmark = [pytest.mark.processes, pytest.mark.django_db(transaction=True), pytest.mark.asyncio]
LIMIT_S = 60.0
T = TypeVar("T")


@pytest.fixture(autouse=True)
def _plain_links(settings: Any) -> None:
    settings.PLAIN_LINKS = True


async def asked_of_the_database(work: Callable[[], T]) -> T:
    return await sync_to_async(work, thread_sensitive=True)()


async def send_all() -> None:
    sender, stopping = AsyncSender(AsyncSettings(poll_s=0.05, first_retry_s=0.1)), asyncio.Event()
    running = asyncio.create_task(sender.run(stopping))
    try:
        async with asyncio.timeout(LIMIT_S):
            while await asked_of_the_database(AsyncRequest.objects.filter(ended_at=None).exists):
                await asyncio.wait({running}, timeout=0.1)
    finally:
        stopping.set()
        await running


async def test_the_ingress_takes_it_for_the_tenants_and_the_cell_is_told_its_class(tmp_path: Path) -> None:
    async with RunningIngress(tmp_path / "home").running() as ingress, FakeCell().running() as cell:

        def accept() -> AsyncRequest:
            serving_fleet(ingress.settings.port)
            key = key_create(name="app", tenant="acme", actor="root", now=NOW, requests_per_min=5).key
            return accepted("acme", key=key.prefix, now=timezone.now())

        request = await asked_of_the_database(accept)
        keys = await asked_of_the_database(keys_for_ingresses)
        pools = pool(cell, name="sim-70b", models=("sim-70b",))
        await ingress.route(pools, keys=keys, keys_required=True)
        await ingress.sees(**{cell.name: "up"})
        assert (await ingress.post(BODY)).status_code == 401
        await send_all()
        row = await asked_of_the_database(lambda: AsyncRequest.objects.get(id=request.id))
        await asked_of_the_database(connections.close_all)
        assert (row.state, row.status, row.reason) == ("done", 200, "")
        (heard,) = cell.requests
        assert heard.headers["x-switchyard-tenant"] == "acme"
        assert heard.headers["x-switchyard-class"] == "near_realtime"
        assert 0 < int(heard.headers["x-switchyard-deadline-ms"]) <= 900_000
        assert "authorization" not in heard.headers


async def test_whatever_a_stored_body_says_its_key_opens_no_other_deployment(tmp_path: Path) -> None:
    async with RunningIngress(tmp_path / "home").running() as ingress, FakeCell().running() as cell:

        def accept() -> AsyncRequest:
            serving_fleet(ingress.settings.port)
            scope = ["sim-70b"]
            key = key_create(name="app", tenant="acme", actor="root", now=NOW, deployments=scope).key
            request = accepted("acme", key=key.prefix, now=timezone.now())
            AsyncRequest.objects.filter(id=request.id).update(body=b'{"model":"other","model":"sim-70b"}')
            return request

        request = await asked_of_the_database(accept)
        keys = await asked_of_the_database(keys_for_ingresses)
        await ingress.route(
            pool(name="sim-70b", models=("sim-70b",)),
            pool(cell, name="other", models=("other",)),
            keys=keys,
            keys_required=True,
        )
        await ingress.sees(**{cell.name: "up"})
        await send_all()
        row = await asked_of_the_database(lambda: AsyncRequest.objects.get(id=request.id))
        await asked_of_the_database(connections.close_all)
        assert (row.state, row.status) == ("failed", 403)
        assert "does not include the model `other`" in row.reason
        assert cell.requests == []


async def test_what_it_sends_counts_in_the_same_tokens_a_minute_as_what_its_application_sends(tmp_path: Path) -> None:
    async with RunningIngress(tmp_path / "home").running() as ingress, FakeCell().running() as cell:

        def accept() -> tuple[AsyncRequest, str]:
            serving_fleet(ingress.settings.port)
            key = key_create(name="app", tenant="acme", actor="root", now=NOW, tokens_per_min=1)
            return accepted("acme", key=key.key.prefix, now=timezone.now()), key.text

        request, text = await asked_of_the_database(accept)
        keys = await asked_of_the_database(keys_for_ingresses)
        await ingress.route(pool(cell, name="sim-70b", models=("sim-70b",)), keys=keys, keys_required=True)
        await ingress.sees(**{cell.name: "up"})
        answer = await ingress.post(BODY, Authorization=f"Bearer {text}")
        assert answer.status_code == 200, "more than a minute's tokens, so several minutes are used up"
        sender = AsyncSender(AsyncSettings(poll_s=0.05, first_retry_s=0.1))
        assert await sender.step() == 1
        await sender.idle()
        await sender.stop()
        row = await asked_of_the_database(lambda: AsyncRequest.objects.get(id=request.id))
        await asked_of_the_database(connections.close_all)
        assert (row.state, row.ended_at) == ("queued", None)
        assert len(cell.requests) == 1, "the application's own"
