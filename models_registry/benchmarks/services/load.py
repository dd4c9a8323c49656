"""Sends one streamed completion over HTTP/1.1 and notes when each piece came. Connections are kept for later requests.

A separate client, because it must cost little: it shares a host with what it measures, and a stream of tokens is a
piece every few milliseconds. It reads what Switchyard's own proxies and OpenAI-compatible engines answer.

Offers load at one rate until its point is judged. Open loop: each request is sent when it is due, whatever became of
the others, and its latency counts from then. It decides nothing: when a point is over is planned elsewhere.
"""

import asyncio
import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, field

import msgspec

from models_registry.benchmarks.planning.goodput import (
    GoodputRules,
    Outcome,
    PointJudgement,
    judge_early,
    judge_whole,
    length_s,
)
from models_registry.benchmarks.planning.measurements import Sample
from models_registry.benchmarks.planning.workload import Slo

HEAD_BYTES = 65_536
CONNECT_S = 5.0
ERROR_BYTES = 2_000


@dataclass(frozen=True, slots=True)
class LoadTarget:
    """Where requests go. `server_name`: what the certificate there must be of; `model`: as requests name it."""

    host: str
    port: int
    model: str
    path: str = "/v1/completions"
    headers: Mapping[str, str] = field(default_factory=dict)
    tls: ssl.SSLContext | None = None
    server_name: str | None = None


class _Cached(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Cached | None = None


class _Piece(msgspec.Struct):
    choices: list[msgspec.Raw] = []
    usage: _Usage | None = None
    error: msgspec.Raw | None = None


class BadAnswer(Exception):
    """The response cannot be read; the text says why."""


class LoadClient:
    def __init__(self, target: LoadTarget, now_s: Callable[[], float]) -> None:
        self._target, self._now_s = target, now_s
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        self._decode = msgspec.json.Decoder(_Piece).decode
        names = {"Host": f"{target.host}:{target.port}", "Content-Type": "application/json", **target.headers}
        self._head = f"POST {target.path} HTTP/1.1\r\n" + "".join(f"{name}: {text}\r\n" for name, text in names.items())

    async def complete(self, body: bytes, due_s: float) -> Sample:
        """Send it now. Never raises for what the other side does; cancelling it closes its connection."""
        sent_s, connection = self._now_s(), None
        seen = _Seen()
        try:
            connection = self._idle.pop() if self._idle else await self._connect()
            keeps = await self._exchange(*connection, body, seen)
            if keeps:
                self._idle.append(connection)
                connection = None
        except (OSError, EOFError, TimeoutError, asyncio.LimitOverrunError, ValueError, BadAnswer) as wrong:
            seen.error = seen.error or f"{type(wrong).__name__}: {wrong}"[:200]
        finally:
            if connection is not None:
                connection[1].transport.abort()
        return Sample(
            due_s,
            sent_s,
            seen.first_s,
            self._now_s(),
            seen.status,
            seen.usage.prompt_tokens,
            seen.usage.completion_tokens or seen.pieces,
            (seen.usage.prompt_tokens_details or _Cached()).cached_tokens or 0,
            tuple(seen.gaps_s),
            seen.error,
            seen.cell,
        )

    def close(self) -> None:
        for _, writer in self._idle:
            writer.transport.abort()
        self._idle.clear()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        target = self._target
        async with asyncio.timeout(CONNECT_S):
            return await asyncio.open_connection(
                target.host, target.port, ssl=target.tls, server_hostname=target.server_name if target.tls else None
            )

    async def _exchange(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: bytes, seen: "_Seen"
    ) -> bool:
        """Whether the connection can be used again."""
        writer.write(f"{self._head}Content-Length: {len(body)}\r\n\r\n".encode("latin-1") + body)
        await writer.drain()
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        seen.status = int(head[0].split(" ")[1])
        headers = {name.strip().lower(): text.strip() for name, _, text in (line.partition(":") for line in head[1:])}
        seen.cell = headers.get("x-switchyard-cell", "")
        async with aclosing(_parts(reader, headers)) as parts:
            if seen.status != 200:
                seen.error = "".join([part.decode("utf-8", "replace") async for part in parts])[:ERROR_BYTES]
                return False
            rest = b""
            async for part in parts:
                rest = self._read(rest + part, seen)
        if not seen.is_done:
            raise BadAnswer("the answer ended before its last event")
        return headers.get("connection", "").lower() != "close"

    def _read(self, text: bytes, seen: "_Seen") -> bytes:
        """Take the whole events off the text; what is left is the beginning of another."""
        *events, rest = text.split(b"\n\n")
        for event in events:
            data = event.removeprefix(b"data: ")
            if data == event or not data:
                continue
            if data == b"[DONE]":
                seen.is_done = True
                continue
            piece = self._decode(data)
            if piece.error is not None:
                raise BadAnswer(bytes(piece.error).decode("utf-8", "replace")[:200])
            seen.usage = piece.usage or seen.usage
            if piece.choices:
                seen.came(self._now_s())
        return rest


@dataclass(slots=True)
class _Seen:
    status: int = 0
    first_s: float = 0.0
    last_s: float = 0.0
    pieces: int = 0
    gaps_s: list[float] = field(default_factory=list)
    usage: _Usage = field(default_factory=_Usage)
    is_done: bool = False
    error: str = ""
    cell: str = ""

    def came(self, now_s: float) -> None:
        if self.pieces:
            self.gaps_s.append(now_s - self.last_s)
        else:
            self.first_s = now_s
        self.pieces, self.last_s = self.pieces + 1, now_s


async def _parts(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> AsyncGenerator[bytes, None]:
    """The body in pieces, as they come."""
    if "chunked" in headers.get("transfer-encoding", ""):
        while size := int((await reader.readuntil(b"\r\n")).partition(b";")[0], 16):
            yield (await reader.readexactly(size + 2))[:-2]
        await reader.readuntil(b"\r\n")
    elif (length := headers.get("content-length")) is not None:
        yield await reader.readexactly(int(length))
    else:
        with suppress(EOFError):
            while part := await reader.read(HEAD_BYTES):
                yield part


LOOK_EVERY_S = 0.1
TELL_EVERY_S = 1.0
MOST_AT_ONCE = 4096
"""Requests under way. A cell with so many is far beyond any objective, and this host must not run out of sockets."""
HOPELESS_AFTER = 20
REFUSALS = frozenset({400, 401, 403, 404, 405, 413, 415, 422})
"""Errors that a lower rate would not avoid."""


class HopelessPoint(Exception):
    """Nothing can be measured there; the text says why."""


@dataclass(frozen=True, slots=True)
class MeasuredPoint:
    """`samples` are the requests that count, in the order in which they were due; `span_s`: how long that was."""

    rate: float
    judgement: PointJudgement
    samples: tuple[Sample, ...]
    span_s: float


@dataclass(frozen=True, slots=True)
class Progress:
    """Of a point under way: requests that count and are known, of about how many, and which of them were inside."""

    rate: float
    known: int
    expected: int
    inside: int


Tell = Callable[[Progress], Awaitable[None]]
Offered = tuple[float, bytes, int]
"""When it is due, in seconds from the beginning; its body; how many tokens it asks for."""


async def measure_point(
    target: LoadTarget,
    offered: Iterable[Offered],
    rate: float,
    slo: Slo,
    rules: GoodputRules,
    *,
    warm_s: float,
    tell: Tell,
) -> MeasuredPoint:
    """Offer the requests and judge those that are due after `warm_s`. `tell` is called about every second and may raise
    to end it all.

    Raises:
        HopelessPoint: the first requests that count were all refused for what they are, or never answered.
    """
    point = _Point(target, rate, slo, rules, warm_s)
    sending = asyncio.get_running_loop().create_task(point.send(offered))
    try:
        return await point.watch(sending, tell)
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        await point.end()


class _Point:
    def __init__(self, target: LoadTarget, rate: float, slo: Slo, rules: GoodputRules, warm_s: float) -> None:
        loop = asyncio.get_running_loop()
        self._now_s = loop.time
        self._began_s = loop.time()
        self._client = LoadClient(target, loop.time)
        self._rate, self._slo, self._rules = rate, slo, rules
        self._warm_s = warm_s
        self._due: list[float] = []
        self._longest_s: list[float] = []
        self._samples: dict[int, Sample] = {}
        self._running: dict[int, asyncio.Task[None]] = {}
        self._outcomes: list[Outcome] = []
        self._next = 0

    async def send(self, offered: Iterable[Offered]) -> None:
        for number, (after_s, body, tokens) in enumerate(offered):
            due_s = self._began_s + after_s
            await asyncio.sleep(due_s - self._now_s())
            if len(self._running) >= MOST_AT_ONCE:
                return
            self._due.append(due_s)
            self._longest_s.append(self._slo.longest_s(tokens))
            self._running[number] = asyncio.get_running_loop().create_task(self._one(number, body, due_s))

    async def watch(self, sending: "asyncio.Task[None]", tell: Tell) -> MeasuredPoint:
        told_s = 0.0
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            if judgement := self._judge(sending):
                return self._measured(judgement)
            if self._now_s() - told_s >= TELL_EVERY_S:
                told_s = self._now_s()
                expected = max(len(self._outcomes), round(self._rate * self._length_s()))
                inside = sum(outcome.is_inside for outcome in self._outcomes)
                await tell(Progress(self._rate, len(self._outcomes), expected, inside))

    async def end(self) -> None:
        """Cut what is under way, so that the next point finds an empty cell."""
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._client.close()

    async def _one(self, number: int, body: bytes, due_s: float) -> None:
        try:
            self._samples[number] = await self._client.complete(body, due_s)
        finally:
            del self._running[number]

    def _judge(self, sending: "asyncio.Task[None]") -> PointJudgement | None:
        while self._next < len(self._due) and self._take(self._next):
            self._next += 1
            if judgement := judge_early(self._outcomes, self._rules, self._rate):
                return judgement
        self._refuse_hopeless()
        if sending.done() and not sending.cancelled():
            sending.result()
            return judge_whole(
                [*self._outcomes, Outcome(False, 0.0)], self._rules, self._rate
            )  # too many concurrent requests
        if not self._outcomes or not self._is_over(self._warm_s + self._length_s()):
            return None
        return judge_whole(self._outcomes, self._rules, self._rate)

    def _is_over(self, length_s: float) -> bool:
        """Whether so much time has passed, and what became of each request that was due in it is known: those that take
        long would be left out else."""
        is_known = self._next >= len(self._due) or self._due[self._next] - self._began_s >= length_s
        return is_known and self._now_s() - self._began_s >= length_s

    def _take(self, number: int) -> bool:
        """Note what became of a request; False: that is not known yet."""
        sample, due_s = self._samples.get(number), self._due[number]
        counts = due_s - self._began_s >= self._warm_s
        if sample is not None:
            outcome = Outcome(sample.is_inside(self._slo), sample.duration_s)
        elif self._now_s() - due_s > self._longest_s[number]:
            outcome = Outcome(False, self._now_s() - due_s)
        else:
            return not counts
        if counts:
            self._outcomes.append(outcome)
        return True

    def _length_s(self) -> float:
        return length_s(self._rate, [outcome.duration_s for outcome in self._outcomes], self._rules)

    def _counted(self) -> list[Sample]:
        """In the order in which they were due; of one that was too late, and had not ended, that it was."""
        counted = range(self._next)
        return [
            self._samples.get(number) or Sample(self._due[number], self._due[number], error="it had not ended")
            for number in counted
            if self._due[number] - self._began_s >= self._warm_s
        ]

    def _refuse_hopeless(self) -> None:
        first = [self._samples[number] for number in sorted(self._samples)[:HOPELESS_AFTER]]
        if len(first) < HOPELESS_AFTER or any(sample.is_whole for sample in self._samples.values()):
            return
        refused = [sample for sample in first if sample.status in REFUSALS or sample.status == 0]
        if len(refused) == len(first):
            what = f"status {refused[0].status}" if refused[0].status else "no answer"
            raise HopelessPoint(f"the first {len(first)} requests got {what}: {refused[0].error[:300]}")

    def _measured(self, judgement: PointJudgement) -> MeasuredPoint:
        samples = self._counted()
        span_s = samples[-1].due_s - samples[0].due_s if len(samples) > 1 else 0.0
        return MeasuredPoint(self._rate, judgement, tuple(samples), max(span_s, len(samples) / self._rate))
