"""Probes the processes of a node: several times per second, or with long polls, and stores their last answers. On a
leader it polls the cell proxy, which probes the engine; on a follower the engine. It evaluates only whether an answer
is valid, and never touches a process."""

from dataclasses import dataclass, replace
from time import monotonic

import msgspec

from engine_agent.cell_proxy.health import ProxyStatus
from engine_agent.node.http import HttpClient, NoResponse
from engine_agent.protocol.load_messages import Load
from engine_agent.protocol.local_servers import long_poll_query, poll_timeout_s
from engine_agent.protocol.messages import Health, StepTimes
from engine_agent.protocol.request_messages import ClosedWindows
from engine_agent.protocol.states import Phase

POLL_INTERVAL_S = 0.2
"""Between two polls. An exit is noticed by the process itself. Busy or unhealthy processes are polled at this interval;
healthy ones answer long polls (`engine_agent.protocol.local_servers`)."""
PROBE_TIMEOUT_S = 1.0
SLOW_RESPONSES_TOLERATED = 1
"""One slow answer may be a garbage collection; the proxy applies the same rule to an engine."""


class _HealthBody(msgspec.Struct, frozen=True):
    reason: str = ""
    state: str = ""
    held_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class ProbeFailure:
    """No usable answer. `is_down`: the engine is known to be down, not just slow."""

    reason: str
    is_down: bool


@dataclass(frozen=True, slots=True)
class ProbeResults:
    """Answers of the processes for one start of the engine."""

    health: Health | None = None
    load: Load | None = None
    was_ready: bool = False
    slow_responses: int = 0
    proxy_phase: Phase | None = None
    proxy_pairs: str | None = None
    proxy_silent_since_s: float | None = None
    state: str = ""
    """The state name in the last answer."""


@dataclass(frozen=True, slots=True)
class EngineAnswer:
    health: Health
    state: str = ""


async def fetch_proxy_status(http: HttpClient, url: str, known: str = "") -> ProxyStatus | ProbeFailure:
    """The status of the cell proxy at `url` (`…/status`), once its state differs from `known`."""
    try:
        answer = await http.request(
            "GET", url + long_poll_query(known), timeout_s=poll_timeout_s(known, PROBE_TIMEOUT_S)
        )
        return msgspec.json.decode(answer.body, type=ProxyStatus)
    except NoResponse as error:
        return ProbeFailure(str(error), is_down=error.refused)
    except msgspec.DecodeError as error:
        return ProbeFailure(f"{url} did not answer with a status: {error}", is_down=False)


async def probe_engine(http: HttpClient, url: str, known: str = "") -> EngineAnswer | ProbeFailure:
    """The health of the engine at `url` (`…/health`), once its state differs from `known`."""
    asked_at_s = monotonic()
    try:
        answer = await http.request(
            "GET", url + long_poll_query(known), timeout_s=poll_timeout_s(known, PROBE_TIMEOUT_S)
        )
    except NoResponse as error:
        return ProbeFailure(str(error), is_down=error.refused)
    body = _health_body(answer.body)
    reason = "" if answer.status == 200 else body.reason or f"the engine answers {answer.status}"
    probe_ms = max(0.0, (monotonic() - asked_at_s) * 1000 - body.held_ms)
    health = Health(ok=answer.status == 200, reason=reason, probe_ms=probe_ms, checked_s_ago=0.0)
    return EngineAnswer(health, body.state)


async def fetch_steps(http: HttpClient, url: str) -> StepTimes | None:
    """The step times of the engine at `url` (`…/steps`); None if it does not measure them."""
    try:
        answer = await http.request("GET", url, timeout_s=PROBE_TIMEOUT_S)
        return msgspec.json.decode(answer.body, type=StepTimes) if answer.status == 200 else None
    except (NoResponse, msgspec.DecodeError):
        return None


async def fetch_request_windows(http: HttpClient, url: str, after: int) -> ClosedWindows | None:
    """The closed windows of samples after number `after` of the proxy at `url` (`…/requests`); None without an
    answer."""
    try:
        answer = await http.request("GET", f"{url}?after={after}", timeout_s=PROBE_TIMEOUT_S)
        return msgspec.json.decode(answer.body, type=ClosedWindows) if answer.status == 200 else None
    except (NoResponse, msgspec.DecodeError):
        return None


def after_proxy(seen: ProbeResults, status: ProxyStatus | ProbeFailure, now_s: float) -> ProbeResults:
    """Results after a poll of a proxy. A silent proxy changes nothing about the engine."""
    if isinstance(status, ProbeFailure):
        since_s = seen.proxy_silent_since_s
        return replace(seen, proxy_silent_since_s=now_s if since_s is None else since_s, state="")
    return replace(
        seen,
        health=status.health,
        load=status.load,
        was_ready=seen.was_ready or status.health.ok,
        proxy_phase=status.phase,
        proxy_pairs=status.pairs,
        proxy_silent_since_s=None,
        state=status.state,
    )


def after_engine(seen: ProbeResults, status: EngineAnswer | ProbeFailure) -> ProbeResults:
    if isinstance(status, EngineAnswer):
        health = status.health
        was_ready = seen.was_ready or health.ok
        return replace(seen, health=health, was_ready=was_ready, slow_responses=0, state=status.state)
    slow_responses = seen.slow_responses + 1
    if not status.is_down and slow_responses <= SLOW_RESPONSES_TOLERATED and seen.health is not None:
        return replace(seen, slow_responses=slow_responses, state="")
    return replace(seen, health=Health(ok=False, reason=status.reason), slow_responses=slow_responses, state="")


def without_engine(seen: ProbeResults) -> ProbeResults:
    """Results when the engine has exited or is about to start: only the proxy's own state."""
    return ProbeResults(
        proxy_phase=seen.proxy_phase,
        proxy_pairs=seen.proxy_pairs,
        proxy_silent_since_s=seen.proxy_silent_since_s,
    )


def without_proxy(seen: ProbeResults) -> ProbeResults:
    """Results when the proxy has exited: only the engine's state."""
    return replace(seen, proxy_phase=None, proxy_pairs=None, proxy_silent_since_s=None, state="")


def is_change(before: ProbeResults, after: ProbeResults) -> bool:
    """Whether the difference could change the node's steps or report."""
    return _relevant(before) != _relevant(after)


def _relevant(seen: ProbeResults) -> tuple[object, ...]:
    health = (seen.health.ok, seen.health.reason) if seen.health is not None else None
    return health, seen.was_ready, seen.proxy_phase, seen.proxy_pairs, seen.proxy_silent_since_s is None


def _health_body(body: bytes) -> _HealthBody:
    try:
        return msgspec.json.decode(body, type=_HealthBody) if body else _HealthBody()
    except msgspec.DecodeError:
        return _HealthBody()
