"""CPU time of web for one frame of an agent over TLS: a heartbeat, a ping, a report.

    .venv/bin/python -m bench agent_frames

Web's own protocol, socket and hub serve connections of another process, one frame of each at a time. No database, so
reports are only kept. CPU time of the serving process, so other work on the machine hardly changes the figures."""

import argparse
import asyncio
import os
import secrets
import socket
import ssl
import statistics
import sys
import time
from functools import partial
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import uvloop
from websockets.frames import Frame, Opcode

CONNECTIONS, SENT_BY_EACH = 100, 60
NAMES = ("heartbeat", "ping", "report")


def main(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--client", nargs=2, metavar=("PORT", "ROUNDS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.client:
        _send_all(*map(int, options.client))
        return
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.settings")
    os.environ["SWITCHYARD_SECRET_KEY"] = secrets.token_hex()
    for name, taken_us in uvloop.run(_measured(options.rounds)).items():
        spread = f"{min(taken_us):.1f} to {max(taken_us):.1f}"
        print(f"{name}: {statistics.median(taken_us):.1f} µs ({spread}), {len(taken_us)} rounds")


async def _measured(rounds: int) -> dict[str, list[float]]:
    """CPU µs of a frame, by round."""
    import uvicorn

    from controlplane.websocket_protocol import WebSocketProtocol

    config = uvicorn.Config(_application(), interface="asgi3", lifespan="off", log_config=None, log_level="error")
    config.ws_per_message_deflate = False
    config.load()
    state = uvicorn.server.ServerState()
    with TemporaryDirectory() as folder:
        make = partial(WebSocketProtocol, config=config, server_state=state, app_state={})
        server = await asyncio.get_running_loop().create_server(make, "127.0.0.1", 0, ssl=_tls(Path(folder)))
    port = server.sockets[0].getsockname()[1]
    command = [sys.executable, "-m", "bench", "agent_frames", "--client", str(port), str(rounds)]
    client = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    found: dict[str, list[float]] = {name: [] for name in NAMES}
    began_s = time.process_time()
    if client.stdout is None:
        raise SystemExit("the client has no output")
    async for line in client.stdout:
        now_s, name = time.process_time(), line.decode().strip()
        if name in found:
            found[name].append(1e6 * (now_s - began_s) / (CONNECTIONS * SENT_BY_EACH))
        began_s = time.process_time()
    server.close()
    return found


def _application() -> Any:
    """What follows a hello on an agent's connection."""
    from engine_agent.protocol.messages import Hello
    from engine_agent.protocol.states import AgentKind
    from fleet.agents.consumers import hub as hubs
    from fleet.agents.consumers import socket as sockets
    from fleet.agents.consumers.handlers import NodeHandler
    from fleet.agents.services.enrolment import AgentIdentity

    for module, limit, value in (
        *((sockets, name, 1e12) for name in ("FRAMES_PER_S", "FRAMES_BURST", "BYTES_PER_S", "BYTES_BURST")),
        (hubs, "HEARTBEATS_APART_S", 0.0),
    ):
        setattr(module, limit, value)
    hub = hubs.AgentHub({AgentKind.NODE: NodeHandler()})
    numbers = count()

    async def application(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        name = f"n-{next(numbers)}"
        hello = Hello(1, AgentKind.NODE, name, "boot", "1")
        session = hubs.AgentSession(AgentIdentity(AgentKind.NODE, name, "r", name), hello, _nothing, _nothing)
        if (expect := scope.get("switchyard.expect_message")) is not None:
            session.expect_heartbeat = partial(expect, take=partial(hub.take_heartbeat, session))
        try:
            await sockets.AgentSocket(hub)._receive_messages(receive, session)
        except sockets._Closed:
            return

    return application


async def _nothing(_: Any) -> None:
    return


def _tls(folder: Path) -> ssl.SSLContext:
    from engine_agent.node.identity import throwaway_certificate

    (folder / "pem").write_text(throwaway_certificate())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_cert_chain(folder / "pem")
    return context


def _send_all(port: int, rounds: int) -> None:
    """The client: after each frame of all connections it waits until the last one's ping was answered."""
    from engine_agent.protocol.codec import encode
    from engine_agent.protocol.messages import Health, Heartbeat, Observed, Report
    from engine_agent.protocol.states import EngineState
    from engine_agent.protocol.telemetry_messages import NodeTelemetry

    ready = Observed(EngineState.READY, "sim-us-east-1-1", 3, 1, engine_pid=4711)
    use = NodeTelemetry(host_cpu_percent=12.5, host_memory_used_bytes=2**31, agent_rss_bytes=2**26)
    report = Report(1, ready, Health(ok=True, probe_ms=3.2, checked_s_ago=1.5), telemetry=use)
    frames = {
        "heartbeat": Frame(Opcode.TEXT, encode(Heartbeat(1))).serialize(mask=True),
        "ping": Frame(Opcode.PING, b"1234").serialize(mask=True),
        "report": Frame(Opcode.TEXT, encode(report)).serialize(mask=True),
    }
    lines = [_opened(port) for _ in range(CONNECTIONS + 1)]
    *agents, last = lines
    for each in agents:
        each.sendall(frames["report"])
    for _ in range(rounds):
        for name in NAMES:
            _await_pong(last, frames["ping"])
            print("begin", flush=True)
            time.sleep(0.05)
            for _ in range(SENT_BY_EACH):
                for each in agents:
                    each.sendall(frames[name])
                _await_pong(last, frames["ping"])
            print(name, flush=True)
            time.sleep(0.05)
            if name == "ping":
                for each in agents:
                    each.recv(6 * SENT_BY_EACH)


def _opened(port: int) -> ssl.SSLSocket:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    line = context.wrap_socket(socket.create_connection(("127.0.0.1", port)))
    head = "GET /bench HTTP/1.1\r\nhost: b\r\nupgrade: websocket\r\nconnection: Upgrade\r\n"
    line.sendall(f"{head}sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\nsec-websocket-version: 13\r\n\r\n".encode())
    answer = b""
    while not answer.endswith(b"\r\n\r\n"):
        answer += line.recv(1)
    return line


def _await_pong(line: ssl.SSLSocket, ping: bytes) -> None:
    line.sendall(ping)
    answer = b""
    while len(answer) < 6:
        answer += line.recv(6)
