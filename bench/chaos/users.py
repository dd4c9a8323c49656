"""Users of a fleet under faults: the product's Python client, which knows all ingresses, sends greedy requests at a
steady rate. Each answer is compared with that of the same request before the first fault."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from enum import StrEnum
from threading import Thread
from typing import Any

import httpx

from switchyard_client import AsyncSwitchyard, BrokenOff, Retries, SwitchyardError
from switchyard_client.answers import Answer, Event, Usage

HEDGE_AFTER_S = 4.0
"""Without a first byte by then the client also tries the next ingress: one that hangs still accepts connections."""
CONNECT_S, SILENCE_S = 2.0, 90.0
RETRIES = Retries(attempts=8)
LONG_PROMPT = "All work and no play. " * 900
"""Longer than what the entrance reads, so the request passes a body parser."""


class Outcome(StrEnum):
    COMPLETE = "complete"
    REPEATED = "repeated"
    """Complete, but the connection broke, and the client continued with a repeat (`resumes`)."""
    FAILED = "failed"
    """The client gave up without any part of an answer."""
    CUT = "cut"
    """`BrokenOff`, or an error within a stream."""
    WRONG = "wrong"
    """Another text or usage than undisturbed."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request, and its undisturbed answer: text, prompt tokens and completion tokens."""

    name: str
    path: str
    body: Mapping[str, Any]
    is_stream: bool = True
    text: str = ""
    usage: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class Attempt:
    """One HTTP request of the client. `status` is 0 if no answer began."""

    url: str
    began: float
    status: int = 0
    is_repeat: bool = False
    """The client had a part of the answer, which broke off."""
    was_refused: bool = False
    """An ingress answered 5xx for want of a cell: none answered, or the one that did had not sent it to its engine."""


@dataclass
class Request:
    """One request as its user saw it, times from `time.monotonic`."""

    prompt: Prompt
    began: float
    ended: float = 0.0
    outcome: Outcome = Outcome.COMPLETE
    error: str = ""
    attempts: list[Attempt] = field(default_factory=list)
    cell: str = ""
    text: str = ""
    usage: tuple[int, int] = (0, 0)
    events: int = 0
    longest_pause_s: float = 0.0
    """Between two events."""

    def __str__(self) -> str:
        tried = ", ".join(f"{attempt.url} {attempt.status or 'no answer'}" for attempt in self.attempts)
        what = f"{self.prompt.name} {self.outcome} after {self.ended - self.began:.1f} s and {self.events} events"
        return f"{what} on {self.cell or 'no cell'} ({tried}): {self.error}"


_CURRENT: ContextVar[Request] = ContextVar("request")


def prompts(model: str) -> tuple[Prompt, ...]:
    """Greedy requests of every dialect: short and long, streamed and not."""
    made: list[Prompt] = []
    greedy = {"model": model, "temperature": 0, "ignore_eos": True}
    for number, tokens in enumerate((24, 60, 120, 240, 90, 40)):
        limited = {**greedy, "max_tokens": tokens}
        counted = {**limited, "stream_options": {"include_usage": True}}
        text = f"Tell me about the number {number}."
        made += [
            Prompt(f"chat {number}", "/chat/completions", {**counted, "messages": _chat(text)}),
            Prompt(f"completion {number}", "/completions", {**counted, "prompt": text}),
            Prompt(f"response {number}", "/responses", {**greedy, "max_output_tokens": tokens, "input": text}),
            Prompt(f"message {number}", "/messages", {**limited, "messages": _chat(text)}),
        ]
    short = {**greedy, "max_tokens": 48}
    counted = {**short, "stream_options": {"include_usage": True}}
    return (
        *made,
        Prompt("long chat", "/chat/completions", {**counted, "messages": _chat(LONG_PROMPT)}),
        Prompt("whole chat", "/chat/completions", {**short, "messages": _chat("Say something.")}, is_stream=False),
        Prompt("whole completion", "/completions", {**short, "prompt": "Once upon a time"}, is_stream=False),
        Prompt("whole long chat", "/chat/completions", {**short, "messages": _chat(LONG_PROMPT)}, is_stream=False),
    )


def _chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


class Recorder(httpx.AsyncBaseTransport):
    """The client's connections; notes each attempt in the current request."""

    def __init__(self) -> None:
        self._inner = httpx.AsyncHTTPTransport(
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=20, keepalive_expiry=30.0)
        )

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        seen, at = _CURRENT.get(), time.monotonic()
        place = len(seen.attempts)
        url = f"{request.url.scheme}://{request.url.netloc.decode()}"
        seen.attempts.append(Attempt(url, at, is_repeat=seen.events > 0))
        response = await self._inner.handle_async_request(request)
        cell, status = response.headers.get("x-switchyard-cell", ""), response.status_code
        refused = status >= httpx.codes.INTERNAL_SERVER_ERROR and (not cell or "x-switchyard-retry" in response.headers)
        seen.attempts[place] = replace(seen.attempts[place], status=status, was_refused=refused)
        seen.cell = cell or seen.cell
        return response

    async def aclose(self) -> None:
        await self._inner.aclose()


def orders(by_region: Mapping[str, Sequence[str]]) -> list[list[str]]:
    """The ingresses as the clients try them: each is the first one of one client, then come those of its region."""
    return [
        [*urls[first:], *urls[:first], *(url for other in by_region if other != region for url in by_region[other])]
        for region, urls in by_region.items()
        for first in range(len(urls))
    ]


@asynccontextmanager
async def clients(by_region: Mapping[str, Sequence[str]]) -> AsyncIterator[list[AsyncSwitchyard]]:
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(
                AsyncSwitchyard(
                    [f"{url}/v1" for url in order],
                    retries=RETRIES,
                    hedge_after_s=HEDGE_AFTER_S,
                    connect_s=CONNECT_S,
                    silence_s=SILENCE_S,
                    transport=Recorder(),
                )
            )
            for order in orders(by_region)
        ]


async def one_request(client: AsyncSwitchyard, prompt: Prompt, seen: Request) -> None:
    """Send one request and note what became of it."""
    _CURRENT.set(seen)
    try:
        if prompt.is_stream:
            async with client.stream(prompt.path, prompt.body, resumes=True) as events:
                await _read(seen, events)
        else:
            answer = await client.post(prompt.path, prompt.body, resumes=True)
            seen.text, seen.usage, seen.events = answer.text, _tokens(answer), 1
    except BrokenOff as error:
        seen.outcome, seen.error = Outcome.CUT, str(error)
    except SwitchyardError as error:
        seen.outcome = Outcome.CUT if seen.events else Outcome.FAILED
        seen.error = f"{type(error).__name__}: {error}"
    seen.ended = time.monotonic()
    if seen.outcome is Outcome.COMPLETE and any(attempt.is_repeat for attempt in seen.attempts):
        seen.outcome = Outcome.REPEATED
    is_whole = seen.outcome in (Outcome.COMPLETE, Outcome.REPEATED)
    if is_whole and prompt.text and (seen.text, seen.usage) != (prompt.text, prompt.usage):
        seen.outcome, seen.error = Outcome.WRONG, _difference(prompt, seen)


async def _read(seen: Request, events: AsyncIterator[Event]) -> None:
    pieces, last = [], 0.0
    async for event in events:
        now = time.monotonic()
        seen.longest_pause_s = max(seen.longest_pause_s, now - last if last else 0.0)
        last = now
        seen.events += 1
        pieces.append(event.text)
        if usage := event.usage:
            # Anthropic's dialect states the prompt first and the completion at the end.
            seen.usage = usage.prompt_tokens or seen.usage[0], usage.completion_tokens or seen.usage[1]
    seen.text = "".join(pieces)


def _tokens(answer: Answer) -> tuple[int, int]:
    usage = answer.usage or Usage()
    return usage.prompt_tokens, usage.completion_tokens


def _difference(prompt: Prompt, seen: Request) -> str:
    if seen.text == prompt.text:
        return f"usage {seen.usage} instead of {prompt.usage}"
    same = next(
        (at for at, (got, want) in enumerate(zip(seen.text, prompt.text, strict=False)) if got != want),
        min(len(seen.text), len(prompt.text)),
    )
    got, want = (text[max(0, same - 20) : same + 40] for text in (seen.text, prompt.text))
    return (
        f"texts of {len(seen.text)} and {len(prompt.text)} characters differ at {same}: {got!r}, undisturbed {want!r}"
    )


class Users:
    """Requests of all users, in the order in which they began, and the undisturbed answers. `rate`: requests a second
    of all users together."""

    def __init__(self, by_region: Mapping[str, Sequence[str]], model: str, rate: float, seed: int) -> None:
        self._by_region, self._rate = by_region, rate
        self._chance = random.Random(seed)
        self._prompts = prompts(model)
        self.requests: list[Request] = []

    def record(self) -> None:
        """Sends each request once, undisturbed. Raises RuntimeError if one fails."""
        self._prompts = asyncio.run(self._recorded())

    async def _recorded(self) -> tuple[Prompt, ...]:
        async with clients(self._by_region) as each:
            seen = [Request(prompt, time.monotonic()) for prompt in self._prompts]
            for one in seen:
                await one_request(each[0], one.prompt, one)
        if failed := [
            str(one) for one in seen if one.outcome is not Outcome.COMPLETE or not one.text or not all(one.usage)
        ]:
            raise RuntimeError(f"undisturbed requests failed: {'; '.join(failed)}")
        return tuple(replace(one.prompt, text=one.text, usage=one.usage) for one in seen)

    @contextmanager
    def sending(self) -> Iterator[list[Request]]:
        """Sends requests from a thread while the block runs, then waits for their answers."""
        loop, stop = asyncio.new_event_loop(), asyncio.Event()
        thread = Thread(target=loop.run_until_complete, args=(self._send(stop),), name="users")
        thread.start()
        try:
            yield self.requests
        finally:
            loop.call_soon_threadsafe(stop.set)
            thread.join()
            loop.close()

    async def _send(self, stop: asyncio.Event) -> None:
        async with clients(self._by_region) as each, asyncio.TaskGroup() as group:
            began, sent = time.monotonic(), 0
            while not stop.is_set():
                client, prompt = each[sent % len(each)], self._chance.choice(self._prompts)
                self.requests.append(Request(prompt, time.monotonic()))
                group.create_task(one_request(client, prompt, self.requests[-1]))
                sent += 1
                await asyncio.sleep(max(0.0, began + sent / self._rate - time.monotonic()))
