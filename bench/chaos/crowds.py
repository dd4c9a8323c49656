"""Crowds of strangers at a running fleet: slow and idle clients of an ingress, bad knocks and a herd at web.

    python -m bench.chaos.crowds slowloris http://127.0.0.1:8080 --count 500 --seconds 20

Each runs in a process of its own, so that it takes no time from the load that is judged. It says how far it got.
"""

import argparse
import asyncio
import contextlib
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from typing import Any
from urllib.parse import SplitResult, urlsplit

from bench.chaos.schedule import Harm
from bench.crowd.knocks import tls_to

WHOLE = {Harm.SLOWLORIS: 2000, Harm.IDLE: 10_000, Harm.KNOCKS: 2000, Harm.HERD: 300}
"""How many make a whole crowd: connections, knocks a second, agents."""
BYTE_EVERY_S = 1.0
AT_ONCE = 200
"""Connections opened side by side; more than a listener's queue would only wait in the kernel."""
ANSWER_WITHIN_S = 10.0
_KNOCK = (
    "GET /agents/ws HTTP/1.1\r\nHost: {host}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
    "Authorization: Bearer swy_agent_nobody_issued_this\r\n\r\n"
)


def begin(harm: Harm, url: str, crowd: float, seconds: float) -> Callable[[], None]:
    """Send a crowd of `crowd` times the whole one in a process of its own. Returns what waits for its end."""
    command = [sys.executable, "-m", "bench.chaos.crowds", harm.name.lower(), url]
    command += ["--count", str(max(1, round(WHOLE[harm] * crowd))), "--seconds", str(seconds)]
    process = subprocess.Popen(command)
    return lambda: _end(process, seconds)


def _end(process: subprocess.Popen[bytes], seconds: float) -> None:
    try:
        process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


async def slowloris(url: SplitResult, count: int, seconds: float) -> str:
    """Each sends a request byte by byte, and comes again where it is closed."""
    ends, closed = time.monotonic() + seconds, 0

    async def client(gate: asyncio.Semaphore) -> None:
        nonlocal closed
        while time.monotonic() < ends:
            with contextlib.suppress(OSError, TimeoutError):
                async with gate:
                    _, writer = await _connection(url)
                writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nX-Slow: ")
                while time.monotonic() < ends and not writer.is_closing():
                    writer.write(b"a")
                    await writer.drain()
                    await asyncio.sleep(BYTE_EVERY_S)
                writer.close()
            closed += 1
            await asyncio.sleep(BYTE_EVERY_S)

    await _crowd(client, count, seconds)
    return f"{count} slow clients; {closed} of their connections ended"


async def idle(url: SplitResult, count: int, seconds: float) -> str:
    """Each opens a connection and waits."""
    opened = 0

    async def client(gate: asyncio.Semaphore) -> None:
        nonlocal opened
        with contextlib.suppress(OSError, TimeoutError):
            async with gate:
                reader, writer = await _connection(url)
            opened += 1
            await reader.read()
            writer.close()

    await _crowd(client, count, seconds)
    return f"{opened} of {count} idle clients got a connection"


async def knocks(url: SplitResult, count: int, seconds: float) -> str:
    """`count` a second, as far as the other side takes them."""
    ends, sent, answered = time.monotonic() + seconds, 0, 0

    async def knocker(_: asyncio.Semaphore) -> None:
        nonlocal sent, answered
        while time.monotonic() < ends:
            began = time.monotonic()
            sent += 1
            answered += await _knock(url)
            await asyncio.sleep(max(0.0, AT_ONCE / count - (time.monotonic() - began)))

    await _crowd(knocker, min(AT_ONCE, count), seconds)
    return f"{sent} knocks in {seconds:g} s, {answered} got a refusal"


async def herd(url: SplitResult, count: int, seconds: float) -> str:
    """All come at once, and again until each has had an answer."""
    began, back_after_s = time.monotonic(), list[float]()

    async def agent(_: asyncio.Semaphore) -> None:
        while not await _knock(url):  # noqa: ASYNC110 - each look is a knock
            await asyncio.sleep(BYTE_EVERY_S)
        back_after_s.append(time.monotonic() - began)

    await _crowd(agent, count, seconds)
    last_s = max(back_after_s, default=0.0)
    return f"{len(back_after_s)} of {count} had an answer, the last after {last_s:.1f} s"


async def _knock(url: SplitResult) -> bool:
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(ANSWER_WITHIN_S):
            reader, writer = await _connection(url)
            writer.write(_KNOCK.format(host=url.hostname).encode())
            line = await reader.readline()
            writer.close()
            return line.startswith(b"HTTP/1.1 4")
    return False


async def _connection(url: SplitResult) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection(url.hostname, url.port or 80, ssl=tls_to(url.geturl()))


async def _crowd(client: Callable[[asyncio.Semaphore], Coroutine[Any, Any, None]], count: int, seconds: float) -> None:
    gate = asyncio.Semaphore(AT_ONCE)
    tasks = [asyncio.create_task(client(gate)) for _ in range(count)]
    await asyncio.wait(tasks, timeout=seconds)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.chaos.crowds", description=__doc__.partition("\n")[0])
    crowds = {each.__name__: each for each in (slowloris, idle, knocks, herd)}
    parser.add_argument("kind", choices=crowds)
    parser.add_argument("url")
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--seconds", type=float, default=20.0)
    options = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    crowd = crowds[options.kind](urlsplit(options.url), options.count, options.seconds)
    print(f"crowd: {asyncio.run(crowd)}", flush=True)


if __name__ == "__main__":
    main()
