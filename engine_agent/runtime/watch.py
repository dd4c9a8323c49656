"""Probes the processes of a node several times a second, and remembers what they last reported.

On a leader it polls the cell proxy, which probes the engine itself; on a follower the engine. It judges nothing but
whether an answer is one, and it never touches a process.
"""

from dataclasses import dataclass, replace
from time import monotonic

import msgspec

from engine_agent.protocol.messages import Health, Load, StepTimes
from engine_agent.protocol.states import Phase
from engine_agent.proxy.status import ProxyStatus
from engine_agent.runtime.http import HttpClient, NoResponse

POLL_INTERVAL_S = 0.2
"""A hard death shows in the process itself; this bounds how late everything else is seen."""
PROBE_TIMEOUT_S = 1.0
SLOW_RESPONSES_TOLERATED = 1
"""One slow answer may be a pause of the garbage collector; the proxy judges an engine by the same rule."""


class _HealthBody(msgspec.Struct, frozen=True):
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ProbeFailure:
    """No usable answer. `at_once`: the engine itself is known to be down, not merely slow."""

    reason: str
    at_once: bool


@dataclass(frozen=True, slots=True)
class ProbeResults:
    """What a node knows of its processes from their own words, for one start of the engine."""

    health: Health | None = None
    load: Load | None = None
    was_ready: bool = False
    slow_responses: int = 0
    proxy_phase: Phase | None = None
    proxy_silent_since_s: float | None = None


async def fetch_proxy_status(http: HttpClient, url: str) -> ProxyStatus | ProbeFailure:
    """What the cell proxy at `url` (`…/status`) says."""
    try:
        answer = await http.request("GET", url, timeout_s=PROBE_TIMEOUT_S)
        return msgspec.json.decode(answer.body, type=ProxyStatus)
    except NoResponse as error:
        return ProbeFailure(str(error), at_once=error.refused)
    except msgspec.DecodeError as error:
        return ProbeFailure(f"{url} did not answer with a status: {error}", at_once=False)


async def probe_engine(http: HttpClient, url: str) -> Health | ProbeFailure:
    """What the engine at `url` (`…/health`) says."""
    asked_at_s = monotonic()
    try:
        answer = await http.request("GET", url, timeout_s=PROBE_TIMEOUT_S)
    except NoResponse as error:
        return ProbeFailure(str(error), at_once=error.refused)
    reason = "" if answer.status == 200 else _reason(answer.status, answer.body)
    probe_ms = (monotonic() - asked_at_s) * 1000
    return Health(ok=answer.status == 200, reason=reason, probe_ms=probe_ms, checked_s_ago=0.0)


async def fetch_steps(http: HttpClient, url: str) -> StepTimes | None:
    """What the engine at `url` (`…/steps`) computed; None: it does not say."""
    try:
        answer = await http.request("GET", url, timeout_s=PROBE_TIMEOUT_S)
        return msgspec.json.decode(answer.body, type=StepTimes) if answer.status == 200 else None
    except (NoResponse, msgspec.DecodeError):
        return None


def after_proxy(seen: ProbeResults, status: ProxyStatus | ProbeFailure, now_s: float) -> ProbeResults:
    """What is known once a proxy answered, or did not. A silent proxy says nothing of the engine."""
    if isinstance(status, ProbeFailure):
        since_s = seen.proxy_silent_since_s
        return replace(seen, proxy_silent_since_s=now_s if since_s is None else since_s)
    return replace(
        seen,
        health=status.health,
        load=status.load,
        was_ready=seen.was_ready or status.health.ok,
        proxy_phase=status.phase,
        proxy_silent_since_s=None,
    )


def after_engine(seen: ProbeResults, status: Health | ProbeFailure) -> ProbeResults:
    """What is known once a follower's engine answered, or did not."""
    if isinstance(status, Health):
        return replace(seen, health=status, was_ready=seen.was_ready or status.ok, slow_responses=0)
    slow_responses = seen.slow_responses + 1
    if not status.at_once and slow_responses <= SLOW_RESPONSES_TOLERATED and seen.health is not None:
        return replace(seen, slow_responses=slow_responses)
    return replace(seen, health=Health(ok=False, reason=status.reason), slow_responses=slow_responses)


def without_engine(seen: ProbeResults) -> ProbeResults:
    """What is left to know when the engine has ended or is about to start: only the proxy's own state."""
    return ProbeResults(proxy_phase=seen.proxy_phase, proxy_silent_since_s=seen.proxy_silent_since_s)


def without_proxy(seen: ProbeResults) -> ProbeResults:
    """What is left to know when the proxy has ended: its own state goes, the engine's stays."""
    return replace(seen, proxy_phase=None, proxy_silent_since_s=None)


def is_change(before: ProbeResults, after: ProbeResults) -> bool:
    """Whether the difference could change what the node does or says."""
    return _gist(before) != _gist(after)


def _gist(seen: ProbeResults) -> tuple[object, ...]:
    health = (seen.health.ok, seen.health.reason) if seen.health is not None else None
    return health, seen.was_ready, seen.proxy_phase, seen.proxy_silent_since_s is None


def _reason(status: int, body: bytes) -> str:
    try:
        return msgspec.json.decode(body, type=_HealthBody).reason or f"the engine answers {status}"
    except msgspec.DecodeError:
        return f"the engine answers {status}"
