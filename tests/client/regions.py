"""Regions that answer as a test says, in the process of the test."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx

EAST, WEST = "https://east.test/v1", "https://west.test/v1"
Handler = Callable[[httpx.Request], Awaitable[httpx.Response]]


def said(text: str, **headers: str) -> httpx.Response:
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    usage = {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.Response(200, json={"choices": [choice], "usage": usage}, headers=named)


def refused(status: int, code: str, **headers: str) -> httpx.Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    error = {"message": f"{code} it is", "type": "server_error", "param": None, "code": code}
    return httpx.Response(status, json={"error": error}, headers=named)


def events(*datas: dict[str, Any] | str, breaks: bool = False) -> httpx.Response:
    """A stream of these events; `breaks`: its connection ends in the middle of it."""

    async def body() -> AsyncIterator[bytes]:
        for data in datas:
            yield b"data: " + (data if isinstance(data, str) else json.dumps(data)).encode() + b"\n\n"
        if breaks:
            raise httpx.ReadError("the peer is gone")

    return httpx.Response(200, content=body(), headers={"content-type": "text/event-stream"})


def delta(text: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text}}]}


class Regions(httpx.AsyncBaseTransport):
    """Each region gives its answers in order, the last one again and again: a response, a reason why there is none, or
    a coroutine function. `seen` are all requests."""

    def __init__(self, **answers: list[httpx.Response | Exception | Handler]) -> None:
        self._answers = answers
        self.seen: list[httpx.Request] = []
        self.cancelled: list[str] = []

    @property
    def hosts(self) -> list[str]:
        return [request.url.host.removesuffix(".test") for request in self.seen]

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.seen.append(request)
        region = request.url.host.removesuffix(".test")
        answers = self._answers[region]
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, httpx.Response):
            return answer
        try:
            return await answer(request)
        except asyncio.CancelledError:
            self.cancelled.append(region)
            raise


async def never(_: httpx.Request) -> httpx.Response:
    """A region that takes a request and says nothing."""
    await asyncio.Event().wait()
    raise AssertionError("nobody sets it")
