"""Prefill and decode cells killed under load: real cell proxies over TLS, real engines `sim`, and a client that picks
cells and tries again as an ingress does. It counts what no client may see, and what an engine may not keep.

`python -m bench.prefill_decode.kills --seconds 120`: two cells of each role; an engine or a proxy of any is killed
every two seconds and started anew. Exit status 1 if a request failed without a byte, or a block was kept after its
lease.
"""

import argparse
import asyncio
import contextlib
import os
import random
import signal
import ssl
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

import msgspec

from engine_agent.protocol.identity import IdentityKind
from engine_agent.protocol.messages import PrefillCell
from engine_agent.protocol.pairs import Pairs
from tests.engine_agent.authority import FleetOfTests
from tests.engine_agent.proxy.http_stream import ask, read_head, request
from tests.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
HOST, MODEL, LAYOUT = "127.0.0.1", "sim", "a94f01c2"
LEASE_S = 3.0
REQUEST_LIMIT_S, ADMIN_LIMIT_S = 30.0, 5.0
TRIES = 8
"""Of one request on cells in turn, half a second apart after the second: HAProxy's are 3 over as many servers as there
are, and a queue before them."""
PROMPT = "one of many words in a long prompt " * 60
ENGINE_OPTIONS = ("--load-time-s", "0.1", "--prefill-tokens-per-s", "4000", "--decode-step-ms", "10")


@dataclass
class Cell:
    """One cell: an engine and a proxy, which are started anew where they died."""

    name: str
    role: str
    fleet: FleetOfTests
    folder: Path
    ports: dict[str, int] = field(
        default_factory=lambda: {each: free_port() for each in ("engine", "engine_admin", "kv", "proxy", "admin")}
    )
    processes: dict[str, asyncio.subprocess.Process] = field(default_factory=dict)
    pairs: Pairs = field(default_factory=Pairs)

    @property
    def node(self) -> str:
        return f"n-{self.name}"

    def place(self) -> PrefillCell:
        return PrefillCell(self.name, 1, self.node, HOST, self.ports["proxy"], self.ports["kv"], LAYOUT, 16)

    def command(self, part: str) -> list[str]:
        ports = {name: str(port) for name, port in self.ports.items()}
        if part == "engine":
            return [
                *("engine_agent.engines.sim", "--node-id", self.node, "--cell", self.name, "--generation", "1"),
                *("--rank", "0", "--role", "leader", "--leader", f"{HOST}:1", "--followers", "0"),
                *("--port", ports["engine"], "--admin-port", ports["engine_admin"], "--served-model", MODEL),
                *("--cell-role", self.role, "--kv-endpoint", f"{HOST}:{ports['kv']}", "--lease-s", str(LEASE_S)),
                *ENGINE_OPTIONS,
            ]
        return [
            *("engine_agent.proxy", "--node-id", self.node, "--cell", self.name, "--generation", "1"),
            *("--port", ports["proxy"], "--admin-port", ports["admin"], "--engine", f"http://{HOST}:{ports['engine']}"),
            *("--model", MODEL, "--max-concurrency", "16", "--no-access-log", "--priorities"),
            *("--cell-role", self.role, "--kv-layout", LAYOUT, "--identity", str(self.folder / self.node)),
        ]

    async def start(self, part: str) -> None:
        with (self.folder / f"{self.name}-{part}.log").open("ab") as log:
            self.processes[part] = await asyncio.create_subprocess_exec(
                sys.executable, "-m", *self.command(part), cwd=ROOT, stdout=log, stderr=log
            )

    async def is_ready(self) -> bool:
        """Healthy; its proxy is told its pairs by the way, as an agent does that finds others there."""
        status = await self.status()
        if status is None:
            return False
        if status["pairs"] != self.pairs.name:
            await self.admin("admin", request("/pairs", msgspec.json.encode(self.pairs)))
        return bool(status["health"]["ok"])

    async def admin(self, port: str, raw: bytes) -> bytes:
        """An answer's body; empty while nobody answers."""
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            async with asyncio.timeout(ADMIN_LIMIT_S):
                return (await ask(self.ports[port], raw)).body
        return b""

    async def status(self) -> dict[str, Any] | None:
        said = await self.admin("admin", request("/status"))
        return msgspec.json.decode(said) if said else None

    async def metric(self, name: str) -> float | None:
        """Sum of the samples of one of the engine's metrics; None while it does not answer."""
        lines = (await self.admin("engine", request("/metrics"))).decode().splitlines()
        if not lines:
            return None
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name}{{"))


@dataclass
class Rig:
    """All cells and what became of requests."""

    cells: list[Cell]
    context: ssl.SSLContext
    fleet: FleetOfTests
    chance: random.Random
    outcomes: Counter[str] = field(default_factory=Counter)
    killed: Counter[str] = field(default_factory=Counter)
    reported: Counter[str] = field(default_factory=Counter)

    @property
    def decode(self) -> list[Cell]:
        return [cell for cell in self.cells if cell.role == "decode"]

    async def ask_once(self, cell: Cell, body: bytes) -> str:
        """`whole`, `broken` after a byte, or `nothing`."""
        name = self.fleet.name(IdentityKind.NODE, cell.node).dns
        begun = False
        try:
            async with asyncio.timeout(REQUEST_LIMIT_S):
                reader, writer = await asyncio.open_connection(
                    HOST, cell.ports["proxy"], ssl=self.context, server_hostname=name
                )
            try:
                writer.write(request("/v1/completions", body, connection="close"))
                async with asyncio.timeout(REQUEST_LIMIT_S):
                    first_line, _ = await read_head(reader)
                    if first_line.split()[1] != "200":
                        return "nothing"
                    begun = True
                    text = await reader.read()
                return "whole" if b"[DONE]" in text else "broken"
            finally:
                writer.transport.abort()
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            return "broken" if begun else "nothing"

    async def ask_as_an_ingress(self, number: int) -> None:
        body = msgspec.json.encode(
            {"model": MODEL, "prompt": f"{number} {PROMPT}", "max_tokens": 30, "ignore_eos": True, "stream": True}
        )
        for attempt in range(TRIES):
            outcome = await self.ask_once(self.decode[(number + attempt) % len(self.decode)], body)
            if outcome != "nothing":
                self.outcomes[outcome] += 1
                return
            await asyncio.sleep(0.5 if attempt else 0.0)
        self.outcomes["nothing"] += 1

    async def keep_alive(self) -> None:
        """Start what died, and tell proxies their pairs: what agents do."""
        while True:
            for cell in self.cells:
                for part in ("engine", "proxy"):
                    if cell.processes[part].returncode is not None:
                        await cell.start(part)
                await cell.is_ready()
            await asyncio.sleep(0.1)

    async def kill_some(self, every_s: float) -> None:
        """Never of the last decode cell that can answer: an ingress with no cell at all can only refuse."""
        while True:
            await asyncio.sleep(every_s)
            victim = self.chance.choice(self.cells)
            others = [await cell.is_ready() for cell in self.decode if cell is not victim]
            if victim.role == "decode" and not all(others):
                continue
            part = self.chance.choice(("engine", "proxy"))
            if part == "proxy":
                await self.note_reports(victim)
            with contextlib.suppress(ProcessLookupError):
                victim.processes[part].send_signal(signal.SIGKILL)
            self.killed[f"{victim.role} {part}"] += 1

    async def note_reports(self, cell: Cell) -> None:
        """Add what its proxy counted since it started."""
        status = await cell.status()
        if status is None:
            return
        told = status["load"]["handovers"]
        self.reported["handed over"] += told.get("handovers_total", 0)
        for kind in ("alone", "fallbacks"):
            for reason, count in told.get(kind, {}).items():
                self.reported[f"{kind}: {reason}"] += count

    async def kept(self) -> tuple[float, float] | None:
        """Prompts that engines keep, and the most of a cache that one has in use; None: not all of them answer."""
        kept = [await cell.metric("sim:kv_kept_requests") for cell in self.cells]
        used = [await cell.metric("vllm:kv_cache_usage_perc") for cell in self.cells]
        if None in (*kept, *used):
            return None
        return sum(filter(None, kept)), max(each or 0.0 for each in used)


async def run(folder: Path, seconds: float, rate: float, every_s: float, seed: int) -> bool:
    fleet = FleetOfTests()
    cells = [Cell(f"{role}{n}", role, fleet, folder) for role in ("prefill", "decode") for n in (1, 2)]
    prefill = tuple(cell.place() for cell in cells if cell.role == "prefill")
    nodes = tuple(cell.node for cell in cells if cell.role == "decode")
    for cell in cells:
        cell.pairs = Pairs("d", prefill, (), 128) if cell.role == "decode" else Pairs("p", (), nodes)
        fleet.certify(folder / cell.node, IdentityKind.NODE, cell.node)
    ingress = fleet.certify(folder / "ingress", IdentityKind.INGRESS, "i-1")
    rig = Rig(cells, ingress.client_context(), fleet, random.Random(seed))
    keeping: asyncio.Task[None] | None = None
    try:
        for cell in cells:
            for part in ("engine", "proxy"):
                await cell.start(part)
        while not all([await cell.is_ready() for cell in cells]):  # noqa: ASYNC110 - they are other processes
            await asyncio.sleep(0.1)
        keeping = asyncio.create_task(rig.keep_alive())
        return await _load(rig, seconds, rate, every_s)
    finally:
        if keeping is not None:
            keeping.cancel()
            await asyncio.wait([keeping])
        for cell in cells:
            for process in cell.processes.values():
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()


async def _load(rig: Rig, seconds: float, rate: float, every_s: float) -> bool:
    killing = asyncio.create_task(rig.kill_some(every_s))
    asking, ends, number = set[asyncio.Task[None]](), monotonic() + seconds, 0
    while monotonic() < ends:
        asking.add(asyncio.create_task(rig.ask_as_an_ingress(number)))
        number += 1
        await asyncio.sleep(rig.chance.expovariate(rate))
    killing.cancel()
    await asyncio.wait(asking)  # each request has a limit
    for cell in rig.cells:
        await rig.note_reports(cell)
    deadline = monotonic() + LEASE_S + 30.0
    while (kept := await rig.kept()) != (0.0, 0.0) and monotonic() < deadline:  # noqa: ASYNC110 - the same
        await asyncio.sleep(0.2)
    lost = rig.outcomes["nothing"]
    print(f"| requests | {number} |\n| answered whole | {rig.outcomes['whole']} |")
    print(f"| broken after a byte | {rig.outcomes['broken']} |\n| failed without a byte | {lost} |")
    print(f"| prompts kept after the lease, and the cache in use | {kept} |")
    for name, counts in (("killed", rig.killed), ("reported", rig.reported)):
        print(f"| {name} | {', '.join(f'{key} {count}' for key, count in sorted(counts.items()))} |")
    print(f"| load average | {os.getloadavg()[0]:.1f} |")
    return lost == 0 and kept == (0.0, 0.0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--rate", type=float, default=6.0, help="requests a second")
    parser.add_argument("--kill-every-s", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    print("| what | figure |\n| --- | --- |")
    with tempfile.TemporaryDirectory(prefix="prefill-decode-") as folder:
        held = asyncio.run(run(Path(folder), options.seconds, options.rate, options.kill_every_s, options.seed))
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
