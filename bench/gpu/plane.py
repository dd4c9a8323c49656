"""The smallest control plane for agents on one machine, and the agents under it. It enrols them, sends orders, serves
engine builds from a folder, and keeps the last report of each agent. It decides nothing and knows no other machine."""

import asyncio
import contextlib
import json
import os
import random
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import uvicorn

from engine_agent.node import procfs
from engine_agent.protocol.codec import decode_up, encode
from engine_agent.protocol.identity import PLAIN_LINKS_VARIABLE
from engine_agent.protocol.machine_messages import NodeResources
from engine_agent.protocol.messages import Assignment, CertificateRequest, Desired, EnginePlan, Fault, Hello, Report
from engine_agent.protocol.ports import PORTS_PER_NODE, PROXY
from engine_agent.protocol.states import EngineState, MemberRole, Phase

LOOPBACK = "127.0.0.1"
PORTS = range(22_000, 32_000)
"""Above those of the local provider's first nodes, below those of outgoing connections."""
STOP_LIMIT_S = 30.0
LAST_LINES = 30
T = TypeVar("T")


class TooLate(Exception):
    """Something did not happen within its limit; the text says what, and the last state."""


class Plane:
    """Serves agents on loopback. `builds` maps the hexadecimal digest of a build to its folder."""

    def __init__(self, builds: dict[str, Path]) -> None:
        self.builds = builds
        self.token = secrets.token_urlsafe()
        self.hellos: dict[str, Hello] = {}
        self.reports: dict[str, Report] = {}
        self.faults: dict[str, list[Fault]] = {}
        self.bytes_sent = 0
        self.url = ""
        self._credentials: set[str] = set()
        self._orders: dict[str, Desired] = {}
        self._send: dict[str, Callable[[dict[str, Any]], Any]] = {}

    async def order(self, desired: Desired) -> None:
        self._orders[desired.node] = desired
        if send := self._send.get(desired.node):
            await send({"type": "websocket.send", "text": encode(desired).decode()})

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["Plane"]:
        config = uvicorn.Config(
            self._serve, interface="asgi3", log_level="warning", lifespan="off", ws="websockets-sansio"
        )
        config.timeout_graceful_shutdown = 1
        server = uvicorn.Server(config)
        with socket.create_server((LOOPBACK, 0)) as listener:
            self.url = f"http://{LOOPBACK}:{listener.getsockname()[1]}"
            serving = asyncio.create_task(server._serve([listener]))
            try:
                yield self
            finally:
                server.should_exit = True
                await serving

    async def _serve(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        sent = dict(scope["headers"]).get(b"authorization", b"").decode().removeprefix("Bearer ")
        if scope["type"] == "websocket":
            await (self._converse(receive, send) if sent in self._credentials else send({"type": "websocket.close"}))
        elif scope["method"] == "POST":
            await self._enrol(sent, send)
        elif sent in self._credentials:
            await self._hand_out(scope["path"], send)
        else:
            await _answer(send, 401, b"{}")

    async def _enrol(self, token: str, send: Any) -> None:
        if not secrets.compare_digest(token, self.token):
            await _answer(send, 401, b"{}")
            return
        credential = secrets.token_urlsafe()
        self._credentials.add(credential)
        await _answer(send, 200, json.dumps({"credential": credential}).encode())

    async def _hand_out(self, path: str, send: Any) -> None:
        """Whole files: on one machine no transfer is interrupted."""
        digest, _, name = path.removeprefix("/agents/builds/").partition("/")
        file = self.builds.get(digest, Path("/nonexistent")) / Path(name).name
        if not file.is_file():
            await _answer(send, 404, b"{}")
            return
        content = await asyncio.to_thread(file.read_bytes)
        self.bytes_sent += len(content)
        await _answer(send, 200, content)

    async def _converse(self, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        node = ""
        while (event := await receive())["type"] == "websocket.receive":
            message = decode_up(event.get("bytes") or event["text"])
            if isinstance(message, Hello):
                node, self.hellos[message.id], self._send[message.id] = message.id, message, send
                if order := self._orders.get(node):
                    await send({"type": "websocket.send", "text": encode(order).decode()})
            elif isinstance(message, Report):
                self.reports[node] = message
            elif isinstance(message, Fault):
                self.faults.setdefault(node, []).append(message)
            elif isinstance(message, CertificateRequest):
                continue


async def _answer(send: Any, status: int, body: bytes) -> None:
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def until(condition: Callable[[], T | None], limit_s: float, what: Callable[[], str]) -> T:
    """Polls until the condition is true and returns its value. Raises TooLate after `limit_s`."""
    ends_s = time.monotonic() + limit_s
    while not (found := condition()):
        if time.monotonic() > ends_s:
            raise TooLate(f"not within {limit_s:.0f} s: {what()}")
        await asyncio.sleep(0.02)
    return found


def free_ports(nodes: int) -> list[int]:
    """Returns the first port of each node, of free blocks in a row from a random place. Raises TooLate if there are
    none."""
    count = nodes * PORTS_PER_NODE
    blocks = [range(first, first + count) for first in PORTS[:-count:count]]
    random.shuffle(blocks)
    for block in blocks:
        if all(map(_is_free, block)):
            return list(block[::PORTS_PER_NODE])
    raise TooLate(f"no {count} free ports in a row from {PORTS.start} to {PORTS.stop - 1}")


def _is_free(port: int) -> bool:
    with socket.socket() as probe, contextlib.suppress(OSError):
        probe.bind((LOOPBACK, port))
        return True
    return False


class Node:
    """One node agent and the cell that it serves. `owns` None: the node has the whole machine."""

    def __init__(
        self, plane: Plane, folder: Path, port_base: int, environment: dict[str, str], owns: NodeResources | None = None
    ) -> None:
        self.port_base = port_base
        self.id = f"n-{self.port_base:08x}"
        self.home = folder / self.id
        self._plane, self._owns, self._environment = plane, owns, environment
        self._agent: subprocess.Popen[bytes] | None = None
        self._version = self.generation = 0

    @property
    def proxy_port(self) -> int:
        return self.port_base + PROXY

    @property
    def report(self) -> Report | None:
        return self._plane.reports.get(self.id)

    def start(self) -> None:
        self.home.mkdir(parents=True, exist_ok=True)
        argv = [sys.executable, "-m", "engine_agent", "node", "--node-id", self.id, "--home", str(self.home)]
        argv += ["--server", self._plane.url, "--instance-type", "local", "--region", "local", "--host", LOOPBACK]
        argv += ["--port-base", str(self.port_base)]
        argv += ["--owns", msgspec.json.encode(self._owns).decode()] if self._owns else []
        own = {"SWITCHYARD_JOIN_TOKEN": self._plane.token, PLAIN_LINKS_VARIABLE: "1"}
        with (self.home / "agent.log").open("ab") as log:
            self._agent = subprocess.Popen(
                argv, env={**os.environ, **self._environment, **own}, stdout=log, stderr=log, start_new_session=True
            )

    async def serve(self, plan: EnginePlan) -> None:
        """Orders the next generation of the node's cell."""
        self._version, self.generation = self._version + 1, self.generation + 1
        await self._plane.order(
            Desired(
                node=self.id,
                version=self._version,
                assignment=Assignment(
                    cell=f"local.{self.id}",
                    generation=self.generation,
                    rank=0,
                    role=MemberRole.LEADER,
                    phase=Phase.SERVE,
                    plan=plan,
                    peers=(),
                    secret=secrets.token_urlsafe(),
                ),
            )
        )

    async def started(self, limit_s: float) -> None:
        """Waits until the engine of the ordered generation has been started, or failed to."""

        def has_process() -> bool:
            report = self.report
            if report is None or report.observed.generation != self.generation:
                return False
            return report.observed.engine_pid is not None or report.observed.state is EngineState.FAILED

        await until(has_process, limit_s, self.words)

    async def ready(self, limit_s: float) -> None:
        """Waits until the ordered generation serves. Raises TooLate if it fails, or does not within `limit_s`."""
        ended = (EngineState.READY, EngineState.FAILED)

        def ordered() -> Report | None:
            report = self.report
            if report is None or report.observed.generation != self.generation:
                return None
            return report if report.observed.state in ended else None

        report = await until(ordered, limit_s, self.words)
        if report.observed.state is EngineState.FAILED:
            raise TooLate(self.words())

    async def state_is(self, state: EngineState, limit_s: float) -> Report:
        def reported() -> Report | None:
            report = self.report
            return report if report is not None and report.observed.state is state else None

        return await until(reported, limit_s, self.words)

    def kill_engine(self) -> None:
        report = self.report
        if report is None or report.observed.engine_pid is None:
            raise TooLate(f"{self.id} reports no engine to kill")
        os.kill(report.observed.engine_pid, signal.SIGKILL)

    def words(self) -> str:
        report = self.report
        return f"{self.id} reports {report.observed if report else 'nothing'}; last lines of its engine:\n{self.log()}"

    def log(self, name: str = "engine", lines: int = LAST_LINES) -> str:
        file = self.home / f"{name}.log"
        return "\n".join(file.read_text(errors="replace").splitlines()[-lines:]) if file.exists() else "(none)"

    async def stop(self) -> None:
        """Stops the agent with its engine and proxy; kills what does not stop."""
        if self._agent is None:
            return
        argv = [sys.executable, "-m", "engine_agent", "stop-node", "--home", str(self.home)]
        with contextlib.suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(subprocess.run, argv, check=False, timeout=STOP_LIMIT_S, stdout=subprocess.DEVNULL)
        if self._agent.poll() is None:
            self._agent.kill()
        self._agent.wait()
        procfs.kill(procfs.started_by_agents_of(self.id))
        self._agent = None
