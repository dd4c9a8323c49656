"""Lets a leader's API say what its rank computed, to the agent beside it. A part of vLLM's server, given to it with
`--middleware`: everything else passes through untouched."""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from engine_agent.engines.vllm.own_steps import STEPS_PATH, runtime_folder, written_steps

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class StepsPage:
    """`GET /switchyard/steps`: `StepTimes` as JSON, or 404 while there are none."""

    def __init__(self, app: App) -> None:
        self._app, self._folder = app, runtime_folder()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != STEPS_PATH:
            await self._app(scope, receive, send)
            return
        steps = written_steps(self._folder)
        status, body = (200, steps) if steps is not None else (404, b'{"reason": "no steps were measured"}')
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})
