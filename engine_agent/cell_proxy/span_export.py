"""Sends finished spans to a collector in batches. It never delays a request: spans that the collector does not take in
time are dropped and counted."""

import asyncio
from collections import deque
from collections.abc import Mapping
from typing import Any

import msgspec

from engine_agent.cell_proxy.upstream import EnginePool, call
from engine_agent.protocol.tracing import TraceSettings, export_request

MAX_WAITING = 2048
"""Spans. This and the next two are defaults of OpenTelemetry's batch processor."""
MAX_AT_ONCE = 512
INTERVAL_S = 5.0
TIMEOUT_S = 5.0
CONNECT_TIMEOUT_S = 1.0
IDLE_S = 30.0


class SpanExporter:
    """One collector. `resource` identifies the process, next to the service's name."""

    def __init__(self, settings: TraceSettings, resource: Mapping[str, str]) -> None:
        self.settings = settings
        self.dropped = 0
        self._resource = resource
        self._waiting: deque[Any] = deque()
        self._pool = EnginePool(
            settings.host, settings.port, connect_timeout_s=CONNECT_TIMEOUT_S, idle_s=IDLE_S, on_lost=lambda: None
        )

    def add(self, span: Any) -> None:
        if len(self._waiting) >= MAX_WAITING:
            self.dropped += 1
        else:
            self._waiting.append(span)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL_S)
            await self.flush()

    async def flush(self) -> None:
        while self._waiting:
            spans = [self._waiting.popleft() for _ in range(min(MAX_AT_ONCE, len(self._waiting)))]
            if not await self._send(spans):
                self.dropped += len(spans)
                return

    def close(self) -> None:
        self._pool.close()

    async def _send(self, spans: list[Any]) -> bool:
        body = msgspec.json.encode(export_request(self.settings.service, self._resource, spans))
        try:
            response = await call(self._pool, b"POST", self.settings.path.encode(), body, TIMEOUT_S)
        except (TimeoutError, OSError):
            return False
        return response.status < 300
