"""Hostile load on a running fleet: slow and idle clients of an ingress, unknown credentials and reconnects at web.

    python -m bench.chaos.hostile_clients slowloris http://127.0.0.1:8080 --count 500 --seconds 20

Each kind runs in a separate process, so it takes no time from the measured load. It prints a summary at the end."""

import argparse
import asyncio
import contextlib
import resource
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from typing import Any
from urllib.parse import SplitResult, urlsplit

from bench.chaos.schedule import Harm

FULL_LOAD = {Harm.SLOWLORIS: 2000, Harm.IDLE: 10_000, Harm.UNKNOWN_CREDENTIALS: 2000, Harm.HERD: 300}
"""The full load: connections, attempts per second, agents."""
BYTE_EVERY_S = 1.0
AT_ONCE = 200
"""Connections opened in parallel. More than a listener's queue would only wait in the kernel."""
ANSWER_WITHIN_S = 10.0
_UPGRADE = (
    "GET /agents/ws HTTP/1.1\r\nHost: {host}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
    "Authorization: Bearer swy_agent_never_issued\r\n\r\n"
)


def start(harm: Harm, url: str, share: float, seconds: float) -> Callable[[], None]:
    """Start `share` of the full load in a separate process. Returns a function that waits for its end."""
    command = [sys.executable, "-m", "bench.chaos.hostile_clients", harm.name.lower(), url]
    command += ["--count", str(max(1, round(FULL_LOAD[harm] * share))), "--seconds", str(seconds)]
    process = subprocess.Popen(command)
    return lambda: _wait(process, seconds)


def _wait(process: subprocess.Popen[bytes], seconds: float) -> None:
    try:
        process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


async def slowloris(url: SplitResult, count: int, seconds: float) -> str:
    """Each sends a request byte by byte, and reconnects when it is closed."""
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

    await _run_all(client, count, seconds)
    return f"{count} slow clients; {closed} of their connections were closed"


async def idle(url: SplitResult, count: int, seconds: float) -> str:
    opened = 0

    async def client(gate: asyncio.Semaphore) -> None:
        nonlocal opened
        with contextlib.suppress(OSError, TimeoutError):
            async with gate:
                reader, writer = await _connection(url)
            opened += 1
            await reader.read()
            writer.close()

    await _run_all(client, count, seconds)
    return f"{opened} of {count} idle clients got a connection"


async def unknown_credentials(url: SplitResult, count: int, seconds: float) -> str:
    """`count` attempts per second, as far as the server accepts connections."""
    ends, sent, answered = time.monotonic() + seconds, 0, 0

    async def client(_: asyncio.Semaphore) -> None:
        nonlocal sent, answered
        while time.monotonic() < ends:
            began = time.monotonic()
            sent += 1
            answered += await _attempt(url)
            await asyncio.sleep(max(0.0, AT_ONCE / count - (time.monotonic() - began)))

    await _run_all(client, min(AT_ONCE, count), seconds)
    return f"{sent} attempts in {seconds:g} s, {answered} were refused"


async def herd(url: SplitResult, count: int, seconds: float) -> str:
    """All connect at the same time, and again until each has got an answer."""
    began, back_after_s = time.monotonic(), list[float]()

    async def agent(_: asyncio.Semaphore) -> None:
        while not await _attempt(url):  # noqa: ASYNC110 - each round is an attempt
            await asyncio.sleep(BYTE_EVERY_S)
        back_after_s.append(time.monotonic() - began)

    await _run_all(agent, count, seconds)
    last_s = max(back_after_s, default=0.0)
    return f"{len(back_after_s)} of {count} had an answer, the last after {last_s:.1f} s"


async def _attempt(url: SplitResult) -> bool:
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(ANSWER_WITHIN_S):
            reader, writer = await _connection(url)
            writer.write(_UPGRADE.format(host=url.hostname).encode())
            line = await reader.readline()
            writer.close()
            return line.startswith(b"HTTP/1.1 4")
    return False


def _tls_to(url: str) -> ssl.SSLContext | None:
    if not url.startswith("https://"):
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


async def _connection(url: SplitResult) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection(url.hostname, url.port or 80, ssl=_tls_to(url.geturl()))


async def _run_all(
    client: Callable[[asyncio.Semaphore], Coroutine[Any, Any, None]], count: int, seconds: float
) -> None:
    gate = asyncio.Semaphore(AT_ONCE)
    tasks = [asyncio.create_task(client(gate)) for _ in range(count)]
    await asyncio.wait(tasks, timeout=seconds)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.chaos.hostile_clients", description=__doc__.partition("\n")[0])
    kinds = {each.__name__: each for each in (slowloris, idle, unknown_credentials, herd)}
    parser.add_argument("kind", choices=kinds)
    parser.add_argument("url")
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--seconds", type=float, default=20.0)
    options = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    load = kinds[options.kind](urlsplit(options.url), options.count, options.seconds)
    print(f"hostile clients: {asyncio.run(load)}", flush=True)


if __name__ == "__main__":
    main()
