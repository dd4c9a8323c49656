"""Hints over the real channel layer: after the commit, to whom they concern, and never in anybody's way."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from channels.layers import get_channel_layer
from django.db import connections, transaction

from kernel import live
from tests.kernel.servers_away import KINDS, point_valkey_at, server_away, use_fresh_connections

DEADLINE_S = 60.0

db = pytest.mark.django_db(transaction=True)


async def heard_in(group: str, change: Callable[[], None]) -> dict[str, Any]:
    """The first hint that the group hears once `change` has run in a transaction."""

    def in_transaction() -> None:
        with transaction.atomic():
            change()
        connections.close_all()

    layer = get_channel_layer()
    channel = await layer.new_channel()
    await layer.group_add(group, channel)
    await sync_to_async(in_transaction)()
    return await _first(layer.receive(channel))


async def _first(message: Awaitable[dict[str, Any]]) -> dict[str, Any]:
    async with asyncio.timeout(DEADLINE_S):
        return await message


@db
@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("change", "group", "hint"),
    [
        (lambda: live.push("cells", "c1"), live.BROWSERS, {"type": "live.hint", "topic": "cells", "key": "c1"}),
        (lambda: live.push_desired(["n-a"]), live.AGENT_SOCKETS, {"type": "agent.desired", "nodes": ["n-a"]}),
        (lambda: live.push_table("east"), live.AGENT_SOCKETS, {"type": "agent.table", "region": "east"}),
    ],
)
async def test_a_hint_reaches_those_whom_it_concerns(
    change: Callable[[], None], group: str, hint: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_fresh_connections(monkeypatch)
    assert await heard_in(group, change) == hint


def taken_back_then_kept() -> None:
    with transaction.atomic():
        live.push("cells", "taken back")
        transaction.set_rollback(True)
    live.push("cells", "kept")


@db
@pytest.mark.asyncio
async def test_what_was_taken_back_is_never_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    use_fresh_connections(monkeypatch)
    assert (await heard_in(live.BROWSERS, taken_back_then_kept))["key"] == "kept"


@db
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_that_is_away_breaks_nothing_and_holds_nobody_up(
    kind: str, settings: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with server_away(kind) as url:
        point_valkey_at(url, settings, monkeypatch)
        with transaction.atomic():
            for number in range(20):
                live.push("cells", str(number))
        for _ in range(int(DEADLINE_S)):
            live._sender.drain()
    (failed,) = (record.getMessage() for record in caplog.records if record.name == live.log.name)
    assert {"refuses": "Connect call failed", "is silent": "TimeoutError"}[kind] in failed, (
        "one is tried, within limits"
    )


class SlowLayer:
    """Takes a hint when it may, and says which it took."""

    def __init__(self) -> None:
        self.taken: list[str] = []
        self.asked, self.may_take = threading.Event(), threading.Event()

    async def group_send(self, group: str, message: dict[str, Any]) -> None:
        self.asked.set()
        await asyncio.to_thread(self.may_take.wait, DEADLINE_S)
        self.taken.append(message["key"])


@db
def test_a_commit_waits_for_no_hint_and_what_waits_already_waits_once(monkeypatch: pytest.MonkeyPatch) -> None:
    use_fresh_connections(monkeypatch)
    layer = SlowLayer()
    monkeypatch.setattr(live, "get_channel_layer", lambda: layer)
    monkeypatch.setattr(live, "SEND_LIMIT_S", DEADLINE_S)
    live.push("cells", "first")
    assert layer.asked.wait(DEADLINE_S)
    for key in ("first", "second", "second", "first"):
        live.push("cells", key)
    assert not layer.taken
    layer.may_take.set()
    live._sender.drain()
    assert layer.taken == ["first", "first", "second"], "the first was under way: it may have been too early"


@db
def test_more_hints_than_may_wait_are_lost_with_a_reason(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    use_fresh_connections(monkeypatch)
    layer = SlowLayer()
    monkeypatch.setattr(live, "get_channel_layer", lambda: layer)
    monkeypatch.setattr(live, "SEND_LIMIT_S", DEADLINE_S)
    monkeypatch.setattr(live, "MOST_WAITING", 2)
    live.push("cells", "1")
    assert layer.asked.wait(DEADLINE_S)
    for key in "2345":
        live.push("cells", key)
    layer.may_take.set()
    live._sender.drain()
    assert layer.taken == ["1"]
    said = [record.getMessage() for record in caplog.records if record.name == live.log.name]
    assert [line.rpartition(": ")[2] for line in said] == ["2 hints are waiting"]
