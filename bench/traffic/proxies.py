"""Requests/s, latency and CPU time of our path next to PyPI's routers.

Cells that cost next to nothing take requests directly, through our ingress, through our ingress and cell proxies, and
through the routers on PyPI, in rounds that alternate within one run. Every round is appended to a file; `report` sums
it up. With `--apart` each contender has one processor for itself, and load and cells have another: where all share two,
what load and cells take, the same for all, hides a part of what differs.

    .venv/bin/python -m bench proxies [--rounds 5] [--only ingress,direct] [--apart]
"""

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from bench import RESULTS, note
from bench.traffic import contenders
from bench.traffic.contenders import MODEL, PEERS, PLACES, Contender, Peer
from engine_agent.node.identity import Identity
from engine_agent.protocol.identity import IdentityKind, IdentityName
from engine_agent.protocol.ingress_messages import Affinity, CellEndpoint
from kernel.authority import Authority, authority_make, certificate_sign, revocations_sign

SOURCE = Path(__file__).with_name("wire.c")
ZIG = Peer("zig", "ziglang==0.13.0", ())
"""A C compiler from PyPI, for machines without one."""
PATIENCE_S = 30.0
BASE_PORT = 27000


@dataclass(frozen=True)
class Round:
    """What one client run saw. `first_us` are times to the first event, in microseconds."""

    requests: int
    seconds: float
    errors: int
    events: int
    cpu_s: float
    complaint: str
    first_us: list[int]


def wire_build(cache: Path) -> Path:
    """The program, compiled unless a newer one is there. Raises RuntimeError if it does not compile."""
    program = cache / "wire"
    if program.exists() and program.stat().st_mtime > SOURCE.stat().st_mtime:
        return program
    cache.mkdir(parents=True, exist_ok=True)
    compiler = [shutil.which("cc") or shutil.which("gcc") or shutil.which("clang") or ""]
    if not compiler[0]:
        compiler = [str(contenders.install(ZIG, cache) / "python"), "-m", "ziglang", "cc"]
    done = subprocess.run(
        [*compiler, "-O2", "-o", str(program), str(SOURCE), "-lm"], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{SOURCE.name} does not compile: {done.stderr.strip()}")
    return program


@contextlib.contextmanager
def wire_cells(program: Path, port: int, count: int) -> Iterator[subprocess.Popen[bytes]]:
    """Stub cells on `port`, `port` + 1, …, in one process."""
    child = subprocess.Popen([program, "serve", str(port), str(count)])
    try:
        yield child
    finally:
        child.kill()
        child.wait()


def wire_ask(program: Path, how: str, port: int, count: int, seconds: float, body: dict[str, Any]) -> Round:
    """Run one client, `closed` with `count` connections or `rate` with `count` requests a second."""
    command = [str(program), how, str(port), str(count), str(seconds), json.dumps(body, separators=(",", ":"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds + PATIENCE_S, check=True)
    measured = json.loads(done.stdout)
    return Round(**{name: measured[name] for name in Round.__dataclass_fields__})


FLEET_ID = "f-be0c4be0"
WHOLE_PATH, PLAIN_PATH = "ingress + cell proxy", "ingress + cell proxy (plain links)"
CELLS = 2
CONNECTIONS = 64
CLOSED_S, RATE_S, CHUNKS_S = 1.5, 3.0, 1.5
PROMPT = {"model": MODEL, "messages": [{"role": "user", "content": "why? " * 100}]}
WHOLE: dict[str, Any] = {**PROMPT, "max_tokens": 1}
STREAM: dict[str, Any] = {**PROMPT, "stream": True, "max_tokens": 16, "seed": 20_000}
"""16 tokens, 20 ms apart."""
FLOOD: dict[str, Any] = {**PROMPT, "stream": True, "max_tokens": 200, "seed": 1_000}
"""200 tokens, 1 ms apart; 128 such streams offer 128,000 chunks a second, more than anything here relays."""
FLOOD_STREAMS = 128
INGRESSES: tuple[tuple[str, Affinity | None, tuple[str, ...]], ...] = (
    ("ingress", None, ()),
    ("ingress, log off", None, ("--no-access-log",)),
    ("ingress, affinity", Affinity(), ()),
)
"""As it is; as the peers are, without a line for every request; and with what only some pools have."""


class BenchFleet:
    fleet_id = FLEET_ID

    @cached_property
    def _authority(self) -> Authority:
        return authority_make(FLEET_ID, datetime.now(UTC))

    def certify_ingress(self, home: Path) -> None:
        self._certify(home, IdentityName(FLEET_ID, IdentityKind.INGRESS, "i-bench"))

    def certify_node(self, home: Path, node: str) -> None:
        self._certify(home, IdentityName(FLEET_ID, IdentityKind.NODE, node))

    def _certify(self, home: Path, name: IdentityName) -> None:
        identity, now = Identity(home), datetime.now(UTC)
        issued = certificate_sign(self._authority, name, identity.signing_request(), now)
        revoked = revocations_sign(self._authority, (), 1)
        identity.store(chain=issued.pem, bundle=self._authority.certificate_pem, revoked=revoked)


@contextlib.contextmanager
def on_processors(numbers: set[int]) -> Iterator[None]:
    """Pins this process to these processors during the block, and processes that it starts permanently."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, numbers)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextlib.contextmanager
def everything(
    program: Path, base: int, only: set[str], processors: set[int]
) -> Iterator[tuple[list[Contender], dict[str, str]]]:
    """All contenders, up and answering, on these processors; and of those that are not, why."""
    folder = RESULTS / "runs"
    folder.mkdir(parents=True, exist_ok=True)
    stubs = [base + number for number in range(CELLS)]
    with ExitStack() as stack:
        stack.enter_context(wire_cells(program, base, CELLS))
        with on_processors(processors):
            found, absent = _begin(stack, folder, base, stubs, only)
        yield [Contender("direct", base), *found], absent


def _begin(
    stack: ExitStack, folder: Path, base: int, stubs: list[int], only: set[str]
) -> tuple[list[Contender], dict[str, str]]:
    found: list[Contender] = []
    absent: dict[str, str] = {}
    if not only or "ingress" in only:
        ends = [CellEndpoint(f"c-{port}", 1, "127.0.0.1", port, PLACES) for port in stubs]
        for number, (name, affinity, options) in enumerate(INGRESSES):
            port = base + 10 + number
            process = stack.enter_context(contenders.ingress(folder / name, port, ends, affinity, *options))
            found.append(Contender(name, port, (process,)))
    if not only or WHOLE_PATH in only:
        found.append(
            stack.enter_context(_whole_path(folder / "whole-path", base + 20, stubs, WHOLE_PATH, BenchFleet()))
        )
    if not only or PLAIN_PATH in only:
        found.append(stack.enter_context(_whole_path(folder / "plain-path", base + 60, stubs, PLAIN_PATH, None)))
    for number, peer in enumerate(PEERS):
        if only and peer.name not in only:
            continue
        try:
            programs = contenders.install(peer, RESULTS)
            port = base + 200 + number
            process = stack.enter_context(contenders.peer_process(peer, programs, folder, port, stubs))
            contenders.wait_until_it_answers(port, process=process)
            found.append(Contender(peer.name, port, (process,), peer.rate))
        except (RuntimeError, OSError) as error:
            absent[peer.name] = str(error)
    for contender in found:
        contenders.wait_until_it_answers(contender.port)
    return found, absent


@contextlib.contextmanager
def _whole_path(folder: Path, port: int, stubs: list[int], name: str, fleet: BenchFleet | None) -> Iterator[Contender]:
    with ExitStack() as stack:
        certify = fleet.certify_node if fleet else None
        proxies = [
            stack.enter_context(contenders.cell_proxy(folder, number, port + 10 + 10 * number, stub, certify))
            for number, stub in enumerate(stubs)
        ]
        ends = [end for end, _ in proxies]
        process = stack.enter_context(
            contenders.ingress(folder / "ingress", port, ends, certify=fleet.certify_ingress if fleet else None)
        )
        contenders.wait_until_it_answers(port)
        yield Contender(name, port, (process, *(proxy for _, proxy in proxies)))


def measure(program: Path, contender: Contender) -> list[dict[str, Any]]:
    rows = []
    for kind, how, count, seconds, body in (
        ("closed", "closed", CONNECTIONS, CLOSED_S, WHOLE),
        ("rate", "rate", contender.rate, RATE_S, STREAM),
        ("flood", "closed", FLOOD_STREAMS, CHUNKS_S, FLOOD),
    ):
        before = contender.cpu_s()
        seen = wire_ask(program, how, contender.port, count, seconds, body)
        first = sorted(seen.first_us)
        shares = (0.5, 0.9, 0.99) if first else ()
        rows.append(
            {
                "contender": contender.name,
                "kind": kind,
                "count": count,
                "seconds": seen.seconds,
                "requests": seen.requests,
                "errors": seen.errors,
                "events": seen.events,
                "complaint": seen.complaint,
                "client_cpu_s": seen.cpu_s,
                "cpu_s": contender.cpu_s() - before,
                "resident_mib": contender.resident_mib(),
                "first_us": {str(share): first[min(len(first) - 1, int(share * len(first)))] for share in shares},
            }
        )
        time.sleep(0.2)
    return rows


def main(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="names of contenders, with commas; direct is always measured")
    parser.add_argument("--apart", action="store_true", help="one processor for the contender, another for all else")
    options = parser.parse_args()
    bench = "proxies_apart" if options.apart else "proxies"
    program = wire_build(RESULTS)
    processors = os.sched_getaffinity(0)
    ours, theirs = ({min(processors)}, {max(processors)}) if options.apart else (processors, processors)
    only = {name for name in options.only.split(",") if name}
    with on_processors(ours), everything(program, BASE_PORT, only, theirs) as (found, absent):
        for name, reason in absent.items():
            print(f"left out: {name}: {reason}")
        for turn in range(options.rounds):
            order = found[turn % len(found) :] + found[: turn % len(found)]
            for contender in order:
                for row in measure(program, contender):
                    note(bench, {"at": time.time(), "load": os.getloadavg()[0], **row})
        note(bench, {"absent": absent})
