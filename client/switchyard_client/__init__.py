"""A light client of Switchyard's ingresses, over httpx: several regions with failover, deadlines, serving classes,
retries by `Retry-After`, hedged first tokens, near-real-time requests and their callbacks. Sync and async.

It sends bodies of OpenAI's or Anthropic's API and returns the engine's answers. A request is never sent again after a
byte of its answer. `Failover` decides the order of regions; it is pure."""

import asyncio
import hmac
import json
import os
import re
import ssl
import threading
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    aclosing,
    asynccontextmanager,
    contextmanager,
)
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Self, TypedDict, TypeVar, Unpack
from urllib.parse import quote

import httpx

from switchyard_client.bodies import ChatMembers, EmbeddingsMembers, Message

Body = Mapping[str, Any]
Messages = Sequence[Body] | Sequence[Message] | str
Inputs = str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]
ServingClass = Literal["realtime", "near_realtime", "batch"]
T = TypeVar("T")

CALLBACK_TOLERANCE_S: Final = 300.0
"""Maximum age of a callback, against replays."""
MAX_EVENT_BYTES: Final = 16 * 1024 * 1024
_ENDED = frozenset({"done", "failed", "expired", "cancelled"})
_VERSIONED = re.compile(r"/v\d+/")
_UNVERSIONED = frozenset({
    "/tokenize", "/detokenize", "/pooling", "/classify", "/score", "/rerank", "/health", "/healthz", "/version",
})  # fmt: skip
"""Paths that ingresses serve next to `/v1`, not below it."""
_LAST_EVENTS = frozenset({"response.completed", "response.incomplete", "response.failed", "message_stop"})
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|h|m|s)")
_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


class SwitchyardError(Exception):
    """Base class of this client's errors."""


class NoAnswer(SwitchyardError):
    """No region sent a byte of an answer; the text has the last attempt of each."""


class DeadlineExceeded(SwitchyardError):
    """The deadline of the call passed first."""


class BrokenOff(SwitchyardError):
    """An answer was incomplete. The received part is valid; the request was not sent again, because it had started."""


class BadCallback(SwitchyardError):
    """A callback that is not from the fleet or is too old. Respond with 400."""


class ApiError(SwitchyardError):
    """A refusal. `retry_after_s` is None if a retry does not help or its time is unknown."""

    def __init__(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        try:
            error = json.loads(body)["error"]
        except (ValueError, KeyError, TypeError):
            error = {}
        document = error if isinstance(error, dict) else {"message": error}
        self.status = status
        self.message = str(document.get("message") or body[:500].decode("utf-8", "replace"))
        self.type, self.code, self.param = document.get("type"), document.get("code"), document.get("param")
        self.retry_after_s = _retry_after_s(headers)
        self.request_id = headers.get("x-request-id", "")
        self.budgets = Budget.all_of(headers)
        super().__init__(f"{status} {self.code or self.type or 'refused'}: {self.message}")


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request by its engine; `cached_tokens` are those of the prompt that it did not compute."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    @classmethod
    def of(cls, body: Body) -> "Usage | None":
        """Reads the usage of an answer or event of OpenAI's, Responses or Anthropic's API; None if it has none."""
        usage = body.get("usage") or (body.get("response") or body.get("message") or {}).get("usage")
        if not isinstance(usage, Mapping):
            return None
        details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
        return cls(
            usage.get("prompt_tokens", usage.get("input_tokens")) or 0,
            usage.get("completion_tokens", usage.get("output_tokens")) or 0,
            details.get("cached_tokens") or usage.get("cache_read_input_tokens") or 0,
        )


@dataclass(frozen=True, slots=True)
class Budget:
    """One limit of a key, per minute. `reset_s`: seconds until all of it is available again."""

    limit: int
    remaining: int
    reset_s: float

    @classmethod
    def all_of(cls, headers: Mapping[str, str]) -> "dict[str, Budget]":
        """Reads the limits of `requests` and `tokens` in `x-ratelimit-*`; other limits are not set on the key."""
        found = {}
        for kind in ("requests", "tokens"):
            limit, left, reset = (
                headers.get(f"x-ratelimit-{each}-{kind}", "") for each in ("limit", "remaining", "reset")
            )
            if limit.isdecimal() and left.isdecimal():
                reset_s = sum(float(count) * _UNITS_S[unit] for count, unit in _DURATION.findall(reset))
                found[kind] = cls(int(limit), int(left), reset_s)
        return found


@dataclass(frozen=True, slots=True)
class Answer:
    """A complete answer. `headers` name region and cell (`X-Switchyard-Region`, `…-Cell`); `attempts`: number of
    attempts."""

    json: dict[str, Any]
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    attempts: int = 1

    @property
    def text(self) -> str:
        """The first choice's text, of chats, completions, responses and messages."""
        for choice in self.json.get("choices") or ():
            return str((choice.get("message") or choice).get("content") or choice.get("text") or "")
        parts = [part for item in self.json.get("output") or () for part in item.get("content") or ()]
        return "".join(part.get("text") or "" for part in (*parts, *(self.json.get("content") or ())))

    @property
    def embeddings(self) -> list[list[float]]:
        """The vectors of `/v1/embeddings`, in the order of the inputs."""
        rows = sorted(self.json.get("data") or (), key=lambda row: row.get("index") or 0)
        return [row["embedding"] for row in rows]

    @property
    def usage(self) -> Usage | None:
        return Usage.of(self.json)

    @property
    def budgets(self) -> dict[str, Budget]:
        return Budget.all_of(self.headers)

    @property
    def region(self) -> str:
        return self.headers.get("x-switchyard-region", "")


@dataclass(frozen=True, slots=True)
class Event:
    """One event of a stream. `name`: from its line `event`, empty in OpenAI's chats."""

    name: str
    json: dict[str, Any]

    @property
    def text(self) -> str:
        """The text for the first choice."""
        for choice in self.json.get("choices") or ():
            return str((choice.get("delta") or choice).get("content") or choice.get("text") or "")
        delta = self.json.get("delta")
        if isinstance(delta, str):
            return delta if self.json.get("type") == "response.output_text.delta" else ""
        return str(delta.get("text") or "") if isinstance(delta, Mapping) else ""

    @property
    def usage(self) -> Usage | None:
        return Usage.of(self.json)


@dataclass(frozen=True, slots=True)
class Pending:
    """The last known state of a near-real-time request. `callback_secret` is only in the response that accepts it."""

    id: str
    status: str
    json: dict[str, Any]
    callback_secret: str = field(default="", repr=False)

    @property
    def has_ended(self) -> bool:
        return self.status in _ENDED

    @property
    def answer(self) -> Answer | None:
        """The engine's answer, once `status` is done."""
        body = (self.json.get("response") or {}).get("body")
        return None if self.status != "done" or body is None else Answer(body)


@dataclass(frozen=True, slots=True)
class Retries:
    """Bounds of one call. `longest_wait_s`: maximum `Retry-After` to wait for. `rest_s`: how long a failed region is
    tried last."""

    attempts: int = 5
    longest_wait_s: float = 30.0
    rest_s: float = 5.0


class CallOptions(TypedDict, total=False):
    """Options of one call. `deadline_s`: seconds after which the engine stops. `headers`: additional headers, such as
    `X-Switchyard-Class` for another class or `X-Session-Id`."""

    deadline_s: float | None
    headers: Mapping[str, str]


class ChatOptions(ChatMembers, CallOptions, total=False):
    """Members of a chat, and options of the call."""


class EmbeddingsOptions(EmbeddingsMembers, CallOptions, total=False):
    """Members of an embeddings request, and options of the call."""


class SubmitOptions(TypedDict, total=False):
    """Options of a near-real-time request. `deadline_s`: time limit of its outcome, 15 minutes by default. A default
    `idempotency_key` prevents a retry from creating a second request."""

    deadline_s: float | None
    callback_url: str
    idempotency_key: str


class ClientOptions(TypedDict, total=False):
    """Options of a client. `hedge_after_s`: without a first byte by then, the next region is tried as well, and the
    first answer wins; default: never. `trace`: returns headers for each attempt, such as `traceparent`. `connect_s` and
    `silence_s`: maximum time to connect, and between bytes; 5 and 600. `ca_file`: PEM file of the only trusted
    authorities. `proxy`: URL of a proxy; by default none is used, whatever the environment names."""

    api_key: str | None
    serving_class: ServingClass | None
    hedge_after_s: float | None
    retries: Retries
    connect_s: float
    silence_s: float
    trace: Callable[[], Mapping[str, str]]
    ca_file: str
    proxy: str
    transport: httpx.AsyncBaseTransport


@dataclass(frozen=True, slots=True)
class Attempt:
    """Send the request to the region with this index, after `after_s`."""

    region: int
    wait_s: float = 0.0


class Failover:
    """Decides which region a call tries next. The first is home. A failed region comes last for a while, for all calls
    of the client, and twice as long if it fails again. Time is an argument, in seconds of one clock."""

    def __init__(self, regions: int, retries: Retries) -> None:
        self._retries = retries
        self._rests_until = [0.0] * regions
        self._failures = [0] * regions

    def order(self, now: float) -> list[int]:
        """Returns all regions: available ones in the given order, then failed ones, the earliest failure first."""
        return sorted(range(len(self._rests_until)), key=lambda each: (max(0.0, self._rests_until[each] - now), each))

    def answered(self, region: int) -> None:
        self._rests_until[region] = self._failures[region] = 0

    def failed(self, region: int, now: float) -> None:
        """Marks a region that sent no byte of an answer as failed."""
        rest_s = self._retries.rest_s * 2 ** self._failures[region]
        self._failures[region] += rest_s < self._retries.longest_wait_s
        self._rests_until[region] = now + rest_s

    def after_silence(self, tried: Sequence[int], now: float) -> Attempt | None:
        """Returns another region immediately, or an earlier one after a pause if all were tried. Returns None to give
        up."""
        return self._next(tried, now, pause_s=0.1 * 2 ** len(tried))

    def after_refusal(
        self, tried: Sequence[int], region: int, status: int, retry_after_s: float | None, now: float
    ) -> Attempt | None:
        """Returns the next try after a refusal. Only refusals with `Retry-After` are retried: in the same region later
        if the key has used its limit (429), else in another one immediately. Returns None to give up."""
        if retry_after_s is None:
            return None
        if status == httpx.codes.TOO_MANY_REQUESTS:
            return self._within_bounds(tried, Attempt(region, retry_after_s))
        self._rests_until[region] = now + retry_after_s
        return self._next(tried, now, pause_s=retry_after_s)

    def _next(self, tried: Sequence[int], now: float, pause_s: float) -> Attempt | None:
        order = self.order(now)
        fresh = [region for region in order if region not in tried]
        return self._within_bounds(tried, Attempt(fresh[0]) if fresh else Attempt(order[0], pause_s))

    def _within_bounds(self, tried: Sequence[int], attempt: Attempt) -> Attempt | None:
        is_within = len(tried) < self._retries.attempts and attempt.wait_s <= self._retries.longest_wait_s
        return attempt if is_within else None


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
        async with call.within_deadline():
            response = await self._sent(call)
            async with aclosing(response), aclosing(_events(response)) as events:
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

    async def _read_response(self, call: "_Call") -> tuple[dict[str, Any], httpx.Headers]:
        async with call.within_deadline(), aclosing(await self._sent(call)) as response:
            try:
                return _object(await response.aread(), response), response.headers
            except httpx.TransportError as error:
                raise BrokenOff(f"the answer of {response.url} broke off: {error!r}") from error

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
    ) -> None:
        self.method, self.path = method, path if path.startswith("/") else f"/{path}"
        self.content = None if body is None else json.dumps(body).encode()
        self.tried: list[int] = []
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


class Switchyard:
    """The same for code without an event loop, with the options of `AsyncSwitchyard`. Calls run on a loop in a thread
    of this client, so threads may share it. After a fork the child gets its own thread and connections."""

    def __init__(self, regions: str | Sequence[str], **options: Unpack[ClientOptions]) -> None:
        self._regions, self._options = regions, options
        self._lock = threading.Lock()
        self._start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the connections and the thread."""
        if self._pid == os.getpid() and not self._loop.is_closed():
            self._run(self._client.aclose())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def post(self, path: str, body: Body, **options: Unpack[CallOptions]) -> Answer:
        return self._run(self._ours().post(path, body, **options))

    def stream(self, path: str, body: Body, **options: Unpack[CallOptions]) -> AbstractContextManager[Iterator[Event]]:
        return self._reading(self._ours().stream(path, body, **options))

    def get(self, path: str, **options: Unpack[CallOptions]) -> Answer:
        return self._run(self._ours().get(path, **options))

    def chat(self, model: str, messages: Messages, **options: Unpack[ChatOptions]) -> Answer:
        return self._run(self._ours().chat(model, messages, **options))

    def stream_chat(
        self, model: str, messages: Messages, **options: Unpack[ChatOptions]
    ) -> AbstractContextManager[Iterator[Event]]:
        return self._reading(self._ours().stream_chat(model, messages, **options))

    def embeddings(self, model: str, inputs: Inputs, **options: Unpack[EmbeddingsOptions]) -> Answer:
        return self._run(self._ours().embeddings(model, inputs, **options))

    def models(self) -> list[dict[str, Any]]:
        return self._run(self._ours().models())

    def submit(self, path: str, body: Body, **options: Unpack[SubmitOptions]) -> Pending:
        return self._run(self._ours().submit(path, body, **options))

    def retrieve(self, request: Pending | str) -> Pending:
        return self._run(self._ours().retrieve(request))

    def cancel(self, request: Pending | str) -> Pending:
        return self._run(self._ours().cancel(request))

    def wait(self, request: Pending | str, **options: Any) -> Pending:
        return self._run(self._ours().wait(request, **options))

    @contextmanager
    def _reading(self, opening: AbstractAsyncContextManager[AsyncIterator[Event]]) -> Iterator[Iterator[Event]]:
        """One task opens, reads and closes a stream, because its deadline belongs to that task."""
        passed: asyncio.Queue[Event | Exception | None] = asyncio.Queue(maxsize=64)

        async def read() -> None:
            try:
                async with opening as events:
                    async for event in events:
                        await passed.put(event)
                await passed.put(None)
            except Exception as error:  # it is raised where events are read
                await passed.put(error)

        def taken() -> Iterator[Event]:
            while (event := self._run(passed.get())) is not None:
                if isinstance(event, Exception):
                    raise event
                yield event

        reading = asyncio.run_coroutine_threadsafe(read(), self._loop)
        try:
            yield taken()
        finally:
            reading.cancel()

    def _ours(self) -> AsyncSwitchyard:
        with self._lock:
            if self._pid != os.getpid():
                self._start()
        return self._client

    def _start(self) -> None:
        self._pid, self._loop, self._client = (
            os.getpid(),
            asyncio.new_event_loop(),
            AsyncSwitchyard(self._regions, **self._options),
        )
        self._thread = threading.Thread(target=self._loop.run_forever, name="switchyard-client", daemon=True)
        self._thread.start()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        running = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return running.result()
        except BaseException:
            running.cancel()  # Ctrl-C also ends the request
            raise


def verify_callback(body: bytes, headers: Mapping[str, str], secret: str, *, now: float | None = None) -> Pending:
    """Returns the ended request of a callback; `retrieve` has its answer. `body` is the raw body, `secret` the one of
    `submit`, `now` Unix time.

    Raises:
        BadCallback: not from the fleet, or too old."""
    document = {name.lower(): text for name, text in headers.items()}
    stamp = document.get("x-switchyard-timestamp", "")
    if re.fullmatch(r"[0-9]{1,15}", stamp) is None:
        raise BadCallback("X-Switchyard-Timestamp is missing or not a whole number of seconds")
    right = "sha256=" + hmac.new(secret.encode(), f"{stamp}.".encode() + body, "sha256").hexdigest()
    if not hmac.compare_digest(right.encode(), document.get("x-switchyard-signature", "").encode()):
        raise BadCallback("X-Switchyard-Signature does not match the body, the time and this secret")
    age_s = (time.time() if now is None else now) - int(stamp)
    if abs(age_s) > CALLBACK_TOLERANCE_S:
        raise BadCallback(f"it was signed {age_s:.0f} s ago; at most {CALLBACK_TOLERANCE_S:.0f} s are accepted")
    data = json.loads(body)["data"]
    return Pending(data["id"], data["status"], data)


class _SseParser:
    """Server-sent events from bytes, whose lines end with CR, LF or both. Each byte is read once, however cut."""

    def __init__(self) -> None:
        self._line: list[bytes] = []  # pieces of a line without its end
        self._fields: list[tuple[bytes, bytes]] = []
        self._size = 0
        self._after_return = False

    def feed(self, piece: bytes) -> Iterator[tuple[str, bytes]]:
        """Returns the complete events: name and data."""
        if self._after_return:
            piece = piece.removeprefix(b"\n")
            self._after_return = False
        if not piece:
            return
        self._after_return = piece.endswith(b"\r")
        *whole, rest = piece.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        for end in whole:
            self._grow(len(end))
            yield from self._ended(b"".join([*self._line, end]))
        self._grow(len(rest))
        self._line.append(rest)

    def _ended(self, line: bytes) -> Iterator[tuple[str, bytes]]:
        self._line = []
        if line:
            name, _, value = line.partition(b":")
            self._fields.append((name, value.removeprefix(b" ")))
            return
        data = b"\n".join(value for name, value in self._fields if name == b"data")
        names = [value.strip().decode("utf-8", "replace") for name, value in self._fields if name == b"event"]
        self._fields, self._size = [], 0
        if data:
            yield (names[-1] if names else ""), data

    def _grow(self, size: int) -> None:
        self._size += size
        if self._size > MAX_EVENT_BYTES:
            raise BrokenOff(f"an event is longer than {MAX_EVENT_BYTES} bytes")


async def _events(response: httpx.Response) -> AsyncGenerator[Event, None]:
    parser, is_over = _SseParser(), False
    try:
        async for piece in response.aiter_bytes():
            for name, data in parser.feed(piece):
                if data == b"[DONE]":
                    is_over = True
                    continue
                document = _object(data, response)
                if document.get("error") and document.get("object") != "response":
                    raise ApiError(response.status_code, data, response.headers)
                is_over = is_over or (name or document.get("type")) in _LAST_EVENTS
                yield Event(name, document)
    except httpx.TransportError as error:
        raise BrokenOff(f"the stream of {response.url} broke off: {error!r}") from error
    if not is_over:
        raise BrokenOff(f"the stream of {response.url} ended before its last event")


def _object(content: bytes, response: httpx.Response) -> dict[str, Any]:
    try:
        document = json.loads(content)
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise BrokenOff(f"{response.url} answered no JSON object: {content[:200]!r}")
    return document


async def _refusal(response: httpx.Response) -> ApiError:
    """Returns an error with as much of its body as arrives."""
    try:
        body = await response.aread()
    except httpx.TransportError:
        body = b""
    await response.aclose()
    return ApiError(response.status_code, body, response.headers)


def _retry_after_s(headers: Mapping[str, str]) -> float | None:
    for name, unit_s in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        if re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", headers.get(name, "")):
            return float(headers[name]) * unit_s
    return None


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
