"""Watching through ASGI: a waiting watcher holds no thread or connection, gets changes immediately, and leaves nothing
behind.
"""

import asyncio
from typing import Any

import pytest
from django.db import DatabaseError, connection

from controlplane.api import change_feed
from controlplane.api.change_feed import ChangeFeed, kinds_changed
from controlplane.api.watch_middleware import OF_ONE_USER, WatchMiddleware
from kernel.rest.throttling import WATCH_RETRY

SCOPE = {"type": "http", "method": "GET", "path": "/api/v1/cells", "query_string": b"since=r1-1-&timeout=9"}


class World:
    """A fake database whose changes the test controls, and an application that reports them."""

    def __init__(self, patience_s: float = 30.0) -> None:
        self.kinds: list[str] = []
        self.news = False
        self.requests: list[dict[str, Any]] = []
        self.patience_s = patience_s
        self.user = 0
        """User of the watches; 0: a different one each."""

    def look(self, since: str | None) -> tuple[str, list[str]]:
        kinds, self.kinds = self.kinds, []
        return "1:1:", kinds if since else []

    async def application(self, scope: Any, receive: Any, send: Any) -> None:
        self.requests.append(scope)
        assert (await receive())["type"] == "http.request"
        waits = (
            []
            if self.news
            else [(b"switchyard-unchanged", f"{self.user or len(self.requests)} cell {self.patience_s:g}".encode())]
        )
        await send({"type": "http.response.start", "status": 200, "headers": waits})
        await send({"type": "http.response.body", "body": b"news" if self.news else b"nothing"})

    def changes(self, kind: str) -> None:
        self.kinds.append(kind)


class Client:
    """Sends one request and waits for messages until it disconnects."""

    def __init__(self) -> None:
        self.hung_up = asyncio.Event()
        self.heard: list[Any] = []
        self._sent = False

    async def receive(self) -> Any:
        if not self._sent:
            self._sent = True
            return {"type": "http.request", "body": b"", "more_body": False}
        await self.hung_up.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.heard.append(message)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.heard)


async def until(truth: Any) -> None:
    async with asyncio.timeout(60):
        while not truth():  # noqa: ASYNC110 - what it waits for has no event
            await asyncio.sleep(0.001)


def gate_to(world: World) -> WatchMiddleware:
    return WatchMiddleware(world.application, ChangeFeed(world.look, tick_s=0.002))


async def watch(gate: WatchMiddleware, client: Client, **scope: Any) -> None:
    await gate({**SCOPE, **scope}, client.receive, client.send)


@pytest.mark.asyncio
async def test_a_watcher_is_answered_when_something_of_its_kind_changes() -> None:
    world, client = World(), Client()
    watching = asyncio.create_task(watch(gate_to(world), client))
    await until(lambda: len(world.requests) == 1)
    world.news = True
    world.changes("cell")
    await asyncio.wait_for(watching, 10)
    assert client.body == b"news"
    assert WATCH_RETRY not in world.requests[0]
    assert world.requests[1][WATCH_RETRY], "it was counted when it came"


@pytest.mark.asyncio
async def test_changes_of_another_kind_wake_nobody() -> None:
    world, client = World(), Client()
    gate = gate_to(world)
    watching = asyncio.create_task(watch(gate, client))
    await until(lambda: len(world.requests) == 1)
    world.changes("node")
    await until(lambda: gate._feed.last_change("node"))
    await asyncio.sleep(0.01)
    assert len(world.requests) == 1
    assert not watching.done()
    client.hung_up.set()
    await asyncio.wait_for(watching, 10)


@pytest.mark.asyncio
async def test_a_change_that_is_not_for_this_watcher_lets_it_wait_on() -> None:
    world, client = World(), Client()
    watching = asyncio.create_task(watch(gate_to(world), client))
    await until(lambda: len(world.requests) == 1)
    world.changes("cell")
    await until(lambda: len(world.requests) == 2)
    world.news = True
    world.changes("cell")
    await asyncio.wait_for(watching, 10)
    assert client.body == b"news"


@pytest.mark.asyncio
async def test_patience_ends_with_the_answer_that_nothing_has_changed() -> None:
    world, client = World(patience_s=0.02), Client()
    await asyncio.wait_for(watch(gate_to(world), client), 10)
    assert client.body == b"nothing"
    assert len(world.requests) == 1


@pytest.mark.asyncio
async def test_who_hangs_up_is_forgotten_and_answered_nothing() -> None:
    world, client = World(), Client()
    gate = gate_to(world)
    watching = asyncio.create_task(watch(gate, client))
    await until(lambda: len(world.requests) == 1)
    client.hung_up.set()
    await asyncio.wait_for(watching, 10)
    assert client.heard == []
    assert gate._feed._watchers == 0


@pytest.mark.slow
@pytest.mark.asyncio
async def test_a_thousand_watchers_are_a_thousand_coroutines_and_one_look_a_tick() -> None:
    world = World()
    gate, clients = gate_to(world), [Client() for _ in range(1000)]
    watching = [asyncio.create_task(watch(gate, client)) for client in clients]
    await until(lambda: len(world.requests) == 1000)
    world.news = True
    world.changes("cell")
    await asyncio.wait_for(asyncio.gather(*watching), 30)
    assert {client.body for client in clients} == {b"news"}


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "other",
    [
        {"method": "POST"},
        {"path": "/overview"},
        {"query_string": b"since=2026-11-21"},
        {"query_string": b""},
        {"type": "lifespan"},
    ],
)
async def test_everything_else_passes_through(other: dict[str, Any]) -> None:
    seen: list[Any] = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        seen.append((receive, send))

    client = Client()
    await watch(WatchMiddleware(application, ChangeFeed(World().look)), client, **other)
    assert seen == [(client.receive, client.send)]


@pytest.mark.asyncio
async def test_without_a_database_a_watcher_is_answered_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from django.db import OperationalError

    def no_answer(since: str | None) -> tuple[str, list[str]]:
        raise OperationalError("away")

    monkeypatch.setattr("controlplane.api.change_feed.BEGIN_LIMIT_S", 0.01)
    world, client = World(), Client()
    gate = WatchMiddleware(world.application, ChangeFeed(no_answer, tick_s=0.002))
    await asyncio.wait_for(watch(gate, client), 10)
    assert client.body == b"nothing"
    gate._feed._running.cancel()  # type: ignore[union-attr]


@pytest.mark.asyncio
async def test_one_user_takes_no_more_places_than_are_for_one() -> None:
    world = World()
    world.user = 1
    gate = gate_to(world)
    waiting = [Client() for _ in range(OF_ONE_USER)]
    tasks = [asyncio.create_task(watch(gate, client)) for client in waiting]
    await until(lambda: gate._waiting["1"] == OF_ONE_USER)
    one_more = Client()
    await watch(gate, one_more)
    assert one_more.body == b"nothing"
    world.user = 2
    another = Client()
    tasks.append(asyncio.create_task(watch(gate, another)))
    await until(lambda: gate._waiting["2"] == 1)
    for client in (*waiting, another):
        client.hung_up.set()
    await asyncio.gather(*tasks)
    assert not gate._waiting


@pytest.mark.django_db(transaction=True)
@pytest.mark.asyncio
@pytest.mark.parametrize("end", ["idle", "cancelled", "database away"])
async def test_a_feed_that_ends_or_fails_lets_go_of_its_connection(monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    monkeypatch.setattr(change_feed, "IDLE_S", 0.01 if end == "idle" else 60.0)
    monkeypatch.setattr(change_feed, "RETRY_S", 0.01)
    used: list[Any] = []

    def look(since: str | None) -> tuple[str, list[str]]:
        found = kinds_changed(since)
        if connection.connection not in used:
            used.append(connection.connection)
            if end == "database away" and len(used) == 1:
                raise DatabaseError
        return found

    feed = ChangeFeed(look, tick_s=0.002)
    async with feed.watcher():
        running = feed._running
    assert running is not None
    if end != "idle":
        running.cancel()
    await asyncio.wait([running])
    assert running.cancelled() == (end != "idle")
    assert running.cancelled() or running.exception() is None
    assert [each.closed for each in used] == [True] * (2 if end == "database away" else 1)
