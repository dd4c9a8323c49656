"""The application of a leader in this process, whose engine computes as fast as it can: for many small requests."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from engine_agent.engines.openai_http import Endpoint, HealthPage
from engine_agent.engines.sim.batching import ModelParameters
from engine_agent.engines.sim.engine import Engine, Meters
from engine_agent.engines.sim.faults import Faults
from engine_agent.engines.sim.planning.generation_request import HandoverParameters
from engine_agent.engines.sim.serving import ApiServer, ServedModel
from engine_agent.engines.usage_ledger import UsageLedger
from engine_agent.protocol.local_servers import StateWatch
from engine_agent.protocol.proxy_messages import EXCHANGE_HEADER

MODEL, ADAPTER = "m", "acme/tuned"
FAST = ModelParameters(prefill_tokens_per_s=1e9, decode_step_ms=1e-6, decode_step_per_seq_ms=0, max_num_seqs=256)


class Application:
    """A running application. `meters` count what it computed."""

    def __init__(
        self,
        parameters: ModelParameters = FAST,
        handover: HandoverParameters | None = None,
        kv_place: Endpoint | None = None,
        model: str = MODEL,
        max_model_len: int = 8192,
    ) -> None:
        self.meters = Meters()
        self.engine = Engine(parameters, self.meters, handover=handover)
        self.engine.open()
        watch = StateWatch(lambda: "")
        health = HealthPage(lambda: "", watch)
        server = ApiServer(self.engine, Faults(), health, ServedModel(model, max_model_len, (ADAPTER,)), 7, kv_place)
        self._server = UsageLedger(server)
        self.headers: dict[bytes, bytes] = {}
        """Of the last answer."""

    async def send(
        self,
        path: str,
        body: bytes,
        method: str = "POST",
        exchange: bytes = b"",
        leaves_after: int | None = None,
        sent: tuple[tuple[bytes, bytes], ...] = (),
    ) -> tuple[int, bytes]:
        """One request; its client waits for the whole answer, or `leaves_after` so many pieces of it. `exchange` is the
        name under which the engine notes what it computes, `sent` are further headers."""
        unread = [{"type": "http.request", "body": body}]
        status, pieces, left = 0, [], asyncio.Event()

        async def receive() -> dict[str, Any]:
            if unread:
                return unread.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            nonlocal status
            status = message.get("status", status)
            self.headers |= dict(message.get("headers", ()))
            pieces.append(message.get("body", b""))
            if len(pieces) == leaves_after:
                left.set()

        bare, _, query = path.partition("?")
        headers = [*sent, (EXCHANGE_HEADER, exchange)] if exchange else [*sent]
        scope = {"type": "http", "method": method, "path": bare, "query_string": query.encode(), "headers": headers}
        await self._server(scope, receive, send)
        return status, b"".join(pieces)

    async def ask(self, path: str, **body: Any) -> Any:
        """One request that succeeds, as the JSON that it is answered with."""
        status, answer = await self.send(path, json.dumps({"model": MODEL, **body}).encode())
        assert status == 200, answer
        return json.loads(answer)

    async def events(self, path: str, **body: Any) -> list[Any]:
        """The events of a stream, without its end mark."""
        status, answer = await self.send(path, json.dumps({"model": MODEL, "stream": True, **body}).encode())
        assert status == 200, answer
        lines = answer.decode().split("\n")
        return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]


@asynccontextmanager
async def application(
    parameters: ModelParameters = FAST,
    handover: HandoverParameters | None = None,
    kv_place: Endpoint | None = None,
    **options: Any,
) -> AsyncIterator[Application]:
    """One, while it runs; with the options of `Application`."""
    running = Application(parameters, handover, kv_place, **options)
    loop = asyncio.create_task(running.engine.run())
    try:
        yield running
    finally:
        loop.cancel()
        await asyncio.wait([loop])
