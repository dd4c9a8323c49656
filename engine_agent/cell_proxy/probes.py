"""Probes the engine, periodically and on request, and passes the results to `health`, which decides what they mean."""

import asyncio
import time

import msgspec

from engine_agent.cell_proxy.cell import Cell
from engine_agent.cell_proxy.upstream import CallResponse, EnginePool, call
from engine_agent.cell_proxy.usage_reader import UsageReader
from engine_agent.protocol.api_surface import Counting
from engine_agent.protocol.local_servers import long_poll_query, poll_timeout_s

GOLDEN_TOKENS = 32
"""Longest answer to a golden prompt: the expected text has to come early."""
NO_RESPONSE = "no answer in time"
_MAX_REASON_CHARS = 200


class _Reason(msgspec.Struct):
    reason: str


class _HealthReply(msgspec.Struct):
    """The body of /health of an engine with long polls (`engine_agent.protocol.local_servers`)."""

    state: str = ""
    held_ms: float = 0.0


class _Choice(msgspec.Struct):
    text: str = ""


class _Completion(msgspec.Struct):
    choices: tuple[_Choice, ...]


class Prober:
    """The probes of one engine, on separate connections."""

    def __init__(self, cell: Cell) -> None:
        settings = cell.settings
        self._cell = cell
        self._times = settings.probes
        self._wake = asyncio.Event()
        self._token_task: asyncio.Task[None] | None = None
        self._was_ok = False
        self._known_state = ""
        self._long_poll: asyncio.Timeout | None = None
        self._pool = EnginePool(
            settings.engine_host,
            settings.engine_port,
            connect_timeout_s=self._times.health_timeout_s,
            idle_s=settings.limits.engine_idle_s,
            on_lost=self._ask_now,
        )
        prompt = settings.golden[0].prompt if settings.golden else "ping"
        self._token_request = _completion_request(settings.model, prompt, max_tokens=1)
        cell.request_probe = self._ask_now
        cell.check_health = self.check_health

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while True:
                self._wake.clear()
                began = loop.time()
                await self._ask_when_changed()
                self._probe_tokens_if_due()
                left_s = self._times.health_interval_s - (loop.time() - began)
                timer = loop.call_later(max(0.0, left_s), self._wake.set)
                await self._wake.wait()
                timer.cancel()
        finally:
            if self._token_task is not None:
                self._token_task.cancel()
            self._pool.close()

    def _ask_now(self) -> None:
        """Probes without waiting for the next turn, or for the answer of a long poll."""
        self._wake.set()
        if self._long_poll is not None:
            poll, self._long_poll = self._long_poll, None
            poll.reschedule(0.0)

    async def _ask_when_changed(self) -> None:
        """As `check_health`, by a long poll if the engine is healthy and supports that."""
        known = self._known_state if self._cell.health.ok else ""
        if not known:
            await self.check_health()
            return
        try:
            async with asyncio.timeout(None) as self._long_poll:
                await self._check_health(known)
        except TimeoutError:  # the health is needed now, so the next request is no long poll
            self._known_state = ""
        finally:
            self._long_poll = None

    async def check_health(self) -> bool:
        return await self._check_health("")

    async def _check_health(self, known: str) -> bool:
        health, began = self._cell.health, time.monotonic()
        path = self._cell.settings.health_path
        target = path.encode() + long_poll_query(known).encode()
        self._known_state = ""
        try:
            response = await call(self._pool, b"GET", target, None, poll_timeout_s(known, self._times.health_timeout_s))
        except TimeoutError:
            health.timed_out(time.monotonic())
        except OSError as error:
            health.failed(time.monotonic(), f"engine unreachable: {error}")
        else:
            now = time.monotonic()
            if response.status == 200:
                reply = _health_reply(response)
                self._known_state = reply.state
                health.answered(now, None if reply.held_ms else round((now - began) * 1000, 3))
            else:
                health.failed(now, f"engine {path} answers {response.status}{_reason_of(response)}")
        self._log_change()
        return health.ok

    def _probe_tokens_if_due(self) -> None:
        if self._token_task is not None and not self._token_task.done():
            return
        now = time.monotonic()
        if self._cell.health.token_probe_due(now, self._cell.sequences):
            self._cell.health.token_probed(now)
            self._token_task = asyncio.get_running_loop().create_task(self._probe_token())
        elif self._cell.health.golden_due(now):
            self._cell.health.token_probed(now)
            self._token_task = asyncio.get_running_loop().create_task(self._probe_golden_prompts())

    async def _probe_token(self) -> None:
        health = self._cell.health
        result = await self._complete(self._token_request, self._times.token_timeout_s)
        if isinstance(result, CallResponse):
            health.token_seen(time.monotonic())
        elif result != NO_RESPONSE or self._cell.sequences < self._cell.settings.max_concurrency:
            health.token_failed(time.monotonic(), f"token probe: {result}")
        self._log_change()

    async def _probe_golden_prompts(self) -> None:
        health, settings = self._cell.health, self._cell.settings
        for golden in settings.golden:
            request = _completion_request(settings.model, golden.prompt, max_tokens=GOLDEN_TOKENS)
            result = await self._complete(request, self._times.golden_timeout_s)
            if not isinstance(result, CallResponse):
                health.token_failed(time.monotonic(), f"golden prompt {golden.prompt!r}: {result}")
                break
            text = _completion_text(result)
            if golden.expect not in text:
                actual = f"{text[:_MAX_REASON_CHARS]!r} without {golden.expect!r}"
                health.golden_wrong(time.monotonic(), f"golden prompt {golden.prompt!r} is answered {actual}")
                break
        else:
            health.golden_passed(time.monotonic())
        self._log_change()

    async def _complete(self, body: bytes, timeout_s: float) -> CallResponse | str:
        probes = self._cell.meter.probes
        probes.begun += 1
        probes.running += 1
        response = None
        try:
            response = await call(self._pool, b"POST", b"/v1/completions", body, timeout_s)
        except TimeoutError:
            return NO_RESPONSE
        except OSError as error:
            return str(error)
        finally:
            probes.running -= 1
            self._count(response)
        return response if response.status == 200 else f"the engine answers {response.status}{_reason_of(response)}"

    def _count(self, response: CallResponse | None) -> None:
        """Counts the tokens of a probe, which the engine's counters include."""
        probes, reader = self._cell.meter.probes, UsageReader(Counting.STREAM_OPTIONS, streaming=False)
        if response is not None:
            reader.add(response.body, complete=True)
        if reader.reported is not None:
            probes.prompt_tokens += reader.reported.prompt
            probes.completion_tokens += reader.reported.completion
        elif response is None or response.status == 200:
            probes.unknown += 1

    def _log_change(self) -> None:
        health = self._cell.health
        if health.ok is not self._was_ok:
            self._was_ok = health.ok
            self._cell.log.event(event="health", cell=self._cell.settings.cell, ok=health.ok, reason=health.reason)


def _health_reply(response: CallResponse) -> _HealthReply:
    """Engines without long polls send nothing, or something else."""
    try:
        return msgspec.json.decode(response.body, type=_HealthReply) if response.body else _HealthReply()
    except msgspec.DecodeError:
        return _HealthReply()


def _completion_request(model: str, prompt: str, max_tokens: int) -> bytes:
    return msgspec.json.encode({"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0})


def _completion_text(response: CallResponse) -> str:
    try:
        choices = msgspec.json.decode(response.body, type=_Completion).choices
    except msgspec.DecodeError:
        return ""
    return choices[0].text if choices else ""


def _reason_of(response: CallResponse) -> str:
    try:
        reason = msgspec.json.decode(response.body, type=_Reason).reason
    except msgspec.DecodeError:
        reason = response.body.decode("utf-8", "replace").strip()
    return f": {reason[:_MAX_REASON_CHARS]}" if reason else ""
