"""Keeps one HAProxy running and in its desired state, one pass at a time. `plan` decides the changes. Every pass
compares the running with the desired state, so failures are retried. A failure only interrupts its pass, and its reason
is reported."""

import asyncio
import logging
import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from engine_agent.ingress.command_socket import CommandRefused, Unreachable
from engine_agent.ingress.desired import DesiredHaproxy, ServerKey
from engine_agent.ingress.haproxy import ConfigRejected, HaproxyProcess, StartFailed
from engine_agent.ingress.plan import Reload, RemoveServer, Step, plan_steps
from engine_agent.ingress.running import RunningHaproxy, UnexpectedOutput, was_idle
from engine_agent.ingress.runtime_api import apply_step, read_worker
from engine_agent.ingress.settings import Times
from engine_agent.ingress.steering import Steered
from engine_agent.node.connection import ConnectionSettings, backoff_s
from engine_agent.protocol.watchdog import AwakeClock, Watchdog

log = logging.getLogger(__name__)

STABLE_AFTER_S = 5.0
"""A HAProxy that ran this long has started successfully."""
RESTART_BACKOFF = ConnectionSettings(backoff_min_s=0.25, backoff_max_s=5.0)
RETRIED_ERRORS = (Unreachable, CommandRefused, UnexpectedOutput, ConfigRejected, StartFailed, OSError)
"""Errors of a pass that the next one retries."""


@dataclass(slots=True)
class RestartBackoff:
    """When a HAProxy that exited may be restarted: immediately, then more slowly if it keeps exiting. Pure: the time is
    an argument; `draw`s are uniform in [0, 1)."""

    due_at_s: float = 0.0
    _started_at_s: float | None = None
    _failures: int = 0

    def note_start(self, now_s: float) -> None:
        self._started_at_s = now_s

    def note_exit(self, now_s: float, draw: float) -> bool:
        """Notes that it does not run. Returns whether it exited just now."""
        if self._started_at_s is None:
            return False
        stable = now_s - self._started_at_s >= STABLE_AFTER_S
        self._failures = 0 if stable else self._failures + 1
        self.due_at_s = now_s if self._failures <= 1 else now_s + backoff_s(RESTART_BACKOFF, self._failures, draw)
        self._started_at_s = None
        return True

    def may_start(self, now_s: float) -> bool:
        return now_s >= self.due_at_s


class HaproxySupervisor:
    """One HAProxy with a name for the log. `structure_of`: digest of everything that only a reload can change."""

    def __init__(
        self,
        name: str,
        process: HaproxyProcess,
        times: Times,
        structure_of: Callable[[DesiredHaproxy], str],
        read_every_s: float = 0.0,
        read_idle_every_s: float = 0.0,
    ) -> None:
        """`read_every_s`: how often its state is read once it is as desired; in between a pass only checks that it
        runs. `read_idle_every_s`: the same while it is idle."""
        self._read_every_s = read_every_s
        self._read_idle_every_s = max(read_every_s, read_idle_every_s)
        self.is_idle = False
        """As desired, and without requests between two readings."""
        self._read_at_s = -math.inf
        self.readings_total = 0
        self._in_force: DesiredHaproxy | None = None
        self.process = process
        self.running: RunningHaproxy | None = None
        self.steered: dict[ServerKey, Steered] = {}
        """Limits and weights that replace those of the desired state."""
        self.problem = ""
        self.applied_total = 0
        self.reloads_total = 0
        self.starts_total = 0
        self._name = name
        self._times = times
        self._structure_of = structure_of
        self._structure_cache: tuple[DesiredHaproxy, str] | None = None
        self._awake = AwakeClock(lambda: _now_s())  # noqa: PLW0108 - looked up at each reading, as the loop is
        self._watchdog = Watchdog(patience_s=times.silent_after_s)
        self._restarts = RestartBackoff()

    def adopt(self) -> None:
        if self.process.adopt():
            log.info("adopted %s %s", self._name, self.process.pid)
            self._watchdog.answered()
            self._restarts.note_start(_now_s())

    async def reconcile(self, desired: DesiredHaproxy | None, fallback: DesiredHaproxy) -> bool:
        """One pass. Returns whether `desired` is in force then. `desired` None: there was never a table, so a running
        HAProxy is left alone. `fallback`: for one that has to be started."""
        try:
            await self._keep_alive(desired or fallback)
            if self.process.pid is None:
                return False
            if self._is_due(desired):
                await self._converge(desired)
            self.problem = ""
            self._in_force = desired
        except RETRIED_ERRORS as error:
            self._note_problem(str(error) or type(error).__name__)
        return desired is not None and not self.problem

    async def reload(self, desired: DesiredHaproxy) -> None:
        """Starts a new worker, which reads all files; for errors see `HaproxyProcess.reload`."""
        await self.process.reload(desired)
        self.reloads_total += 1
        self._read_at_s = -math.inf

    def read_soon(self) -> None:
        """Makes the next pass read its state, even if it is idle."""
        self._read_at_s = -math.inf

    def _is_due(self, desired: DesiredHaproxy | None) -> bool:
        is_known = self.running is not None and self._in_force is desired and not self.problem
        return not is_known or _now_s() - self._read_at_s >= self._pause_s

    @property
    def _pause_s(self) -> float:
        return self._read_idle_every_s if self.is_idle else self._read_every_s

    async def _keep_alive(self, desired: DesiredHaproxy) -> None:
        """Restarts a HAProxy that exited or hangs. Only commands of earlier passes count, because a late pass has sent
        none meanwhile."""
        now_s = self._awake.now_s()
        is_alive = self.process.is_alive()
        if is_alive and self._watchdog.is_silent(now_s):
            silent_s, asked = self._watchdog.silent_s(now_s), self._watchdog.unanswered
            self._note_problem(f"no response to {asked} commands in {silent_s:.0f} s: killed")
            await self.process.kill()
            is_alive = self.process.is_alive()
        if is_alive:
            return
        self.running = None
        if self._restarts.note_exit(_now_s(), random.random()):
            log.error("%s exited; next start in %.1f s", self._name, max(0.0, self._restarts.due_at_s - _now_s()))
        if self._restarts.may_start(_now_s()):
            self._restarts.note_start(_now_s())
            await self.process.start(desired)
            self.starts_total += 1
            self._watchdog.answered()
            log.info("%s %s serves revision %s", self._name, self.process.pid, desired.revision)

    async def _converge(self, desired: DesiredHaproxy | None) -> None:
        map_names = desired.maps if desired else ()
        steered = dict(self.steered)
        before, self.running = self.running, await self._read_worker(map_names)
        self.is_idle = before is not None and was_idle(before, self.running)
        if desired is None:
            return
        # What was changed while HAProxy was read is not compared with the reading.
        known = {key: now if now is steered.get(key) else None for key, now in self.steered.items()}
        steps = plan_steps(self.running, desired, self._structure(desired), known)
        for step in steps:
            await self._apply(step, desired)
        if steps:
            self.is_idle = False
            self.running = await read_worker(self.process.admin, map_names)

    async def _read_worker(self, map_names: Iterable[str]) -> RunningHaproxy:
        read_at_s, pause_s, self._read_at_s = self._awake.now_s(), self._pause_s, _now_s()
        try:
            running = await read_worker(self.process.admin, map_names)
        except (Unreachable, OSError):
            self._watchdog.missed(read_at_s - pause_s)  # it may have been silent since the last command
            raise
        except UnexpectedOutput:
            self._watchdog.answered()  # it runs, with another version
            raise
        self._watchdog.answered()
        self.readings_total += 1
        return running

    def _structure(self, desired: DesiredHaproxy) -> str:
        """Cached per desired state: there are four passes a second."""
        if self._structure_cache is None or self._structure_cache[0] is not desired:
            self._structure_cache = (desired, self._structure_of(desired))
        return self._structure_cache[1]

    async def _apply(self, step: Step, desired: DesiredHaproxy) -> None:
        log.info("%s: %s", self._name, step)
        try:
            if isinstance(step, Reload):
                await self.reload(desired)
            else:
                await apply_step(step, self.process.admin, self._times)
                self.applied_total += 1
        except CommandRefused:
            if not isinstance(step, RemoveServer):
                raise
            log.debug("%s is still in use", step.name)  # an idle connection: the next pass retries

    def _note_problem(self, problem: str) -> None:
        named = f"{self._name}: {problem}"
        if named != self.problem:
            log.error("%s", named)
        self.problem = named


def _now_s() -> float:
    return asyncio.get_running_loop().time()
