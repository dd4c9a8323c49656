"""Strangers at `/agents/ws`: so many new connections a second, each with a credential that nobody issued.

`python -m bench.crowd.knocks SERVER PER_S` writes what answered, by status, once a second.
"""

import asyncio
import json
import secrets
import ssl
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from bench.places import ROOT

SOURCE = "127.0.0.9"
IN_FLIGHT = 1000
ANSWER_WITHIN_S = 5.0
_REQUEST = (
    "GET /agents/ws HTTP/1.1\r\nHost: {host}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n"
    "Authorization: Bearer sw_{prefix}_{rest}\r\n\r\n"
)


async def knock(host: str, port: int, context: ssl.SSLContext | None, seen: Counter[str]) -> None:
    try:
        async with asyncio.timeout(ANSWER_WITHIN_S):
            reader, writer = await asyncio.open_connection(host, port, local_addr=(SOURCE, 0), ssl=context)
            try:
                text = _REQUEST.format(host=host, prefix=secrets.token_hex(4), rest=secrets.token_hex(24))
                writer.write(text.encode())
                line = await reader.readline()
                seen[line[9:12].decode() or "closed"] += 1
            finally:
                writer.close()
    except TimeoutError:
        seen["no answer"] += 1
    except OSError as error:
        seen[type(error).__name__] += 1


def tls_to(url: str) -> ssl.SSLContext | None:
    """For connections to this URL; None: they are plain."""
    if not url.startswith("https://"):
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


async def main(server: str, per_s: float) -> None:
    parts = urlsplit(server)
    context = tls_to(server)
    seen: Counter[str] = Counter()
    under_way: set[asyncio.Task[None]] = set()
    began, sent, said = time.monotonic(), 0, 0.0
    while True:
        elapsed = time.monotonic() - began
        while sent < elapsed * per_s:
            sent += 1
            if len(under_way) >= IN_FLIGHT:
                seen["not sent"] += 1
                continue
            task = asyncio.create_task(knock(parts.hostname or "", parts.port or 80, context, seen))
            under_way.add(task)
            task.add_done_callback(under_way.discard)
        if elapsed - said >= 1:
            said = elapsed
            print(json.dumps({"seconds": round(elapsed), **seen}), flush=True)
        await asyncio.sleep(0.01)


@contextmanager
def knocking(server: str, per_s: int) -> Iterator[dict[str, int]]:
    """Knock while the block runs; what became of them is in the dictionary afterwards."""
    command = [sys.executable, "-m", "bench.crowd.knocks", server, str(per_s)]
    answers: dict[str, int] = {}
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield answers
        finally:
            process.kill()
            whole = [line for line in process.communicate()[0].splitlines() if line.endswith("}")]
            answers.update(json.loads(whole[-1]) if whole else {})


if __name__ == "__main__":
    try:
        import uvloop

        uvloop.run(main(sys.argv[1], float(sys.argv[2])))
    except KeyboardInterrupt:
        pass
