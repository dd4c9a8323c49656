"""Long polls are answered at a change or after a moment, and connections are closed however their handlers end."""

import asyncio
from typing import Any

import pytest

from engine_agent.cell_proxy.settings import ProbeTimes
from engine_agent.node.watch import POLL_INTERVAL_S, PROBE_TIMEOUT_S
from engine_agent.protocol import local_servers
from engine_agent.protocol.local_servers import (
    LONG_POLL_LATE_S,
    LONG_POLL_S,
    ConnectionHandler,
    StateWatch,
    closing_connections,
    long_poll_query,
    parse_long_poll,
    poll_timeout_s,
    state_name,
)

LONG_S = 60.0


class Server:
    def __init__(self) -> None:
        self.reason = ""
        self.watch = StateWatch(lambda: state_name(self.reason))

    def become(self, reason: str) -> None:
        self.reason = reason
        self.watch.changed()

    def poll(self, known: str) -> "asyncio.Task[float]":
        return asyncio.create_task(self.watch.wait_for_change(long_poll_query(known).removeprefix("?")))


@pytest.fixture
def endless_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A poll that ends within the test did not time out."""
    monkeypatch.setattr(local_servers, "LONG_POLL_S", LONG_S)


@pytest.mark.asyncio
@pytest.mark.usefixtures("endless_polls")
async def test_a_poll_with_no_state_or_another_is_answered_immediately() -> None:
    server = Server()
    assert [await server.poll(known) for known in ("", state_name("loading"))] == [0.0, 0.0]


@pytest.mark.asyncio
@pytest.mark.usefixtures("endless_polls")
async def test_a_change_answers_every_waiting_poll() -> None:
    server = Server()
    polls = [server.poll(state_name("")) for _ in range(3)]
    await asyncio.sleep(0)  # all three wait
    server.become("follower 1 is gone")
    for each in polls:
        assert 0 <= await each < LONG_S


@pytest.mark.asyncio
@pytest.mark.usefixtures("endless_polls")
async def test_a_change_that_is_undone_before_the_next_step_answers_no_poll() -> None:
    server = Server()
    poll = server.poll(state_name(""))
    await asyncio.sleep(0)
    server.become("busy")
    server.become("")
    for _ in range(5):
        await asyncio.sleep(0)
    assert not poll.done()
    server.become("gone")
    await poll


@pytest.mark.asyncio
async def test_a_poll_without_a_change_is_answered_after_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_servers, "LONG_POLL_S", 0.01)
    assert await Server().poll(state_name("")) > 0


@pytest.mark.parametrize(
    ("query", "parsed"),
    [
        ("unless=aa&for_ms=600", ("aa", 0.6)),
        ("unless=aa&for_ms=999999999", ("aa", LONG_POLL_S)),
        ("unless=aa&for_ms=-1", ("aa", 0.0)),
        ("unless=aa&for_ms=\u00b2", ("aa", 0.0)),
        ("unless=aa&for_ms=x", ("aa", 0.0)),
        ("unless=aa", ("aa", 0.0)),
        ("", ("", 0.0)),
    ],
)
def test_the_wait_that_a_client_can_request_is_bounded(query: str, parsed: tuple[str, float]) -> None:
    assert parse_long_poll(query) == parsed


def test_long_polls_notice_silence_as_early_as_frequent_polls() -> None:
    """See `docs/architecture.md`, the flow of a failure: two slow probes of one second each."""
    times = ProbeTimes()
    assert poll_timeout_s("", 1.0) == 1.0
    assert poll_timeout_s("aa", 1.0) == LONG_POLL_S + LONG_POLL_LATE_S
    assert LONG_POLL_S + LONG_POLL_LATE_S <= POLL_INTERVAL_S + PROBE_TIMEOUT_S
    assert times.health_interval_s + times.health_timeout_s >= LONG_POLL_S + LONG_POLL_LATE_S


async def received(handle: ConnectionHandler, *, cancelled: bool = False) -> bytes:
    """Returns what a client reads until its connection is closed; `cancelled`: before the first step of its handler."""
    begin = closing_connections(handle)

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        before = asyncio.all_tasks()
        begin(reader, writer)
        for task in asyncio.all_tasks() - before:
            if cancelled:
                task.cancel()

    async with await asyncio.start_server(accept, "127.0.0.1", 0) as server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        text = await reader.read()
        writer.close()
        await writer.wait_closed()
        return text


async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"hello")
    await writer.drain()


@pytest.mark.asyncio
async def test_a_handler_that_ends_closes_its_connection() -> None:
    assert await received(greet) == b"hello"


@pytest.mark.asyncio
async def test_a_handler_that_never_began_closes_its_connection() -> None:
    assert await received(greet, cancelled=True) == b""


@pytest.mark.asyncio
async def test_a_handler_that_fails_closes_its_connection_and_is_reported_to_the_loop() -> None:
    contexts: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: contexts.append(context))

    async def fail(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hel")
        raise ValueError("lost")

    assert await received(fail) == b"hel"
    assert [str(context["exception"]) for context in contexts] == ["lost"]
