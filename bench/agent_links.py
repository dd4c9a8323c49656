"""What TLS costs web for each agent that connects and for each report, beside plain links, in one run.

    .venv/bin/python -m bench.agent_links --agents 200 --reports 50 --rounds 5

Web's own protocols and listener in a process of their own, around an application that accepts and reads; agents hold
certificates and connect as agents do. Rounds alternate; what is counted is processor time, so that other work on the
machine matters little.
"""

import argparse
import asyncio
import os
import socket
import ssl
import statistics
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from websockets.asyncio.client import ClientConnection, connect

from engine_agent.protocol.codec import encode
from engine_agent.protocol.identity import CONTROL_ID, IdentityKind
from engine_agent.protocol.messages import Health, Load, Observed, Report
from engine_agent.protocol.states import EngineState
from engine_agent.runtime.identity import Identity, renewed_server_context
from tests.engine_agent.authority import FleetOfTests

AT_ONCE = 20
CREDENTIAL = f"sw_00000000_{'5e' * 24}"
REPORT = encode(
    Report(
        seq=1,
        observed=Observed(state=EngineState.READY, cell="sim-70b-us-east-1-1", generation=3, rank=0, engine_pid=4711),
        health=Health(ok=True, probe_ms=3.2, checked_s_ago=1.5),
        load=Load(in_flight=3),
    )
).decode()


async def _accept(scope: Any, receive: Any, send: Any) -> None:
    await receive()
    await send({"type": "websocket.accept"})
    while (event := await receive())["type"] == "websocket.receive":
        if event.get("text") == "done":
            await send({"type": "websocket.send", "text": "done"})


async def _serve(home: Path, plain: int, encrypted: int) -> None:
    import uvicorn
    from uvicorn.server import ServerState

    from controlplane.http_connections import HttpCrowd, http_connections
    from controlplane.web import server_config
    from fleet.consumers.knocks import Knock, Knocks

    Knocks.judge = lambda *_, **__: Knock.LOOKED_UP  # type: ignore[method-assign]
    config: uvicorn.Config = server_config(_accept)
    config.load()
    state = ServerState()
    make = http_connections(config, state, HttpCrowd(most=2_000, head_s=5.0))
    context = renewed_server_context(Identity(home), client_certificate=ssl.CERT_OPTIONAL)
    for port, tls in ((plain, None), (encrypted, context)):
        await asyncio.get_running_loop().create_server(
            lambda: make(lambda: None),
            "127.0.0.1",
            port,
            ssl=tls,
            backlog=2048,
        )
    print("ready", flush=True)
    await asyncio.Event().wait()


class Web:
    """The process that is measured."""

    def __init__(self, home: Path) -> None:
        self.ports = {"plain": _free_port(), "TLS": _free_port()}
        command = [sys.executable, "-m", "bench.agent_links", "--serve", str(home)]
        command += [str(port) for port in self.ports.values()]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        if self._process.stdout is None or self._process.stdout.readline().strip() != "ready":
            raise SystemExit("web did not start")

    def cpu_ms(self) -> float:
        """Of its one thread."""
        return int(Path(f"/proc/{self._process.pid}/schedstat").read_text().split()[0]) / 1e6

    def resident_kib(self) -> float:
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return float(status.partition("VmRSS:")[2].split()[0])

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


async def _round(web: Web, way: str, identities: list[Identity], name: str, reports: int) -> tuple[float, float, float]:
    """Milliseconds of web's processor for a connection, microseconds for a report, and KiB that web grew by for an
    agent."""
    gate = asyncio.Semaphore(AT_ONCE)

    async def join(identity: Identity) -> ClientConnection:
        tls = {"ssl": identity.client_context(), "server_hostname": name} if way == "TLS" else {}
        async with gate:
            return await connect(
                f"{'wss' if tls else 'ws'}://127.0.0.1:{web.ports[way]}/agents/ws",
                additional_headers={"Authorization": f"Bearer {CREDENTIAL}"},
                compression=None,
                proxy=None,
                open_timeout=60,
                **tls,
            )

    async def report(agent: ClientConnection) -> None:
        for _ in range(reports):
            await agent.send(REPORT)
            await asyncio.sleep(0)
        await agent.send("done")
        await agent.recv()

    before, small = web.cpu_ms(), web.resident_kib()
    agents = await asyncio.gather(*(join(identity) for identity in identities))
    connected = web.cpu_ms()
    for start in range(0, len(agents), AT_ONCE):
        await asyncio.gather(*(report(agent) for agent in agents[start : start + AT_ONCE]))
    reported, large = web.cpu_ms(), web.resident_kib()
    await asyncio.gather(*(agent.close() for agent in agents))
    per_report_us = 1000 * (reported - connected) / (len(agents) * reports)
    return (connected - before) / len(agents), per_report_us, (large - small) / len(agents)


async def _measure(options: argparse.Namespace, folder: Path) -> None:
    fleet = FleetOfTests()
    fleet.certify(folder / "web", IdentityKind.CONTROL, CONTROL_ID)
    identities = [
        fleet.certify(folder / f"n-{number}", IdentityKind.NODE, f"n-{number}") for number in range(options.agents)
    ]
    name = fleet.name(IdentityKind.CONTROL, CONTROL_ID).dns
    web = Web(folder / "web")
    figures: dict[str, list[tuple[float, float]]] = {"plain": [], "TLS": []}
    grown_kib: dict[str, float] = {}
    try:
        for number in range(options.rounds + 1):
            for way, seen in figures.items():
                *figure, kib = await _round(web, way, identities, name, options.reports)
                if number:  # the first warms up, and takes the memory that later ones use again
                    seen.append((figure[0], figure[1]))
                else:
                    grown_kib[way] = kib
    finally:
        web.stop()
    print(
        f"{options.agents} agents, {options.reports} reports of {len(REPORT)} bytes each, medians of {options.rounds}"
    )
    print(f"load average {os.getloadavg()[0]:.1f}")
    for way, seen in figures.items():
        connections, reports = (sorted(values) for values in zip(*seen, strict=True))
        connection, report = statistics.median(connections), statistics.median(reports)
        print(
            f"{way}: {connection:.2f} ms of web a connection ({connections[0]:.2f} to {connections[-1]:.2f}),"
            f" {report:.0f} us a report ({reports[0]:.0f} to {reports[-1]:.0f}),"
            f" {grown_kib[way]:.0f} KiB an agent"
        )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        import django
        import uvloop

        os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.settings")
        os.environ.setdefault("SWITCHYARD_SECRET_KEY", "of-a-bench-that-signs-nothing-0123456789-abcdefghij")
        django.setup()
        uvloop.run(_serve(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])))
        return
    parser = argparse.ArgumentParser(prog="bench.agent_links", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--agents", type=int, default=200)
    parser.add_argument("--reports", type=int, default=50, help="of each agent")
    parser.add_argument("--rounds", type=int, default=5)
    with TemporaryDirectory(prefix="switchyard-links-") as folder:
        asyncio.run(_measure(parser.parse_args(), Path(folder)))


if __name__ == "__main__":
    main()
