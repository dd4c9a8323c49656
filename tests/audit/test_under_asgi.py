"""As web runs it, on an event loop: the change and its record are one transaction there too."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from asgiref.sync import sync_to_async
from django.db import connections
from django.test import AsyncClient

from audit import middleware
from fleet.nodes.models import Node
from tests.audit.records import only_record, recorded
from tests.controlplane.api.client import bearer
from tests.fleet import rows

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.asyncio]


@pytest_asyncio.fixture(autouse=True)
async def no_connection_is_left() -> AsyncIterator[None]:
    """Closes the connection of the answering thread, which would keep the test database."""
    yield
    await sync_to_async(connections.close_all)()


def token() -> str:
    rows.node("n-00000001")
    return str(vars(bearer())["_credentials"]["HTTP_AUTHORIZATION"])


async def cordon(client: AsyncClient, authorization: str) -> int:
    headers = {"Authorization": authorization, "X-Request-Id": "r-9"}
    url = "/api/v1/nodes/n-00000001/cordon"
    answer = await client.post(url, "{}", content_type="application/json", headers=headers)
    return answer.status_code


async def test_a_change_is_recorded_with_its_number() -> None:
    assert await cordon(AsyncClient(), await sync_to_async(token)()) == 200
    record = await sync_to_async(only_record)()
    assert (record.action, record.actor, record.request_id) == ("node.cordon", "operator", "r-9")


async def test_without_its_record_a_change_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(**_: object) -> None:
        raise RuntimeError("no record")

    monkeypatch.setattr(middleware, "audit_record", fails)
    authorization = await sync_to_async(token)()
    assert await cordon(AsyncClient(raise_request_exception=False), authorization) == 500
    assert not await Node.objects.filter(cordoned=True).aexists()
    assert await sync_to_async(recorded)() == []
