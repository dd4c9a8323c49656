"""Lets an idle vLLM sleep, and wakes it for the next request: a middleware of its server.

vLLM's own routes for this exist only in its development mode, which also opens routes that run any method of a worker.
Here nothing is called from outside: the engine sleeps by its own clock. Level 1 moves the weights to host memory, level
2 drops them and loads them again. The KV cache is lost at both. Runs only where vLLM sleeps, on GPUs."""

import asyncio
import os
from typing import Any

from engine_agent.engines.usage_ledger import App, Receive, Scope, Send

SLEEP_VARIABLE = "SWITCHYARD_VLLM_SLEEP"
"""`SECONDS LEVEL`."""


class IdleSleep:
    """Every POST is work. Other requests, such as health checks and metrics, neither wake the engine nor keep it
    awake."""

    def __init__(self, app: App) -> None:
        seconds, level = os.environ[SLEEP_VARIABLE].split()
        self._app, self._seconds, self._level = app, float(seconds), int(level)
        self._running = 0
        self._is_asleep = False
        self._changing = asyncio.Lock()
        self._timer: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        engine = scope["app"].state.engine_client
        self._running += 1
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        try:
            async with self._changing:
                await self._wake(engine)
            await self._app(scope, receive, send)
        finally:
            self._running -= 1
            if not self._running:
                self._timer = asyncio.create_task(self._sleep_later(engine))

    async def _sleep_later(self, engine: Any) -> None:
        await asyncio.sleep(self._seconds)
        await asyncio.shield(asyncio.create_task(self._sleep(engine)))

    async def _sleep(self, engine: Any) -> None:
        """A request that arrives meanwhile waits for the end, and wakes the engine."""
        async with self._changing:
            if not self._running and not self._is_asleep:
                self._is_asleep = True
                await engine.sleep(self._level, "wait")

    async def _wake(self, engine: Any) -> None:
        """Raises what vLLM raises. The next request then tries it again."""
        if self._is_asleep:
            await engine.wake_up()
            if self._level > 1:
                await engine.collective_rpc("reload_weights")
            self._is_asleep = False
