"""Streams while the host of their cell loses power: two cells and an ingress on hosts of a laboratory, without a
control plane. A host without power is silent: no connection is closed."""

import asyncio
import contextlib
import shlex
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from bench import ROOT, percentile
from bench.traffic import contenders
from bench.traffic.continued_rollout import streaming
from bench.traffic.killable_cells import SIM, VERSION
from bench.traffic.sim_cells import Ports, engine_command, proxy_command
from bench.traffic.stream_reader import StreamReader
from engine_agent.ingress.agent import JOURNAL_FILE
from engine_agent.ingress.config import RELAY_SOCKETS
from engine_agent.ingress.main import JOIN_TOKEN_VARIABLE
from engine_agent.ingress.relay_processes import read_counts
from engine_agent.node.journal import Journal
from engine_agent.protocol.identity import PLAIN_LINKS_VARIABLE
from engine_agent.protocol.ingress_messages import CellEndpoint, Pool, RoutingTable
from engine_agent.relay.meter import RelayCounts
from lab.hosts import client
from lab.hosts.file_tree import START_AT_BOOT, place_of, write
from lab.hosts.places import Places, read_places
from lab.hosts.topology import Topology

INGRESS, CELLS = "c1", ("c2", "c3")
"""Hosts of the control plane's site, because only those see this checkout."""
INGRESS_HOME, INGRESS_PORT = "/var/lib/ingress", 8080
PORTS = Ports(7000, 7001, 7002, 7003)
REGION = "us-east-1"
READY_WITHIN_S = 300.0
RUNS_BEFORE_S, RUNS_AFTER_S = 8.0, 20.0
"""Streams begin that long before and after the loss."""
REFUSED = "status 503"
"""No cell is up: on a busy machine health checks of the other one fail as well. Clients send such a request again."""


@dataclass(frozen=True)
class Laboratory:
    """`port`: of the ingress, on this host. `relays`: the folder with the sockets of its relays."""

    places: Places
    port: int
    relays: Path

    async def counts(self) -> list[RelayCounts]:
        return [await read_counts(socket) for socket in self.relays.glob("[0-9]*.sock")]

    async def serves(self) -> None:
        """Waits until requests pass the relay and reach every cell."""
        url, cells = f"http://127.0.0.1:{self.port}/v1/chat/completions", set[str]()
        body = {"model": contenders.MODEL, "max_tokens": 8, "messages": [{"role": "user", "content": "ping"}]}
        async with httpx.AsyncClient(timeout=30) as http, asyncio.timeout(READY_WITHIN_S):
            while len(cells) < len(CELLS) or not any(each.requests for each in await self.counts()):
                asked = [http.post(url, json=body) for _ in range(4 * len(CELLS))]
                answers = await asyncio.gather(*asked, return_exceptions=True)
                found = (each.headers.get("x-switchyard-cell") for each in answers if isinstance(each, httpx.Response))
                cells = {cell for cell in found if cell}
                await asyncio.sleep(0.5)

    def continued(self) -> Counter[str]:
        """Streams that continued, by reason."""
        found = Counter[str]()
        for each in asyncio.run(self.counts()):
            if pool := each.pools.get(contenders.MODEL):
                found.update(pool.continued_total)
        return found


def rounds(count: int, rate: float, tokens: int) -> Iterator[dict[str, Any]]:
    """Yields the outcome of each round: the cells' hosts lose power in turn, and get it back."""
    reader = StreamReader("chat", tokens)
    with laboratory() as lab:
        asyncio.run(_until_relayed(lab))
        expected = asyncio.run(reader.read(lab.port, 0))()
        for number in range(count):
            host = CELLS[number % len(CELLS)]
            asyncio.run(lab.serves())
            before = lab.continued()
            with streaming(reader, lab.port, rate) as seen:
                time.sleep(RUNS_BEFORE_S)
                client.ask(lab.places, "power-off", name=host)
                gone_at = time.monotonic()
                time.sleep(RUNS_AFTER_S)
            client.ask(lab.places, "boot", name=host)
            begun = [each for each in seen if not each.error.startswith(REFUSED)]
            pauses = [each.longest_pause_s for each in begun if each.began_at < gone_at < each.ended_at]
            longest = sorted(pauses, reverse=True)[: len(pauses) // len(CELLS)]
            yield {
                "power_off": host,
                "streams": len(begun),
                "refused": len(seen) - len(begun),
                "running": len(pauses),
                "continued": dict(lab.continued() - before),
                "cut": sum(each.is_cut for each in begun),
                "errors": sorted({each.error for each in begun if each.error}),
                "texts_that_differ": sum(each.text != expected.text for each in begun),
                "usages_that_differ": sum(each.usage != expected.usage for each in begun),
                "pauses_s": [round(percentile(longest, share), 2) for share in (0.0, 0.5, 1.0)] if longest else [],
            }


async def _until_relayed(lab: Laboratory) -> None:
    async with asyncio.timeout(READY_WITHIN_S):
        while True:
            with contextlib.suppress(OSError):
                if await lab.counts():
                    return
            await asyncio.sleep(0.2)


@contextlib.contextmanager
def laboratory() -> Iterator[Laboratory]:
    with tempfile.TemporaryDirectory(prefix="power-") as folder:  # its path is short enough for sockets
        places, topology = read_places({"SWITCHYARD_HOME": folder}), Topology((REGION,), 3, 0, 0)
        address = {name: str(topology.host(name).address) for name in (INGRESS, *CELLS)}
        for number, host in enumerate(CELLS):
            _start_at_boot(places, host, _cell_commands(number, address[host]))
        home = place_of(places.files_of(INGRESS), INGRESS_HOME)
        home.mkdir(parents=True)
        Journal(home / JOURNAL_FILE, RoutingTable).save(_table([address[host] for host in CELLS]))
        _start_at_boot(places, INGRESS, [_ingress_command(address[INGRESS])])
        with socket.create_server(("127.0.0.1", 0)) as free:
            port: int = free.getsockname()[1]
        client.start(topology, places, [client.Forward(port, INGRESS, INGRESS_PORT)])
        try:
            yield Laboratory(places, port, home / RELAY_SOCKETS)
        finally:
            client.stop(places, wipe=True)


def _start_at_boot(places: Places, host: str, commands: Sequence[str]) -> None:
    lines = ["#!/bin/sh", f"cd '{ROOT}'", *(f"{command} &" for command in commands), "wait", ""]
    write(places.files_of(host), f"{START_AT_BOOT}/bench.start", "\n".join(lines))


def _cell_commands(number: int, address: str) -> list[str]:
    name = ("--node-id", f"n-{number:08x}", "--cell", f"c-{number}", "--generation", "1")
    engine = engine_command(name, PORTS, SIM, 1.0)
    proxy = (*proxy_command(name, PORTS, SIM.max_num_seqs), "--host", address, "--replays")
    return [shlex.join(engine), shlex.join(proxy)]


def _ingress_command(address: str) -> str:
    words = (sys.executable, "-m", "engine_agent", "ingress", "--ingress-id", "i-bench", "--region", REGION)
    where = ("--home", INGRESS_HOME, "--server", contenders.NO_CONTROL_PLANE, "--host", address)
    variables = f"{JOIN_TOKEN_VARIABLE}=none {PLAIN_LINKS_VARIABLE}=1"
    return f"{variables} {shlex.join((*words, *where, '--port', str(INGRESS_PORT)))}"


def _table(addresses: Sequence[str]) -> RoutingTable:
    cells = (
        CellEndpoint(f"c-{number}", 1, address, PORTS.proxy, SIM.max_num_seqs, node="n-0", version=VERSION)
        for number, address in enumerate(addresses)
    )
    name = contenders.MODEL
    pool = Pool(name, (name,), "realtime", tuple(cells), (), {REGION: 1.0}, continues=True)
    return RoutingTable(1, REGION, (pool,))
