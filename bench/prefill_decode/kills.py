"""Prefill and decode cells killed under load: a real ingress with its HAProxy, real cell proxies over TLS and real
engines `sim`. It counts what no client may see, and what an engine may not keep.

`python -m bench.prefill_decode.kills --seconds 120`: two cells of each role; an engine or a proxy of any is killed
every two seconds and started anew. Exit status 1 if a request failed without a byte, or a block was kept after its
lease.
"""

import argparse
import asyncio
import contextlib
import os
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

import msgspec

from engine_agent.protocol.identity import IdentityKind
from engine_agent.protocol.ingress_messages import CellEndpoint, Pool
from engine_agent.protocol.messages import PrefillCell
from engine_agent.protocol.pairs import Pairs
from tests.engine_agent.ingress.ingresses import RunningIngress
from tests.engine_agent.proxy.http_stream import ask, read_body, read_head, request
from tests.engine_agent.tls import fleet_of_rigs
from tests.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
HOST, LAYOUT = "127.0.0.1", "a94f01c2"
LEASE_S = 3.0
ADMIN_LIMIT_S = 5.0
ENGINE_OPTIONS = ("--load-time-s", "0.1", "--prefill-tokens-per-s", "4000", "--decode-step-ms", "10")


@dataclass(frozen=True)
class Trial:
    """What is asked, how often, and when something is killed. `prompt` comes after the number of its request.
    `lease_s`: so long an engine keeps what nobody fetches."""

    model: str = "sim"
    prompt: str = "one of many words in a long prompt " * 60
    tokens: int = 30
    from_tokens: int = 128
    lease_s: float = LEASE_S
    limit_s: float = 30.0
    seconds: float = 120.0
    rate: float = 6.0
    kill_every_s: float = 2.0
    seed: int = 1


@dataclass(eq=False)
class Cell:
    """One cell: an engine and a proxy, which are started anew where they died."""

    name: str
    role: str
    folder: Path
    trial: Trial
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

    def endpoint(self) -> CellEndpoint:
        """As a routing table has it."""
        return CellEndpoint(self.name, 1, HOST, self.ports["proxy"], 16, node=self.node)

    def command(self, part: str) -> list[str]:
        ports = {name: str(port) for name, port in self.ports.items()}
        if part == "engine":
            return [
                *("engine_agent.engines.sim", "--node-id", self.node, "--cell", self.name, "--generation", "1"),
                *("--rank", "0", "--role", "leader", "--leader", f"{HOST}:1", "--followers", "0"),
                *("--port", ports["engine"], "--admin-port", ports["engine_admin"]),
                *("--served-model", self.trial.model),
                *("--cell-role", self.role, "--kv-endpoint", f"{HOST}:{ports['kv']}", "--lease-s", str(LEASE_S)),
                *ENGINE_OPTIONS,
            ]
        return [
            *("engine_agent.proxy", "--node-id", self.node, "--cell", self.name, "--generation", "1"),
            *("--port", ports["proxy"], "--admin-port", ports["admin"], "--engine", f"http://{HOST}:{ports['engine']}"),
            *("--model", self.trial.model, "--max-concurrency", "16", "--no-access-log", "--priorities"),
            *("--cell-role", self.role, "--kv-layout", LAYOUT, "--identity", str(self.folder / self.node)),
        ]

    async def start(self, part: str) -> None:
        with (self.folder / f"{self.name}-{part}.log").open("ab") as log:
            self.processes[part] = await asyncio.create_subprocess_exec(
                sys.executable, "-m", *self.command(part), cwd=ROOT, stdout=log, stderr=log
            )

    def is_dead(self, part: str) -> bool:
        return self.processes[part].returncode is not None

    def kill(self, part: str) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.processes[part].kill()

    async def end(self) -> None:
        for part, process in self.processes.items():
            self.kill(part)
            await process.wait()

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

    cells: Sequence[Cell]
    ingress: RunningIngress
    trial: Trial
    chance: random.Random
    texts: dict[str, str] = field(default_factory=dict)
    """Prompt -> what was answered whole."""
    outcomes: Counter[str] = field(default_factory=Counter)
    killed: Counter[str] = field(default_factory=Counter)
    reported: Counter[str] = field(default_factory=Counter)

    @property
    def decode(self) -> list[Cell]:
        return [cell for cell in self.cells if cell.role == "decode"]

    async def ask(self, number: int) -> None:
        """One request of an application, which tries nothing twice."""
        prompt = f"{number} {self.trial.prompt}"
        asked = {"model": self.trial.model, "prompt": prompt, "max_tokens": self.trial.tokens, "temperature": 0}
        body = msgspec.json.encode({**asked, "ignore_eos": True, "stream": True})
        outcome = "nothing"
        try:
            async with asyncio.timeout(self.trial.limit_s):
                reader, writer = await asyncio.open_connection(HOST, self.ingress.settings.port)
                try:
                    writer.write(request("/v1/completions", body, content_type="application/json"))
                    head = await read_head(reader)
                    status = head[0].split()[1]
                    outcome = "broken" if status == "200" else f"nothing, {status}"
                    answer = await read_body(reader, *head)
                    if status != "200":
                        outcome = f"{outcome} {_code(answer.body)}"
                    elif b"data: [DONE]" in answer.body:
                        outcome, self.texts[prompt] = "whole", _text(answer.body)
                finally:
                    writer.transport.abort()
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # what it is so far
        self.outcomes[outcome] += 1

    async def keep_alive(self) -> None:
        """Start what died, and tell proxies their pairs: what agents do."""
        while True:
            for cell in self.cells:
                for part in ("engine", "proxy"):
                    if cell.is_dead(part):
                        await cell.start(part)
                await cell.is_ready()
            await asyncio.sleep(0.1)

    async def kill_some(self, every_s: float) -> None:
        """Never of the last decode cell that the ingress sees: with no cell at all it can only refuse."""
        while True:
            await asyncio.sleep(every_s)
            victim = self.chance.choice(self.cells)
            seen = self.ingress.cells
            others = [
                seen.get(cell.name) == "up" and await cell.is_ready() for cell in self.decode if cell is not victim
            ]
            if victim.role == "decode" and not all(others):
                continue
            part = self.chance.choice(("engine", "proxy"))
            if part == "proxy":
                await self.note_reports(victim)
            victim.kill(part)
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


def _code(body: bytes) -> str:
    """What a refusal is called."""
    with contextlib.suppress(msgspec.DecodeError, KeyError, TypeError):
        return str(msgspec.json.decode(body)["error"]["code"])
    return "without a code"


def _text(stream: bytes) -> str:
    events = [line.removeprefix(b"data: ") for line in stream.splitlines() if line.startswith(b"data: {")]
    return "".join(choice["text"] for event in events for choice in msgspec.json.decode(event).get("choices", ()))


async def run(
    folder: Path, cells: Sequence[Cell], trial: Trial, judge: Callable[[Rig], Awaitable[bool]] | None = None
) -> bool:
    """Start these cells and an ingress before them, and kill some of them under load. Whether no request failed without
    a byte, nothing was kept, and `judge`, asked while all of them serve, finds no fault."""
    fleet = fleet_of_rigs()
    prefill = tuple(cell.place() for cell in cells if cell.role == "prefill")
    nodes = tuple(cell.node for cell in cells if cell.role == "decode")
    for cell in cells:
        is_decode = cell.role == "decode"
        cell.pairs = Pairs("d", prefill, (), trial.from_tokens) if is_decode else Pairs("p", (), nodes)
        fleet.certify(folder / cell.node, IdentityKind.NODE, cell.node)
    ingress = RunningIngress(folder / "ingress")
    rig = Rig(cells, ingress, trial, random.Random(trial.seed))
    keeping: asyncio.Task[None] | None = None
    try:
        for cell in cells:
            for part in ("engine", "proxy"):
                await cell.start(part)
        while not all([await cell.is_ready() for cell in cells]):  # noqa: ASYNC110 - they are other processes
            await asyncio.sleep(0.1)
        keeping = asyncio.create_task(rig.keep_alive())
        async with ingress.running():
            endpoints = tuple(cell.endpoint() for cell in rig.decode)
            await ingress.route(Pool(trial.model, (trial.model,), "realtime", endpoints, (), {}))
            await ingress.sees(**{cell.name: "up" for cell in rig.decode})
            held = await _load(rig)
            return (judge is None or await judge(rig)) and held
    finally:
        if keeping is not None:
            keeping.cancel()
            await asyncio.wait([keeping])
        for cell in cells:
            await cell.end()


async def _load(rig: Rig) -> bool:
    trial = rig.trial
    killing = asyncio.create_task(rig.kill_some(trial.kill_every_s))
    asking, ends, number = set[asyncio.Task[None]](), monotonic() + trial.seconds, 0
    while monotonic() < ends:
        asking.add(asyncio.create_task(rig.ask(number)))
        number += 1
        await asyncio.sleep(rig.chance.expovariate(trial.rate))
    killing.cancel()
    await asyncio.wait(asking)  # each request has a limit
    for cell in rig.cells:
        await rig.note_reports(cell)
    deadline = monotonic() + trial.lease_s + 60.0
    while (kept := await rig.kept()) != (0.0, 0.0) and monotonic() < deadline:  # noqa: ASYNC110 - the same
        await asyncio.sleep(0.2)
    lost = number - rig.outcomes["whole"] - rig.outcomes["broken"]
    print(f"| requests | {number} |\n| answered whole | {rig.outcomes['whole']} |")
    print(f"| broken after a byte | {rig.outcomes['broken']} |\n| failed without a byte | {lost} |")
    for outcome in sorted(rig.outcomes.keys() - {"whole", "broken"}):
        print(f"| {outcome} | {rig.outcomes[outcome]} |")
    print(f"| prompts kept after the lease, and the cache in use | {kept} |")
    for name, counts in (("killed", rig.killed), ("reported", rig.reported)):
        print(f"| {name} | {', '.join(f'{key} {count}' for key, count in sorted(counts.items()))} |")
    print(f"| load average | {os.getloadavg()[0]:.1f} |", flush=True)
    return lost == 0 and kept == (0.0, 0.0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--rate", type=float, default=6.0, help="requests a second")
    parser.add_argument("--kill-every-s", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=1)
    trial = Trial(**vars(parser.parse_args()))
    print("| what | figure |\n| --- | --- |")
    with tempfile.TemporaryDirectory(prefix="prefill-decode-") as name:
        folder = Path(name)
        cells = [Cell(f"{role}{n}", role, folder, trial) for role in ("prefill", "decode") for n in (1, 2)]
        held = asyncio.run(run(folder, cells, trial))
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
