"""Probes the engine, on time and on request, and reports the results to the health judge. It decides nothing: what a
result means is in `health`."""

import asyncio
import time

import msgspec

from engine_agent.cell_proxy.cell import Cell
from engine_agent.cell_proxy.http_call import CallResponse, call
from engine_agent.cell_proxy.upstream import EnginePool
from engine_agent.cell_proxy.usage_reader import UsageReader
from engine_agent.protocol.api_surface import Counting
from engine_agent.protocol.local_servers import long_poll_query, poll_timeout_s

GOLDEN_TOKENS = 32
"""Longest answer to a golden prompt: what is expected must come early."""
NO_RESPONSE = "no answer in time"
_MAX_REASON_CHARS = 200


class _Reason(msgspec.Struct):
    """What an unhealthy engine may say in the body of its /health."""

    reason: str


class _Held(msgspec.Struct):
    """What an engine says that can hold a question (`engine_agent.protocol.local_servers`)."""

    state: str = ""
    held_ms: float = 0.0


class _Choice(msgspec.Struct):
    text: str = ""


class _Completion(msgspec.Struct):
    """What matters of an answer of /v1/completions."""

    choices: tuple[_Choice, ...]


class Prober:
    """The probes of one engine, on connections of their own."""

    def __init__(self, cell: Cell) -> None:
        settings = cell.settings
        self._cell = cell
        self._times = settings.probes
        self._wake = asyncio.Event()
        self._token_task: asyncio.Task[None] | None = None
        self._was_ok = False
        self._known_state = ""
        self._held: asyncio.Timeout | None = None
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
        """Without waiting for the next turn, or for the answer to a question that is held."""
        self._wake.set()
        if self._held is not None:
            held, self._held = self._held, None
            held.reschedule(0.0)

    async def _ask_when_changed(self) -> None:
        """As `check_health`; an engine that is well, and can, answers when that changes."""
        known = self._known_state if self._cell.judge.ok else ""
        if not known:
            await self.check_health()
            return
        try:
            async with asyncio.timeout(None) as self._held:
                await self._check_health(known)
        except TimeoutError:  # somebody needs to know now, and the next question is not held
            self._known_state = ""
        finally:
            self._held = None

    async def check_health(self) -> bool:
        """Request /health once, now; returns whether the engine counts as healthy afterwards."""
        return await self._check_health("")

    async def _check_health(self, known: str) -> bool:
        judge, began = self._cell.judge, time.monotonic()
        path = self._cell.settings.health_path
        target = path.encode() + long_poll_query(known).encode()
        self._known_state = ""
        try:
            response = await call(self._pool, b"GET", target, None, poll_timeout_s(known, self._times.health_timeout_s))
        except TimeoutError:
            judge.timed_out(time.monotonic())
        except OSError as error:
            judge.failed(time.monotonic(), f"engine unreachable: {error}")
        else:
            now = time.monotonic()
            if response.status == 200:
                said = _held(response)
                self._known_state = said.state
                judge.answered(now, None if said.held_ms else round((now - began) * 1000, 3))
            else:
                judge.failed(now, f"engine {path} answers {response.status}{_reason_of(response)}")
        self._log_change()
        return judge.ok

    def _probe_tokens_if_due(self) -> None:
        if self._token_task is not None and not self._token_task.done():
            return
        now = time.monotonic()
        if self._cell.judge.token_probe_due(now, self._cell.sequences):
            self._cell.judge.token_probed(now)
            self._token_task = asyncio.get_running_loop().create_task(self._probe_token())
        elif self._cell.judge.golden_due(now):
            self._cell.judge.token_probed(now)
            self._token_task = asyncio.get_running_loop().create_task(self._probe_golden_prompts())

    async def _probe_token(self) -> None:
        judge = self._cell.judge
        result = await self._complete(self._token_request, self._times.token_timeout_s)
        if isinstance(result, CallResponse):
            judge.token_seen(time.monotonic())
        elif result != NO_RESPONSE or self._cell.sequences < self._cell.settings.max_concurrency:
            judge.token_failed(time.monotonic(), f"token probe: {result}")
        self._log_change()

    async def _probe_golden_prompts(self) -> None:
        """Send them in turn; the first that is not answered as it must be ends it."""
        judge, settings = self._cell.judge, self._cell.settings
        for golden in settings.golden:
            request = _completion_request(settings.model, golden.prompt, max_tokens=GOLDEN_TOKENS)
            result = await self._complete(request, self._times.golden_timeout_s)
            if not isinstance(result, CallResponse):
                judge.token_failed(time.monotonic(), f"golden prompt {golden.prompt!r}: {result}")
                break
            text = _completion_text(result)
            if golden.expect not in text:
                actual = f"{text[:_MAX_REASON_CHARS]!r} without {golden.expect!r}"
                judge.golden_wrong(time.monotonic(), f"golden prompt {golden.prompt!r} is answered {actual}")
                break
        else:
            judge.golden_passed(time.monotonic())
        self._log_change()

    async def _complete(self, body: bytes, timeout_s: float) -> CallResponse | str:
        """The engine's answer, or why there is none."""
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
        """What a probe used, of which the engine's counters know, too."""
        probes, reader = self._cell.meter.probes, UsageReader(Counting.STREAM_OPTIONS, streaming=False)
        if response is not None:
            reader.add(response.body, complete=True)
        if reader.told is not None:
            probes.prompt_tokens += reader.told.prompt
            probes.completion_tokens += reader.told.completion
        elif response is None or response.status == 200:
            probes.unknown += 1

    def _log_change(self) -> None:
        judge = self._cell.judge
        if judge.ok is not self._was_ok:
            self._was_ok = judge.ok
            self._cell.log.event(event="health", cell=self._cell.settings.cell, ok=judge.ok, reason=judge.reason)


def _held(response: CallResponse) -> _Held:
    """Engines that know nothing of it say nothing, or something else."""
    try:
        return msgspec.json.decode(response.body, type=_Held) if response.body else _Held()
    except msgspec.DecodeError:
        return _Held()


def _completion_request(model: str, prompt: str, max_tokens: int) -> bytes:
    return msgspec.json.encode({"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0})


def _completion_text(response: CallResponse) -> str:
    """The text of a completion; empty where there is none."""
    try:
        choices = msgspec.json.decode(response.body, type=_Completion).choices
    except msgspec.DecodeError:
        return ""
    return choices[0].text if choices else ""


def _reason_of(response: CallResponse) -> str:
    """The engine's own reason, where it gives one."""
    try:
        reason = msgspec.json.decode(response.body, type=_Reason).reason
    except msgspec.DecodeError:
        reason = response.body.decode("utf-8", "replace").strip()
    return f": {reason[:_MAX_REASON_CHARS]}" if reason else ""
