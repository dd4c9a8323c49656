"""Steady traffic for tests: requests at a fixed rate, with a record of every failure. Light, because the cells are in
the same process."""

import asyncio
import contextlib
import socket
from collections import Counter
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

BODY = b'{"model": "demo", "messages": [{"role": "user", "content": "hi"}]}'
REQUEST = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%s"


class SteadyTraffic:
    """Requests without retries. `served` counts answers by server."""

    def __init__(self, url: str, per_s: float, body: bytes = BODY) -> None:
        self._request = REQUEST % (len(body), body)
        self._port = urlsplit(url).port
        self._interval_s = 1.0 / per_s
        self.served: Counter[str] = Counter()
        self.failures: list[str] = []
        self.sent = 0

    @contextlib.asynccontextmanager
    async def flowing(self) -> AsyncIterator["SteadyTraffic"]:
        """Sends until the block ends, then waits for every answer."""
        stop = asyncio.Event()
        task = asyncio.create_task(self._flow(stop))
        try:
            yield self
        finally:
            stop.set()
            await task

    async def until_sent(self, count: int) -> None:
        """Waits until this many more requests were sent."""
        goal = self.sent + count
        while self.sent < goal:  # noqa: ASYNC110 - the flow sets the pace
            await asyncio.sleep(self._interval_s)

    async def _flow(self, stop: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as group:
            while not stop.is_set():
                group.create_task(self._send())
                self.sent += 1
                await asyncio.sleep(self._interval_s)

    async def _send(self) -> None:
        try:
            # Sent before other tasks run: one that blocks longer than HAProxy waits would be refused with 408.
            connection = socket.create_connection(("127.0.0.1", self._port))
            connection.sendall(self._request)
            reader, writer = await asyncio.open_connection(sock=connection)
            answer = (await reader.read()).decode()
            writer.close()
        except OSError as error:
            self.failures.append(repr(error))
            return
        head, _, body = answer.partition("\r\n\r\n")
        headers = dict(line.split(": ", 1) for line in head.splitlines()[1:])
        if " 200 " in head and body.endswith("}"):
            self.served[headers["x-switchyard-cell"]] += 1
        else:
            self.failures.append(answer or "no answer")
