"""The client for an event loop: calls, their attempts in several regions, and hedged first tokens."""

import asyncio
import json
import re
import ssl
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from typing import Any, Self, Unpack
from urllib.parse import quote

import httpx

from switchyard_client.answers import (
    Answer,
    ApiError,
    Body,
    BrokenOff,
    DeadlineExceeded,
    Event,
    NoAnswer,
    Pending,
    SwitchyardError,
)
from switchyard_client.bodies import Message
from switchyard_client.events import events_of, json_object
from switchyard_client.failover import Attempt, Failover, Retries
from switchyard_client.options import (
    CallOptions,
    ChatOptions,
    ClientOptions,
    EmbeddingsOptions,
    Inputs,
    Messages,
    SubmitOptions,
)
from switchyard_client.resumption import Resumption

_VERSIONED = re.compile(r"/v\d+/")
_UNVERSIONED = frozenset({
    "/tokenize", "/detokenize", "/pooling", "/classify", "/score", "/rerank", "/health", "/healthz", "/version",
})  # fmt: skip
"""Paths that ingresses serve next to `/v1`, not below it."""


class AsyncSwitchyard:
    """A client of one or several regions' ingresses, for one event loop. Close it, or use it as a context.

    `regions`: their base URLs, home first (`https://us-east-1.example.com/v1`)."""

    def __init__(self, regions: str | Sequence[str], **options: Unpack[ClientOptions]) -> None:
        self.regions = [url.rstrip("/") for url in ([regions] if isinstance(regions, str) else regions)]
        if not self.regions:
            raise ValueError("name the base URL of at least one region, such as https://us-east-1.example.com/v1")
        key, serving_class = options.get("api_key"), options.get("serving_class")
        self._hedge_after_s, self._trace = options.get("hedge_after_s"), options.get("trace", dict)
        self._failover = Failover(len(self.regions), options.get("retries", Retries()))
        self._http = httpx.AsyncClient(
            headers=({"authorization": f"Bearer {key}"} if key else {})
            | ({"x-switchyard-class": serving_class} if serving_class else {}),
            timeout=httpx.Timeout(options.get("silence_s", 600.0), connect=options.get("connect_s", 5.0), pool=None),
            transport=options.get("transport") or _transport(options.get("ca_file"), options.get("proxy")),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        await self._http.aclose()

    async def post(self, path: str, body: Body, **options: Unpack[CallOptions]) -> Answer:
        """Send a body and wait for the complete answer. `path` is any of docs/api-applications.md; `/v1` may be
        omitted.

        Raises:
            ApiError: refused, also after retries. NoAnswer: no region answered. DeadlineExceeded. BrokenOff: the answer
            was incomplete."""
        call = _Call("POST", path, body, **options)
        return Answer(*await self._read_response(call), attempts=len(call.tried))

    async def get(self, path: str, **options: Unpack[CallOptions]) -> Answer:
        """Read a path, such as `/usage`, with the errors of `post`."""
        call = _Call("GET", path, **options)
        return Answer(*await self._read_response(call), attempts=len(call.tried))

    @asynccontextmanager
    async def stream(
        self, path: str, body: Body, **options: Unpack[CallOptions]
    ) -> AsyncIterator[AsyncIterator[Event]]:
        """Send a body with `"stream": true` and read its events. Leaving the block early ends generation.

        Raises:
            As `post`; also ApiError while events are read, for an error in the stream."""
        call = _Call("POST", path, {**body, "stream": True}, **options)
        async with call.within_deadline(), aclosing(self._events(call, await self._sent(call))) as events:
            yield events

    async def chat(self, model: str, messages: Messages, **options: Unpack[ChatOptions]) -> Answer:
        """`POST /chat/completions` with these members; a string is one user message. `post` sends other members."""
        body, call = _parted({**options, "model": model, "messages": _messages(messages)})
        return await self.post("/chat/completions", body, **call)

    def stream_chat(
        self, model: str, messages: Messages, **options: Unpack[ChatOptions]
    ) -> AbstractAsyncContextManager[AsyncIterator[Event]]:
        """The same as a stream."""
        body, call = _parted({**options, "model": model, "messages": _messages(messages)})
        return self.stream("/chat/completions", body, **call)

    async def embeddings(self, model: str, inputs: Inputs, **options: Unpack[EmbeddingsOptions]) -> Answer:
        """`POST /embeddings` for texts or tokens; `answer.embeddings` has the vectors."""
        body, call = _parted({**options, "model": model, "input": inputs})
        return await self.post("/embeddings", body, **call)

    async def models(self) -> list[dict[str, Any]]:
        """The models that the key may use."""
        document, _ = await self._read_response(_Call("GET", "/models"))
        return list(document["data"])

    async def submit(self, path: str, body: Body, **options: Unpack[SubmitOptions]) -> Pending:
        """Submit a near-real-time request for `/chat/completions` or `/completions`."""
        headers = {"idempotency-key": options.get("idempotency_key") or uuid.uuid4().hex}
        headers |= (
            {"x-switchyard-deadline-ms": str(round(limit * 1000))} if (limit := options.get("deadline_s")) else {}
        )
        headers |= {"x-switchyard-callback-url": url} if (url := options.get("callback_url")) else {}
        headers |= {"x-switchyard-sink": sink} if (sink := options.get("sink")) else {}
        return await self._pending(_Call("POST", f"/async{path.removeprefix('/v1')}", body, headers=headers))

    async def retrieve(self, request: Pending | str) -> Pending:
        """Get the state of a near-real-time request, from any region of the fleet."""
        return await self._pending(_Call("GET", f"/async/{_id(request)}"))

    async def cancel(self, request: Pending | str) -> Pending:
        """Cancel it, unless it has ended."""
        return await self._pending(_Call("DELETE", f"/async/{_id(request)}"))

    async def wait(self, request: Pending | str, *, timeout_s: float = 900.0, poll_s: float = 0.5) -> Pending:
        """Poll until the request has ended, with intervals that grow by half up to 10 s.

        Raises:
            DeadlineExceeded: it has not ended by then, and continues."""
        ends_at = time.monotonic() + timeout_s
        while not (found := await self.retrieve(request)).has_ended:
            if time.monotonic() + poll_s > ends_at:
                raise DeadlineExceeded(f"{found.id} is {found.status} after {timeout_s:g} s")
            await asyncio.sleep(poll_s)
            poll_s = min(10.0, poll_s * 1.5)
        return found

    async def _pending(self, call: "_Call") -> Pending:
        document, _ = await self._read_response(call)
        if not (document.get("id") and document.get("status")):
            raise BrokenOff(f"the answer has no id and status: {document!r}")
        return Pending(document["id"], document["status"], document, document.get("callback_secret") or "")

    # --- attempts ---

    async def _events(self, call: "_Call", response: httpx.Response) -> AsyncGenerator[Event, None]:
        """The events of an answer, and of its repeats after it broke off."""
        seen = Resumption() if call.resumes else None
        while True:
            try:
                async with aclosing(response), aclosing(events_of(response)) as events:
                    async for event in events:
                        fresh = event if seen is None else seen.fresh(event)
                        if fresh is not None:
                            yield fresh
                return
            except BrokenOff as error:
                if seen is None or not seen.can_repeat:
                    raise
                response = await self._sent_again(call, response, error)
                seen.repeat()

    async def _read_response(self, call: "_Call") -> tuple[dict[str, Any], httpx.Headers]:
        async with call.within_deadline():
            response = await self._sent(call)
            while True:
                try:
                    return await _whole(response)
                except BrokenOff as error:
                    if not call.resumes:
                        raise
                    response = await self._sent_again(call, response, error)

    async def _sent_again(self, call: "_Call", response: httpx.Response, error: BrokenOff) -> httpx.Response:
        """Another answer to a call whose answer broke off, from another region. Raises `error` if all attempts are
        used."""
        now = time.monotonic()
        self._failover.failed(response.extensions["region"], now)
        if self._failover.after_silence(call.tried, now) is None:
            raise error
        return await self._sent(call)

    async def _sent(self, call: "_Call") -> httpx.Response:
        """The first good answer, its body unread."""
        attempt: Attempt | None = Attempt(self._failover.order(time.monotonic())[0])
        failure: SwitchyardError | None = None
        while attempt is not None:
            await asyncio.sleep(attempt.wait_s)
            try:
                response = await self._hedged(call, attempt.region)
            except httpx.TransportError:
                failure = NoAnswer("; ".join(f"{url}: {why}" for url, why in call.failures.items()))
                attempt = self._failover.after_silence(call.tried, time.monotonic())
                continue
            if response.is_success:
                return response
            region, failure = response.extensions["region"], await _refusal(response)
            attempt = self._failover.after_refusal(
                call.tried, region, failure.status, failure.retry_after_s, time.monotonic()
            )
        raise failure or NoAnswer("no attempt was made")

    async def _hedged(self, call: "_Call", region: int) -> httpx.Response:
        """Returns the answer of a region, or of the next one if that is also tried and is faster."""
        others = [each for each in self._failover.order(time.monotonic()) if each not in {region, *call.tried}]
        if self._hedge_after_s is None or not others or call.method != "POST":
            return await self._once(call, region)
        racing = {asyncio.create_task(self._once(call, region))}
        try:
            done, waiting = await asyncio.wait(racing, timeout=self._hedge_after_s)
            if not done:
                racing.add(asyncio.create_task(self._once(call, others[0])))
                waiting = racing
            while waiting and not any(map(_is_good, done)):
                more, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                done |= more
            winner = next(filter(_is_good, done), None) or done.pop()
            racing.discard(winner)
            return winner.result()
        finally:
            await _abandon(racing)

    async def _once(self, call: "_Call", region: int) -> httpx.Response:
        call.tried.append(region)
        headers = {**call.headers(), **self._trace()}
        url = _url(self.regions[region], call.path)
        request = self._http.build_request(call.method, url, content=call.content, headers=headers)
        try:
            response = await self._http.send(request, stream=True)
        except httpx.TransportError as error:
            call.failures[self.regions[region]] = repr(error)
            self._failover.failed(region, time.monotonic())
            raise
        response.extensions["region"] = region
        if response.status_code < httpx.codes.INTERNAL_SERVER_ERROR:
            self._failover.answered(region)
        return response


class _Call:
    """One call and its attempts, which share one request id."""

    def __init__(
        self,
        method: str,
        path: str,
        body: Body | None = None,
        deadline_s: float | None = None,
        headers: Mapping[str, str] | None = None,
        *,
        resumes: bool = False,
    ) -> None:
        self.method, self.path = method, path if path.startswith("/") else f"/{path}"
        self.content = None if body is None else json.dumps(body).encode()
        self.tried: list[int] = []
        self.resumes = resumes
        self.failures: dict[str, str] = {}
        self._headers = {
            "x-request-id": uuid.uuid4().hex,
            **{name.lower(): text for name, text in (headers or {}).items()},
        }
        self._headers |= {"content-type": "application/json"} if body is not None else {}
        self._deadline_s = deadline_s
        self._ends_at = None if deadline_s is None else time.monotonic() + deadline_s

    @asynccontextmanager
    async def within_deadline(self) -> AsyncIterator[None]:
        limit = asyncio.timeout(self._deadline_s)
        try:
            async with limit:
                yield
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise DeadlineExceeded(f"{self.path} was not answered within {self._deadline_s:g} s") from error

    def headers(self) -> dict[str, str]:
        """Returns the headers of the next attempt, with the remaining deadline."""
        if self._ends_at is None:
            return self._headers
        left_ms = max(1, round((self._ends_at - time.monotonic()) * 1000))
        return {**self._headers, "x-switchyard-deadline-ms": str(left_ms)}


async def _whole(response: httpx.Response) -> tuple[dict[str, Any], httpx.Headers]:
    async with aclosing(response):
        try:
            return json_object(await response.aread(), response), response.headers
        except httpx.TransportError as error:
            raise BrokenOff(f"the answer of {response.url} broke off: {error!r}") from error


async def _refusal(response: httpx.Response) -> ApiError:
    """Returns an error with as much of its body as arrives."""
    try:
        body = await response.aread()
    except httpx.TransportError:
        body = b""
    await response.aclose()
    return ApiError(response.status_code, body, response.headers)


def _url(region: str, path: str) -> str:
    """Returns the URL of a path: below the base URL of a region, unless it has a version or needs none."""
    origin = region.removesuffix("/v1")
    bare = path.partition("?")[0]
    return (origin if _VERSIONED.match(path) or bare in _UNVERSIONED else region) + path


def _messages(messages: Messages) -> Sequence[Body | Message]:
    return [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)


def _parted(options: Body) -> tuple[dict[str, Any], CallOptions]:
    """Separates the members of a body from the options of its call."""
    call: CallOptions = {}
    if "deadline_s" in options:
        call["deadline_s"] = options["deadline_s"]
    if "headers" in options:
        call["headers"] = options["headers"]
    if "resumes" in options:
        call["resumes"] = options["resumes"]
    return {name: value for name, value in options.items() if name not in call}, call


def _transport(ca_file: str | None, proxy: str | None) -> httpx.AsyncHTTPTransport:
    """Returns connections with the limits of this client. They ignore the proxies of the environment."""
    return httpx.AsyncHTTPTransport(
        verify=True if ca_file is None else ssl.create_default_context(cafile=ca_file),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=100, keepalive_expiry=30.0),
        proxy=proxy,
    )


def _id(request: Pending | str) -> str:
    return quote(request.id if isinstance(request, Pending) else request, safe="")


def _is_good(task: "asyncio.Task[httpx.Response]") -> bool:
    return task.done() and not task.cancelled() and task.exception() is None and task.result().is_success


async def _abandon(tasks: "set[asyncio.Task[httpx.Response]]") -> None:
    """Cancel the losing attempts: their engines stop when the connection is closed."""
    for task in tasks:
        task.cancel()
    for ended in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(ended, httpx.Response):
            await ended.aclose()
