"""Steady traffic for tests: requests at a fixed rate, whose every failure is remembered."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator

import httpx

BODY = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}


class SteadyTraffic:
    """Requests without retries of the client's own. `served` counts answers by the server that gave them."""

    def __init__(self, url: str, per_s: float) -> None:
        self._url = f"{url}/v1/chat/completions"
        self._interval_s = 1.0 / per_s
        self.served: Counter[str] = Counter()
        self.failures: list[str] = []
        self.sent = 0

    @contextlib.asynccontextmanager
    async def flowing(self) -> AsyncIterator["SteadyTraffic"]:
        """Send until the block ends, and wait for every answer."""
        stop = asyncio.Event()
        limits = httpx.Limits(max_connections=200)
        async with httpx.AsyncClient(timeout=20, limits=limits, trust_env=False) as client:
            task = asyncio.create_task(self._flow(client, stop))
            try:
                yield self
            finally:
                stop.set()
                await task

    async def until_sent(self, count: int) -> None:
        """Wait until this many more requests went out."""
        goal = self.sent + count
        while self.sent < goal:  # noqa: ASYNC110 - the flow has a rhythm of its own
            await asyncio.sleep(self._interval_s)

    async def _flow(self, client: httpx.AsyncClient, stop: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as group:
            while not stop.is_set():
                group.create_task(self._send(client))
                self.sent += 1
                await asyncio.sleep(self._interval_s)

    async def _send(self, client: httpx.AsyncClient) -> None:
        try:
            answer = await client.post(self._url, json=BODY)
        except httpx.HTTPError as error:
            self.failures.append(repr(error))
            return
        if answer.status_code == 200:
            self.served[answer.headers["x-switchyard-cell"]] += 1
        else:
            self.failures.append(f"{answer.status_code} {answer.text}")
