"""Marks and continuations over HTTP, as middleware of vLLM's application."""

import json
import re
import sys
from collections.abc import Iterator, MutableMapping
from contextlib import suppress
from typing import Any

import msgspec

from engine_agent.engines.openai_http import App, Receive, Scope, Send, respond
from engine_agent.engines.vllm.continuation import replay
from engine_agent.engines.vllm.continuation.replay import Run
from engine_agent.protocol.continuation import (
    CONTINUATION_HEADER,
    CONTINUATION_MEMBER,
    REFUSED_TYPE,
    Continuation,
    continuation_of,
)

Message = MutableMapping[str, Any]
STREAM_TYPE = b"text/event-stream"
MOST_HELD_BYTES = 256 * 1024
_NAME = CONTINUATION_MEMBER.encode()
_MEMBER = re.compile(rb',\s*"' + _NAME + rb'"\s*:')
"""It matches in no text, whose quotes are escaped."""
_JSON = json.JSONDecoder()


class BadContinuation(ValueError):
    """A body whose continuation is malformed or occurs twice."""


def split_body(body: bytes) -> tuple[bytes, Continuation | None]:
    """Returns the body without the member that the relay appended, and this member. All other bytes stay, also those
    that the cell proxy appended. Raises BadContinuation."""
    if _NAME not in body:
        return body, None
    try:
        continuation = continuation_of(body)
    except (ValueError, RecursionError) as error:
        raise BadContinuation(f"malformed continuation: {error}") from None
    if continuation is None:
        return body, None
    *_, found = (None, *_MEMBER.finditer(body))
    with suppress(ValueError, RecursionError):
        if found is not None:
            rest = body[found.end() :].decode()
            _, end = _JSON.raw_decode(rest, len(rest) - len(rest.lstrip()))
            bare = body[: found.start()] + rest[end:].encode()
            if CONTINUATION_MEMBER not in _members(bare):
                return bare, continuation
    raise BadContinuation(f"{CONTINUATION_MEMBER} must follow another member of the body, and occur once")


class Continuations:
    """Marks streams of requests with the header, and continues those that repeat another engine's tokens. A request
    without the header is only searched for the private member."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._why_not = replay.install()
        if self._why_not:
            sys.stderr.write(f"streams of this engine cannot continue elsewhere: {self._why_not}\n")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        is_relays = any(name == CONTINUATION_HEADER for name, _ in scope["headers"])
        body, left = await _read(receive)
        if left is not None:
            await self._app(scope, _first(left, receive), send)
        elif is_relays:
            await self._answer_relay(body, scope, receive, send)
        elif _NAME in body and _is_continuation(body):
            message = "only the fleet may continue a stream"
            error = {"type": "invalid_request_error", "message": message, "param": CONTINUATION_MEMBER}
            await respond(send, 400, msgspec.json.encode({"error": error}))
        else:
            await self._app(scope, _first(_whole(body), receive), send)

    async def _answer_relay(self, body: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body, continuation = split_body(body)
        except BadContinuation as error:
            stated = {"type": "invalid_request_error", "message": str(error), "param": CONTINUATION_MEMBER}
            await respond(send, 400, msgspec.json.encode({"error": stated}))
            return
        receive = _first(_whole(body), receive)
        if self._why_not:
            if continuation is None:
                await self._app(scope, receive, send)
            else:
                await _refuse(send, self._why_not)
            return
        run = Run(continuation)
        token = replay.begin(run)
        try:
            await self._app(scope, receive, _Marked(send if continuation is None else _Held(send, run), run))
        finally:
            replay.end(token)


class _Marked:
    """Writes marks before the events of a stream."""

    def __init__(self, send: Send, run: Run) -> None:
        self._send, self._run = send, run
        self._is_stream = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            types = (value for name, value in message.get("headers", ()) if name.lower() == b"content-type")
            self._is_stream = any(value.startswith(STREAM_TYPE) for value in types)
        elif self._is_stream and message.get("body") and (marks := self._run.take_marks()):
            message = {**message, "body": marks + message["body"]}
        await self._send(message)
        if self._is_stream and message.get("body"):
            self._run.send_mark = self._send_mark

    async def _send_mark(self, mark: bytes) -> None:
        await self._send({"type": "http.response.body", "body": mark + b"\n", "more_body": True})


class _Held:
    """Holds the answer to a continuation until the repeated tokens are accepted, because their refusal has another
    status: vLLM begins a stream before it queues the request. Then it holds the events that the client has, and sends
    them in one piece with the next one: alone, each would cost the server, two proxies and the relay a turn."""

    def __init__(self, send: Send, run: Run) -> None:
        self._send, self._run = send, run
        self._held: list[Message] = []
        self._held_bytes = 0
        self._is_refused = False

    async def __call__(self, message: Message) -> None:
        if self._run.refusal:
            if not self._is_refused:
                self._is_refused = True
                await _refuse(self._send, self._run.refusal)
            return
        is_last = message["type"] == "http.response.body" and not message.get("more_body", False)
        self._held.append(message)
        self._held_bytes += len(message.get("body", b""))
        is_long = self._held_bytes >= MOST_HELD_BYTES
        if not is_last and (not self._run.is_accepted or (self._run.is_repeating and not is_long)):
            return
        held, self._held, self._held_bytes = self._held, [], 0
        for each in _joined(held):
            await self._send(each)


def _joined(messages: list[Message]) -> Iterator[Message]:
    """All bodies in one."""
    bodies = [each for each in messages if each["type"] == "http.response.body"]
    yield from (each for each in messages if each["type"] != "http.response.body")
    if bodies:
        yield {**bodies[-1], "body": b"".join(each.get("body", b"") for each in bodies)}


async def _refuse(send: Send, why: str) -> None:
    error = {"type": REFUSED_TYPE, "message": f"this stream cannot continue here: {why}"}
    await respond(send, 409, msgspec.json.encode({"error": error}))


def _is_continuation(body: bytes) -> bool:
    """Whether the body has the member, well-formed or not; texts may contain its name."""
    try:
        return CONTINUATION_MEMBER in _members(body)
    except (ValueError, RecursionError):
        return False  # vLLM rejects it


def _members(body: bytes) -> set[str]:
    """Raises ValueError or RecursionError if it is no object."""
    return set(msgspec.json.decode(body, type=dict[str, msgspec.Raw]))


async def _read(receive: Receive) -> tuple[bytes, Message | None]:
    """Returns the whole body, or the message that the client left before it was complete."""
    message = await receive()
    pieces = [message.get("body", b"")]
    while message["type"] == "http.request" and message.get("more_body", False):
        message = await receive()
        pieces.append(message.get("body", b""))
    return b"".join(pieces), None if message["type"] == "http.request" else message


def _whole(body: bytes) -> Message:
    return {"type": "http.request", "body": body, "more_body": False}


def _first(message: Message, receive: Receive) -> Receive:
    """Receives this message before the others."""
    waiting: list[Message] = [message]

    async def receiving() -> Message:
        return waiting.pop() if waiting else await receive()

    return receiving
