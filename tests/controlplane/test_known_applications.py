"""Keys are read once a second, however many requests show them; refusals are never remembered."""

import asyncio

import pytest

from controlplane import request_bodies
from controlplane.request_bodies import KnownApplications
from traffic.tenants.selectors import Application, UnknownApplication

pytestmark = pytest.mark.asyncio


async def test_requests_with_one_key_share_a_query_for_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    found, now_s = list[str](), [100.0]

    async def find(authorization: str) -> Application:
        found.append(authorization)
        await asyncio.sleep(0)
        return Application(tenant=authorization)

    monkeypatch.setattr(request_bodies, "monotonic", lambda: now_s[0])
    known = KnownApplications(find)
    tenants = [each.tenant for each in await asyncio.gather(*(known.of("a") for _ in range(3)), known.of("b"))]
    assert (tenants, found) == (["a", "a", "a", "b"], ["a", "b"])
    now_s[0] += 0.9
    await known.of("a")
    now_s[0] += 0.1
    await known.of("a")
    assert found == ["a", "b", "a"]


async def test_a_refusal_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    found = list[str]()

    async def find(authorization: str) -> Application:
        found.append(authorization)
        raise UnknownApplication("invalid_api_key", "unknown")

    known = KnownApplications(find)
    for _ in range(2):
        with pytest.raises(UnknownApplication):
            await known.of("a")
    assert found == ["a", "a"]
    monkeypatch.setattr(request_bodies, "MOST_KEYS", 2)
    for number in range(5):
        with pytest.raises(UnknownApplication):
            await known.of(str(number))
    assert not known._known
