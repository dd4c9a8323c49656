"""Offers load at one rate until its point is over, with a small HTTP/1.1 client that sends streamed completions and
records when each chunk arrived. Open loop: each request is sent when it is due, even if others are late, and its
latency counts from then. The client is separate because it shares a host with the cells that it measures and must be
cheap. It never decides when a point is over."""

import asyncio
import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, field

import msgspec

from models_registry.benchmarks.planning.goodput import (
    GoodputRules,
    Outcome,
    PointEvaluation,
    early_verdict,
    final_verdict,
    length_s,
)
from models_registry.benchmarks.planning.measurements import Sample
from models_registry.benchmarks.planning.workload import Slo

HEAD_BYTES = 65_536
CONNECT_S = 5.0
ERROR_BYTES = 2_000


@dataclass(frozen=True, slots=True)
class LoadTarget:
    """Where requests go. `server_name`: the expected name in the certificate; `model`: its name in requests."""

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
        """Send a completion. Never raises for errors of the other side. Cancelling it closes its connection."""
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
        """Whether the connection can be reused."""
        writer.write(f"{self._head}Content-Length: {len(body)}\r\n\r\n".encode("latin-1") + body)
        await writer.drain()
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        seen.status = int(head[0].split(" ")[1])
        headers = {name.strip().lower(): text.strip() for name, _, text in (line.partition(":") for line in head[1:])}
        seen.cell = headers.get("x-switchyard-cell", "")
        async with aclosing(_body_parts(reader, headers)) as parts:
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
        """Splits complete events off the text and returns the rest."""
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


async def _body_parts(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> AsyncGenerator[bytes, None]:
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
REPORT_EVERY_S = 1.0
MOST_AT_ONCE = 4096
"""Concurrent requests. This is far beyond any objective, and below this host's limit of sockets."""
HOPELESS_AFTER = 20
REFUSALS = frozenset({400, 401, 403, 404, 405, 413, 415, 422})
"""Errors that a lower rate would not avoid."""


class HopelessPoint(Exception):
    """Nothing can be measured; the text says why."""


@dataclass(frozen=True, slots=True)
class MeasuredPoint:
    """`samples`: the requests that count, in due order. `span_s`: how long requests were due."""

    rate: float
    judgement: PointEvaluation
    samples: tuple[Sample, ...]
    span_s: float


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a point: requests that have ended, about how many are needed, and which met the objective."""

    rate: float
    known: int
    expected: int
    inside: int


Tell = Callable[[Progress], Awaitable[None]]
Offered = tuple[float, bytes, int]
"""Seconds from the start at which it is due, its body, and the number of requested tokens."""


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
    """Offer the requests and judge those due after `warm_s`. Calls `tell` about every second; an exception in it ends
    the point. Raises HopelessPoint if the first requests that count were all rejected with an error that a lower rate
    cannot avoid."""
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
            self._running[number] = asyncio.get_running_loop().create_task(self._send_request(number, body, due_s))

    async def watch(self, sending: "asyncio.Task[None]", tell: Tell) -> MeasuredPoint:
        reported_s = 0.0
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            if judgement := self._evaluate(sending):
                return self._measured(judgement)
            if self._now_s() - reported_s >= REPORT_EVERY_S:
                reported_s = self._now_s()
                expected = max(len(self._outcomes), round(self._rate * self._length_s()))
                inside = sum(outcome.is_inside for outcome in self._outcomes)
                await tell(Progress(self._rate, len(self._outcomes), expected, inside))

    async def end(self) -> None:
        """Cancel open requests, so that the next point finds an empty cell."""
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._client.close()

    async def _send_request(self, number: int, body: bytes, due_s: float) -> None:
        try:
            self._samples[number] = await self._client.complete(body, due_s)
        finally:
            del self._running[number]

    def _evaluate(self, sending: "asyncio.Task[None]") -> PointEvaluation | None:
        while self._next < len(self._due) and self._record_result(self._next):
            self._next += 1
            if judgement := early_verdict(self._outcomes, self._rules, self._rate):
                return judgement
        self._refuse_hopeless()
        if sending.done() and not sending.cancelled():
            sending.result()
            return final_verdict(
                [*self._outcomes, Outcome(False, 0.0)], self._rules, self._rate
            )  # too many concurrent requests
        if not self._outcomes or not self._is_over(self._warm_s + self._length_s()):
            return None
        return final_verdict(self._outcomes, self._rules, self._rate)

    def _is_over(self, length_s: float) -> bool:
        """Whether the time is over and the result of each request due in it is known; otherwise slow requests would be
        left out."""
        is_known = self._next >= len(self._due) or self._due[self._next] - self._began_s >= length_s
        return is_known and self._now_s() - self._began_s >= length_s

    def _record_result(self, number: int) -> bool:
        """Record the result of a request. Returns False if it is not known yet."""
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
        """Samples in due order; a request that was too late and has not ended counts as such."""
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

    def _measured(self, judgement: PointEvaluation) -> MeasuredPoint:
        samples = self._counted()
        span_s = samples[-1].due_s - samples[0].due_s if len(samples) > 1 else 0.0
        return MeasuredPoint(self._rate, judgement, tuple(samples), max(span_s, len(samples) / self._rate))
