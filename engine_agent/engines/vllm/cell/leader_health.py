"""What the leader's API says once the cell is over: why. A part of vLLM's server, given to it with `--middleware`.

While the cell is well it passes everything through untouched; it adds one look at a file per request and nothing per
token.
"""

import json
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from engine_agent.engines.vllm.cell.member import left_reason, member_from

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class LeaderHealth:
    """503 with the reason for every request that comes after the end, to `/health` in the agent's words."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._ended_file = member_from(os.environ).ended_file

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reason = left_reason(self._ended_file) if scope["type"] == "http" else ""
        if not reason:
            await self._app(scope, receive, send)
            return
        error = {"message": f"the cell is over: {reason}", "type": "service_unavailable", "param": None, "code": 503}
        body = json.dumps({"reason": reason} if scope["path"] == "/health" else {"error": error}).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 503, "headers": headers})
        await send({"type": "http.response.body", "body": body})
