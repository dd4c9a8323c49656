"""Keeps one HAProxy alive and as a layout says, one pass at a time. What to change is for `plan` to decide.

Every pass compares what runs with what should run, so that whatever failed is tried again. Nothing but a pass is ever
interrupted by a failure: its reason is kept for the report.
"""

import asyncio
import logging
import random
from collections.abc import Callable

from engine_agent.ingress.apply import apply_step
from engine_agent.ingress.command_socket import CommandRefused, Unreachable
from engine_agent.ingress.haproxy import HaproxyProcess, RefusedConfig, StartFailed
from engine_agent.ingress.layout import Layout
from engine_agent.ingress.observe import observe
from engine_agent.ingress.plan import Reload, RemoveServer, Step, plan_steps
from engine_agent.ingress.restarts import Restarts
from engine_agent.ingress.running import Running, UnreadableAnswer
from engine_agent.ingress.settings import Times

log = logging.getLogger(__name__)

TROUBLE = (Unreachable, CommandRefused, UnreadableAnswer, RefusedConfig, StartFailed, OSError)


class TendedHaproxy:
    """One HAProxy with a name for the log. `structure_of` gives the digest that only a reload can change."""

    def __init__(
        self,
        name: str,
        process: HaproxyProcess,
        times: Times,
        structure_of: Callable[[Layout], str],
        draw: Callable[[], float] = random.random,
    ) -> None:
        self.process = process
        self.running: Running | None = None
        self.trouble = ""
        self.applied_total = 0
        self.reloads_total = 0
        self.starts_total = 0
        self._name = name
        self._times = times
        self._structure_of = structure_of
        self._draw = draw
        self._written: tuple[Layout, str] | None = None
        self._answered_at_s = 0.0
        self._restarts = Restarts()

    def adopt(self) -> None:
        """Take over what an earlier agent left running, if it did."""
        if self.process.adopt():
            log.info("adopted %s %s", self._name, self.process.pid)
            self._answered_at_s = _now_s()
            self._restarts.note_start(self._answered_at_s)

    async def tend(self, layout: Layout | None, fallback: Layout) -> bool:
        """One pass. Returns whether `layout` is in force after it.

        `layout` None: nothing was ever told, so what runs is left alone; `fallback` is for one that must be started.
        """
        try:
            await self._keep_alive(layout or fallback)
            if self.process.pid is None:
                return False
            await self._converge(layout)
            self.trouble = ""
        except TROUBLE as error:
            self._note(str(error) or type(error).__name__)
        return layout is not None and not self.trouble

    async def _keep_alive(self, layout: Layout) -> None:
        silent_s = _now_s() - self._answered_at_s
        if self.process.is_alive() and silent_s > self._times.silent_after_s:
            self._note(f"answered nothing for {silent_s:.0f} s: killed")
            await self.process.kill()
        if self.process.is_alive():
            return
        self.running = None
        if self._restarts.note_absence(_now_s(), self._draw()):
            log.error("%s died; next start in %.1f s", self._name, max(0.0, self._restarts.due_at_s - _now_s()))
        if self._restarts.may_start(_now_s()):
            self._restarts.note_start(_now_s())
            await self.process.start(layout)
            self.starts_total += 1
            self._answered_at_s = _now_s()
            log.info("%s %s serves revision %s", self._name, self.process.pid, layout.revision)

    async def _converge(self, layout: Layout | None) -> None:
        map_names = layout.maps if layout else ()
        self.running = await observe(self.process.admin, map_names)
        self._answered_at_s = _now_s()
        if layout is None:
            return
        steps = plan_steps(self.running, layout, self._structure(layout))
        for step in steps:
            await self._apply(step, layout)
        if steps:
            self.running = await observe(self.process.admin, map_names)

    def _structure(self, layout: Layout) -> str:
        """Written out only when the layout is another: passes are four a second."""
        if self._written is None or self._written[0] is not layout:
            self._written = (layout, self._structure_of(layout))
        return self._written[1]

    async def _apply(self, step: Step, layout: Layout) -> None:
        log.info("%s: %s", self._name, step)
        try:
            if isinstance(step, Reload):
                await self.process.reload(layout)
                self.reloads_total += 1
            else:
                await apply_step(step, self.process.admin, self._times)
                self.applied_total += 1
        except CommandRefused:
            if not isinstance(step, RemoveServer):
                raise
            log.debug("%s is still in use", step.name)  # an idle connection: the next pass tries again

    def _note(self, trouble: str) -> None:
        named = f"{self._name}: {trouble}"
        if named != self.trouble:
            log.error("%s", named)
        self.trouble = named


def _now_s() -> float:
    return asyncio.get_running_loop().time()
