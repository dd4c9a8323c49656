"""Of which request an order came: logged, and recorded as a span where there is a collector. It never looks at
the order itself, and nothing it does keeps an order from being taken."""

import asyncio
import logging
import os
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from time import time_ns

from engine_agent.cell_proxy.span_export import SpanExporter
from engine_agent.protocol.messages import Desired
from engine_agent.protocol.tracing import TRACEPARENT, TraceSettings, TracingOff, begin_span, span_json, trace_settings

SERVICE = "switchyard-node-agent"

log = logging.getLogger(__name__)


def order_trace(node: str, environment: Mapping[str, str] = os.environ) -> "OrderTrace":
    """As OpenTelemetry's variables ask for it."""
    try:
        settings = trace_settings(environment, SERVICE)
    except TracingOff as error:
        log.error("no traces: %s", error)
        settings = None
    return OrderTrace(node, settings)


class OrderTrace:
    def __init__(self, node: str, settings: TraceSettings | None) -> None:
        self._node = node
        self._settings = settings
        self.exporter: SpanExporter | None = None

    @contextmanager
    def taking(self, message: Desired) -> Iterator[None]:
        """Around the taking of an order."""
        began_ns, cause = time_ns(), message.cause
        yield
        if cause is None:
            return
        place = begin_span([(TRACEPARENT, cause.traceparent.encode("latin-1", "replace"))], 0.0, random.getrandbits)
        carried = {"request_id": cause.request_id, "trace_id": place.trace_id if place else ""}
        log.info("order %d came of request %s", message.version, cause.request_id, extra=carried)
        if self.exporter is not None and place is not None:
            about = {"switchyard.request_id": cause.request_id, "switchyard.version": message.version}
            span = span_json(place, "take order", began_ns, time_ns(), False, kind="consumer", **about)
            self.exporter.add(span)

    async def run(self) -> None:
        if self._settings is None:
            await asyncio.Event().wait()
            return
        self.exporter = SpanExporter(self._settings, {"switchyard.node": self._node})
        try:
            await self.exporter.run()
        finally:
            self.exporter.close()
