"""Simulated agents speak as real ones do: TLS with their certificate, hello, report, heartbeats, and again after a
lost connection."""

import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from msgspec import structs
from websockets.exceptions import ConnectionClosed
from websockets.sync.server import ServerConnection, serve

from bench.fleet import simulated_agents
from bench.fleet.agent_line import PONG, Wheel, frame_of, frame_size, split_frame
from bench.fleet.simulated_agents import AgentGroup, Member, agents_of, status_of
from engine_agent.node.identity import key_pem, request_make
from engine_agent.node.planning.heartbeats import REPORT_AT_LEAST_EVERY_S, still_holds
from engine_agent.protocol.codec import decode_up, encode
from engine_agent.protocol.identity import CONTROL_ID, IdentityKind, name_of_peer
from engine_agent.protocol.load_messages import Load
from engine_agent.protocol.messages import Desired, Heartbeat, Hello, Report, UpMessage
from engine_agent.protocol.states import EngineState
from tests.engine_agent.authority import FleetOfTests

LIMIT_S = 30.0


class Web:
    """Receives the messages of one connection after another."""

    def __init__(self) -> None:
        self.received: list[list[UpMessage]] = []
        self.peers: list[str] = []
        self.credentials: list[str] = []
        self.sends: bytes = b""

    def serve(self, connection: ServerConnection) -> None:
        secured = connection.socket
        assert isinstance(secured, ssl.SSLSocket)
        assert connection.request is not None
        self.peers.append(str(name_of_peer(secured.getpeercert())))
        self.credentials.append(connection.request.headers["Authorization"])
        mine: list[UpMessage] = []
        self.received.append(mine)
        try:
            for frame in connection:
                mine.append(decode_up(frame))
                if self.sends:
                    connection.send(self.sends.decode())
                    self.sends = b""
        except ConnectionClosed:
            return


@contextmanager
def serving(web: Web, fleet: FleetOfTests, home: Path) -> Iterator[str]:
    identity = fleet.certify(home, IdentityKind.CONTROL, CONTROL_ID)
    context = identity.server_context()
    with serve(web.serve, "127.0.0.1", 0, ssl=context) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"https://127.0.0.1:{server.socket.getsockname()[1]}"
        finally:
            server.shutdown()
            thread.join()


def group(server: str, fleet: FleetOfTests, home: Path) -> AgentGroup:
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    certificate = fleet.sign(IdentityKind.NODE, "n-1", request_make(key)).pem
    member = Member("n-1", "sw_secret", certificate, "10.0.0.1", "c-1", 3, 0)
    return AgentGroup(
        server, str(home), key_pem(key).decode(), fleet.bundle, fleet.revoked, (member,), Load(in_flight=2), 0.0
    )


@contextmanager
def running(group: AgentGroup) -> Iterator[list[simulated_agents.SimulatedAgent]]:
    agents = agents_of(group)
    try:
        yield agents
    finally:
        agents[0].network.close()


def run_until(agents: list[simulated_agents.SimulatedAgent], is_so: Callable[[], object]) -> None:
    for _ in range(int(LIMIT_S / 0.05)):
        if is_so():
            return
        agents[0].network.run(0.05)
    pytest.fail(f"not within {LIMIT_S} s: {status_of(agents)}")


def test_an_agent_reports_then_sends_heartbeats_and_follows_orders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulated_agents, "report_interval_s", lambda draw: 0.02)
    fleet, web = FleetOfTests(), Web()
    with (
        serving(web, fleet, tmp_path / "web") as server,
        running(group(server, fleet, tmp_path / "agents")) as agents,
    ):
        run_until(agents, lambda: web.received and len(web.received[0]) >= 4)
        assert (web.peers, web.credentials) == (["node n-1"], ["Bearer sw_secret"])
        hello, report, *heartbeats = web.received[0]
        assert isinstance(hello, Hello)
        assert hello.id == "n-1"
        assert isinstance(report, Report)
        assert (report.seq, report.load) == (1, Load(in_flight=2))
        assert report.observed.state is EngineState.READY
        assert set(heartbeats) == {Heartbeat(1)}
        web.sends = encode(Desired("n-1", 2, None))
        run_until(agents, lambda: Heartbeat(2) in web.received[0])
        idle = next(one for one in web.received[0] if isinstance(one, Report) and one.seq == 2)
        assert idle.observed.state is EngineState.IDLE


def test_an_agent_tries_again_after_web_was_killed(tmp_path: Path) -> None:
    fleet, web = FleetOfTests(), Web()
    with serving(web, fleet, tmp_path / "web") as server:
        agents = agents_of(group(server, fleet, tmp_path / "agents"))
        run_until(agents, lambda: web.received and len(web.received[0]) >= 2)
        assert status_of(agents).connected == 1
    with closing(agents[0].network):
        run_until(agents, lambda: status_of(agents).tries >= 3)
        assert status_of(agents).connected == 0
        assert sum(status_of(agents).reasons.values()) == 1


def test_a_report_holds_until_the_next_is_due(tmp_path: Path) -> None:
    with running(group("https://127.0.0.1:1", FleetOfTests(), tmp_path)) as (agent,):
        sent = agent.report()
    later_us = (sent.telemetry.agent_rss_bytes or 0) + int(1e6 * (REPORT_AT_LEAST_EVERY_S - 0.1))
    later = structs.replace(sent, telemetry=structs.replace(sent.telemetry, agent_rss_bytes=later_us))
    assert still_holds(sent, later, REPORT_AT_LEAST_EVERY_S - 0.1)


def test_the_wheel_calls_what_is_due_once_and_in_turn() -> None:
    wheel, called = Wheel(), list[str]()
    wheel.add(0.03, lambda: called.append("later"))
    wheel.add(0.0, lambda: called.append("first"))
    while len(called) < 2:
        wheel.turn()
    for _ in range(10):
        wheel.turn()
    assert called == ["first", "later"]


@pytest.mark.parametrize("size", [0, 5, 125, 126, 70_000])
def test_frames_of_a_server_are_taken_apart(size: int) -> None:
    payload = b"x" * size
    extended = b"\x7f" + size.to_bytes(8) if size >= 2**16 else b"\x7e" + size.to_bytes(2)
    frame = b"\x81" + (bytes((size,)) if size < 126 else extended) + payload
    assert frame_size(frame + PONG) == len(frame)
    assert frame_size(frame[:-1]) == 0
    assert split_frame(frame) == (0x81, payload)


def test_frames_of_an_agent_are_masked() -> None:
    frame = frame_of(Heartbeat(7))
    assert frame[0] == 0x81
    assert frame[1] & 0x80
