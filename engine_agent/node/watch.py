"""Probes the processes of a node several times a second, or is told when something changes, and remembers what they
last reported.

On a leader it polls the cell proxy, which probes the engine itself; on a follower the engine. It judges nothing but
whether an answer is one, and it never touches a process.
"""

from dataclasses import dataclass, replace
from time import monotonic

import msgspec

from engine_agent.cell_proxy.status import ProxyStatus
from engine_agent.node.http import HttpClient, NoResponse
from engine_agent.protocol.local_servers import long_poll_query, poll_timeout_s
from engine_agent.protocol.messages import Health, Load, StepTimes
from engine_agent.protocol.states import Phase

POLL_INTERVAL_S = 0.2
"""Between two questions. A hard death shows in the process itself; what is not well yet, or busy, is asked this often,
and what is well answers when that changes (`engine_agent.protocol.local_servers`)."""
PROBE_TIMEOUT_S = 1.0
SLOW_RESPONSES_TOLERATED = 1
"""One slow answer may be a pause of the garbage collector; the proxy judges an engine by the same rule."""


class _HealthBody(msgspec.Struct, frozen=True):
    reason: str = ""
    state: str = ""
    held_ms: float = 0.0


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
    proxy_pairs: str | None = None
    proxy_silent_since_s: float | None = None
    state: str = ""
    """As the process that was asked last names it."""


@dataclass(frozen=True, slots=True)
class EngineAnswer:
    """What an engine said of itself; `state` names it."""

    health: Health
    state: str = ""


async def fetch_proxy_status(http: HttpClient, url: str, known: str = "") -> ProxyStatus | ProbeFailure:
    """What the cell proxy at `url` (`…/status`) says, once it is in another state than the one that is `known`."""
    try:
        answer = await http.request(
            "GET", url + long_poll_query(known), timeout_s=poll_timeout_s(known, PROBE_TIMEOUT_S)
        )
        return msgspec.json.decode(answer.body, type=ProxyStatus)
    except NoResponse as error:
        return ProbeFailure(str(error), at_once=error.refused)
    except msgspec.DecodeError as error:
        return ProbeFailure(f"{url} did not answer with a status: {error}", at_once=False)


async def probe_engine(http: HttpClient, url: str, known: str = "") -> EngineAnswer | ProbeFailure:
    """What the engine at `url` (`…/health`) says, once it is in another state than the one that is `known`."""
    asked_at_s = monotonic()
    try:
        answer = await http.request(
            "GET", url + long_poll_query(known), timeout_s=poll_timeout_s(known, PROBE_TIMEOUT_S)
        )
    except NoResponse as error:
        return ProbeFailure(str(error), at_once=error.refused)
    said = _said(answer.body)
    reason = "" if answer.status == 200 else said.reason or f"the engine answers {answer.status}"
    probe_ms = max(0.0, (monotonic() - asked_at_s) * 1000 - said.held_ms)
    health = Health(ok=answer.status == 200, reason=reason, probe_ms=probe_ms, checked_s_ago=0.0)
    return EngineAnswer(health, said.state)


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
    """What is known once a follower's engine answered, or did not."""
    if isinstance(status, EngineAnswer):
        health = status.health
        was_ready = seen.was_ready or health.ok
        return replace(seen, health=health, was_ready=was_ready, slow_responses=0, state=status.state)
    slow_responses = seen.slow_responses + 1
    if not status.at_once and slow_responses <= SLOW_RESPONSES_TOLERATED and seen.health is not None:
        return replace(seen, slow_responses=slow_responses, state="")
    return replace(seen, health=Health(ok=False, reason=status.reason), slow_responses=slow_responses, state="")


def without_engine(seen: ProbeResults) -> ProbeResults:
    """What is left to know when the engine has ended or is about to start: only the proxy's own state."""
    return ProbeResults(
        proxy_phase=seen.proxy_phase,
        proxy_pairs=seen.proxy_pairs,
        proxy_silent_since_s=seen.proxy_silent_since_s,
    )


def without_proxy(seen: ProbeResults) -> ProbeResults:
    """What is left to know when the proxy has ended: its own state goes, the engine's stays."""
    return replace(seen, proxy_phase=None, proxy_pairs=None, proxy_silent_since_s=None, state="")


def is_change(before: ProbeResults, after: ProbeResults) -> bool:
    """Whether the difference could change what the node does or says."""
    return _gist(before) != _gist(after)


def _gist(seen: ProbeResults) -> tuple[object, ...]:
    health = (seen.health.ok, seen.health.reason) if seen.health is not None else None
    return health, seen.was_ready, seen.proxy_phase, seen.proxy_pairs, seen.proxy_silent_since_s is None


def _said(body: bytes) -> _HealthBody:
    try:
        return msgspec.json.decode(body, type=_HealthBody) if body else _HealthBody()
    except msgspec.DecodeError:
        return _HealthBody()
