"""Web's listener for agents: limits on the time and number of its connections."""

import asyncio
from contextlib import suppress

import pytest

from controlplane import agent_listener, request_bodies
from controlplane.connection_door import ConnectionLimits
from controlplane.request_bodies import RequestBodies
from engine_agent.protocol.identity import control_name
from fleet.agents.consumers.hub import AgentHub
from tests.controlplane.agent_listener.agents import DOORS, Agent, answers_whole_requests, at, listening_for
from tests.engine_agent.fake_control_plane import eventually

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.asyncio, pytest.mark.slow]


@pytest.mark.parametrize("said", [b"", b"\x16\x03\x01\x00", b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", b"\x00" * 2000])
async def test_who_speaks_no_tls_or_nothing_is_hung_up_on(
    hub: AgentHub, monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    monkeypatch.setattr(agent_listener, "HANDSHAKE_S", 0.2)
    async with listening_for(hub) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(said)
        async with asyncio.timeout(30):
            try:
                while await reader.read(4096):
                    pass
            except ConnectionError:
                pass
        writer.close()


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\nHost:",
        b"POST /agents/enrol HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100\r\n\r\n{",
        b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\nG",
    ],
)
async def test_who_has_a_connection_and_does_not_finish_asking_is_hung_up_on(
    agent: Agent, hub: AgentHub, monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    name = control_name(agent.identity.fleet()).dns
    monkeypatch.setattr(agent_listener, "HEAD_S", 0.2)
    monkeypatch.setattr(request_bodies, "GRACE_S", 0.2)
    async with listening_for(hub, RequestBodies(answers_whole_requests)) as port:
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", port, ssl=agent.identity.client_context(), server_hostname=name
        )
        writer.write(said)
        async with asyncio.timeout(30):
            with suppress(ConnectionError):
                while await reader.read(4096):
                    pass
        writer.close()


async def test_connections_without_a_websocket_are_limited_and_websockets_do_not_count(
    agent: Agent, hub: AgentHub
) -> None:
    async with listening_for(hub, limits=ConnectionLimits(http=1)) as port, at(agent, port).running():
        await eventually(lambda: "n-a" in hub.sessions)
        name, context = control_name(agent.identity.fleet()).dns, agent.identity.client_context()
        first, of_first = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname=name)
        _, of_second = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname=name)
        with suppress(ConnectionError):
            assert await first.read(1) == b"", "the one that was silent the longest makes room"
        for each in (of_first, of_second):
            each.close()
        assert "n-a" in hub.sessions


async def test_one_address_has_so_many_connections_its_handshakes_included_and_others_none_the_less(
    agent: Agent, hub: AgentHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_listener, "is_loopback", lambda address: False)
    async with listening_for(hub, limits=ConnectionLimits(per_network=3)) as port, at(agent, port).running():
        (door,) = DOORS
        await eventually(lambda: "n-a" in hub.sessions)
        assert door.open["127.0.0.1"] == 1, "a WebSocket counts to its end"
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        await eventually(lambda: door.open["127.0.0.1"] == 3, what="they count before their handshake")
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert await reader.read(1) == b"", "no handshake was begun with it"
        writer.close()
        reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=("127.0.0.2", 0))
        await eventually(lambda: door.open["127.0.0.2"] == 1)
        for each in (writer, *(writer for _, writer in silent)):
            each.close()
        await eventually(lambda: door.open == {"127.0.0.1": 1})
        await eventually(lambda: "n-a" in hub.sessions, what="its agent may just take its certificate and come back")
    await eventually(lambda: not door.open, what="nothing is counted once all have ended")


async def test_processes_of_the_host_itself_are_not_limited_by_address(agent: Agent, hub: AgentHub) -> None:
    async with listening_for(hub, limits=ConnectionLimits(per_network=0)) as port, at(agent, port).running():
        await eventually(lambda: "n-a" in hub.sessions)
