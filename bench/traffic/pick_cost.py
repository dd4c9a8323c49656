"""What it costs a request that its cell is picked by what cells have in their caches, and what it would cost to ask a
process for it.

First the real ingress before stub cells that answer at once: the fewest requests, sticky cells, and exact ones, whose
eight lists have 4,096 prefixes each, all of the request's among them. Then a bare HAProxy: without any script, with
the one that names a text's beginnings and looks them up, and with one that sends the body to a process in Python, which
does the same, over a UNIX socket. Requests of all kinds take turns, one at a time, on kept connections.

    .venv/bin/python -m bench.traffic.pick_cost [--requests 2000]
"""

import argparse
import asyncio
import hashlib
import json
import multiprocessing
import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from bench.traffic import contenders
from bench.traffic.contenders import MODEL, ROOT
from engine_agent.ingress.haproxy import find_binary
from engine_agent.protocol.cache_events import PREFIXES_PATH, BlockChanges, BlocksStored
from engine_agent.protocol.ingress_messages import Affinity, CellEndpoint
from engine_agent.proxy.prefix_index import PrefixIndex
from engine_agent.proxy.request_prefixes import read_prefixes

RESULTS = ROOT / ".cache" / "bench" / "pick_cost.jsonl"
CELLS = 8
LISTED = 4096
SIZES = {"1 KB": 1_000, "8 KB": 8_000, "24 KB": 24_000}
RULES = {"least": None, "sticky": Affinity(), "exact": Affinity()}
WARM_UP = 100
SCRIPTS = ROOT / "engine_agent" / "ingress"
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
ASK_LUA = """
core.register_action("ask_picker", { "http-req" }, function(txn)
    local body = txn.f:req_body()
    local picker = core.tcp()
    picker:settimeout(1)
    if picker:connect("unix@picker.sock") then
        picker:send(#body .. "\\n" .. body)
        txn:set_var("txn.cell", picker:receive("*l") or "")
    end
    picker:close()
end)
"""
LOOK_UP_LUA = """
local set = {}
core.register_action("look_up", { "http-req" }, function(txn)
    local numbers = {}
    for digits in (txn:get_var("txn.prefixes") or ""):match("%x*$"):gmatch(("%x"):rep(12)) do
        numbers[#numbers + 1] = tonumber(digits, 16)
    end
    for _ = 1, 8 do
        local low, high = 0, #numbers
        while low < high do
            local middle = (low + high + 1) // 2
            if set[numbers[middle]] then low = middle else high = middle - 1 end
        end
    end
end)
"""
BARE = """
global
  nbthread 2
  tune.bufsize 49152
  lua-load-per-thread {scripts}/prompt_prefixes.lua
  lua-load-per-thread look_up.lua
  lua-load-per-thread ask.lua
defaults
  mode http
  timeout client 30s
  timeout server 30s
  timeout connect 5s
  option http-no-delay
frontend plain
  bind 127.0.0.1:{plain}
  http-request wait-for-body time 5s
  default_backend cells
frontend script
  bind 127.0.0.1:{script}
  http-request wait-for-body time 5s
  http-request lua.name_prefixes
  http-request lua.look_up
  default_backend cells
frontend process
  bind 127.0.0.1:{process}
  http-request wait-for-body time 5s
  http-request lua.ask_picker
  default_backend cells
backend cells
  server one 127.0.0.1:{cell}
"""


class StubCell:
    """Answers at once; to exact ingresses it has the text of every request that it was sent."""

    def __init__(self) -> None:
        self._index = PrefixIndex()
        filler = tuple(range(1, LISTED + 1))
        self._index.apply(BlockChanges("e", 0, True, 16, (BlocksStored(0, filler),)))
        for number in range(0, LISTED, 64):
            known = (f"{64 * 256}:" + ",".join(str(256 * (at + 1)) for at in range(64)) + ":").encode()
            known += b"".join(b"%012x" % (number + at + 1) for at in range(64))
            self._learn(f"f{number}", known)
        self._known: set[bytes] = set()

    def _learn(self, name: str, header: bytes) -> None:
        if (request := read_prefixes(header)) is not None:
            self._index.begin(name, request)
            self._index.count(name, 16 * LISTED // 64)
            self._index.apply(BlockChanges("e", 0, False, 16, (BlocksStored(0, tuple(range(1, 65)), name),)))

    async def converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                length = next((int(line[15:]) for line in head.split(b"\r\n") if line[:15] == b"content-length:"), 0)
                await reader.readexactly(length)
                await self._answer(head, writer)
        except (EOFError, OSError):
            writer.close()

    async def _answer(self, head: bytes, writer: asyncio.StreamWriter) -> None:
        target = head.split(b" ", 2)[1].decode()
        if not target.startswith(PREFIXES_PATH):
            writer.write(ANSWER)
            lines = head.split(b"\r\n")
            named = next((line[28:].strip() for line in lines if line.startswith(b"x-switchyard-cache-prefixes:")), b"")
            if named and named not in self._known:
                self._known.add(named)
                self._learn(f"r{len(self._known)}", named)
            return
        asked = dict(pair.split("=") for pair in target.partition("?")[2].split("&"))
        body = msgspec.msgpack.encode(self._index.after(asked["life"], int(asked["after"])))
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body)


async def _serve_cells(ports: list[int]) -> None:
    servers = [await asyncio.start_server(StubCell().converse, "127.0.0.1", port) for port in ports]
    await asyncio.gather(*(server.serve_forever() for server in servers))


async def _serve_picker(path: str) -> None:
    """What a process would do: read the body, name the beginnings of its text, look each up."""
    listed = [set[bytes]() for _ in range(CELLS)]

    async def pick(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not (length := await reader.readline()):
            return  # it was only asked whether it is there
        body = await reader.readexactly(int(length))
        text = json.dumps(msgspec.json.decode(body)["messages"]).encode()
        digest, names, done = b"", [], 0
        while (stop := done + max(256, done // 8)) <= len(text):
            digest = hashlib.blake2b(digest + text[done:stop], digest_size=6).digest()
            names.append(digest)
            done = stop
        depths = [next((at for at, name in enumerate(names) if name not in have), len(names)) for have in listed]
        writer.write(b"c-%d\n" % depths.index(max(depths)))
        await writer.drain()
        writer.close()

    server = await asyncio.start_unix_server(pick, path)
    await server.serve_forever()


def _run(serving: str, argument: Any) -> None:
    uvloop.run({"cells": _serve_cells, "picker": _serve_picker}[serving](argument))


@contextmanager
def _child(serving: str, argument: Any) -> Iterator[None]:
    child = multiprocessing.get_context("spawn").Process(target=_run, args=(serving, argument))
    child.start()
    try:
        yield
    finally:
        child.terminate()
        child.join()


class Lane:
    """One way to the cells, and how long each of its requests took, by the size of its body."""

    def __init__(self, name: str, port: int) -> None:
        self.name = name
        self.seconds: dict[str, list[float]] = {size: [] for size in SIZES}
        self._connection = HTTPConnection("127.0.0.1", port, timeout=30)

    def ask(self, size: str, body: bytes) -> None:
        began = time.perf_counter()
        self._connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
        answer = self._connection.getresponse()
        answer.read()
        self.seconds[size].append(time.perf_counter() - began)
        if answer.status != 200:
            raise RuntimeError(f"{self.name}: status {answer.status}")


def _bodies() -> dict[str, bytes]:
    return {
        name: json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "words " * (size // 6)}]}).encode()
        for name, size in SIZES.items()
    }


def _wait(port: int) -> None:
    ends_at = time.monotonic() + contenders.READY_WITHIN_S
    while time.monotonic() < ends_at:
        try:
            Lane("ready", port).ask("1 KB", _bodies()["1 KB"])
        except (OSError, RuntimeError):
            time.sleep(0.1)
        else:
            return
    raise RuntimeError(f"nothing answers on port {port}")


def _rows(lanes: list[Lane], base: str) -> Iterator[dict[str, Any]]:
    of = {lane.name: lane for lane in lanes}
    for lane in lanes:
        for size in SIZES:
            mine, other = (sorted(of[name].seconds[size][WARM_UP:]) for name in (lane.name, base))
            added = {
                share: 1000 * (mine[int(at * len(mine))] - other[int(at * len(other))])
                for share, at in (("p50", 0.5), ("p99", 0.99))
            }
            yield {
                "way": lane.name,
                "body": size,
                "requests": len(mine),
                "p50_ms": 1000 * mine[len(mine) // 2],
                **{f"added_{share}_ms": value for share, value in added.items()},
                "load": os.getloadavg()[0],
            }


def measure(folder: Path, base: int, requests: int) -> list[dict[str, Any]]:
    """All ways, in turn."""
    folder.mkdir(parents=True, exist_ok=True)
    ports = [base + 100 + number for number in range(CELLS)]
    cells = [CellEndpoint(f"c-{number}", 1, "127.0.0.1", port, 64) for number, port in enumerate(ports)]
    with ExitStack() as stack:
        stack.enter_context(_child("cells", ports))
        lanes = [Lane(rule, base + 10 * at) for at, rule in enumerate(RULES)]
        for at, (rule, affinity) in enumerate(RULES.items()):
            home = folder / rule
            stack.enter_context(
                contenders.ingress(home, base + 10 * at, cells, affinity, "--no-access-log", by_cache=rule == "exact")
            )
            _wait(base + 10 * at)
        bare = _bare(stack, folder, base + 50, ports[0])
        for number in range(requests + WARM_UP):
            for size, body in _bodies().items():
                for lane in (*lanes, *bare) if number % 2 else (*bare, *lanes):
                    lane.ask(size, body)
        return [*_rows(lanes, "least"), *_rows(bare, "HAProxy alone")]


def _bare(stack: ExitStack, folder: Path, base: int, cell: int) -> list[Lane]:
    names = {"HAProxy alone": base, "a script in it": base + 1, "a process beside it": base + 2}
    plain, script, process = names.values()
    (folder / "ask.lua").write_text(ASK_LUA, encoding="utf-8")
    (folder / "look_up.lua").write_text(LOOK_UP_LUA, encoding="utf-8")
    text = BARE.format(scripts=SCRIPTS, plain=plain, script=script, process=process, cell=cell)
    (folder / "bare.cfg").write_text(text, encoding="utf-8")
    path = folder / "picker.sock"
    path.unlink(missing_ok=True)
    stack.enter_context(_child("picker", str(path)))
    words = (str(find_binary()), "-C", str(folder), "-f", "bare.cfg")
    stack.enter_context(contenders.spawned(words, folder / "bare.log"))
    while not path.exists():
        time.sleep(0.05)
    with socket.socket(socket.AF_UNIX) as ready:
        ready.connect(str(path))
    for port in names.values():
        _wait(port)
    return [Lane(name, port) for name, port in names.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, default=2000, help="of each size and way")
    parser.add_argument("--base-port", type=int, default=28700)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    options.results.parent.mkdir(parents=True, exist_ok=True)
    with options.results.open("a", encoding="utf-8") as results:
        for row in measure(ROOT / ".cache" / "bench" / "runs" / "pick", options.base_port, options.requests):
            results.write(json.dumps(row) + "\n")
            print(row, flush=True)


if __name__ == "__main__":
    main()
