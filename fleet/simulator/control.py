"""The reconciler on virtual time: the live planners, in the live order, over the reference store.

Its process can be killed before any write, and can stall between planning and writing while another works.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial

from fleet.planning.decisions import Decision
from fleet.planning.liveness import nodes_in_doubt
from fleet.planning.planners import MAX_ROUNDS, PLANNERS
from fleet.planning.settings import FleetSettings
from fleet.planning.snapshot import FleetView
from fleet.simulator.provider import Provider
from fleet.simulator.site import Site
from fleet.simulator.store import Stale, Store

LEASE_TTL_S = 15.0
"""As in `fleet.services.reconcile`."""


class Killed(Exception):
    """The process that writes ends here."""


@dataclass(frozen=True, slots=True)
class Mishaps:
    """What happens to reconcilers: shares of writes and of passes. `restart_s`: until a new process is there."""

    killed: float = 0.0
    stalled: float = 0.0
    restart_s: float = 2.0
    stall_s: float = 20.0


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds between passes: `every_s` while anything is on its way, `quiet_s` otherwise, `doorbell_s` after news.
    Live the first two are 1 s; a pass in quiet decides nothing that one a minute later would not."""

    every_s: float = 1.0
    quiet_s: float = 1.0
    doorbell_s: float = 0.05


class ControlPlane:
    """One reconciler at a time holds the lease, or two believe they do."""

    def __init__(self, site: Site, store: Store, provider: Provider, settings: FleetSettings) -> None:
        self.settings = settings
        self.mishaps = Mishaps()
        self.pace = Pace()
        self.kill_at: int | None = None
        """The number of the write before which the process is killed, once."""
        self.passes = self.planned = self.kills = self.stale = 0
        self.down_until_s = 0.0
        self.last_kill_s: float | None = None
        self.on_pass: Callable[[], None] = lambda: None
        self.prepare: Callable[[FleetView], FleetView] = lambda view: view
        self.is_quiet: Callable[[], bool] = lambda: False
        self._site = site
        self._store = store
        self._provider = provider
        self._lease_until_s = 0.0
        self._due_s: float | None = None
        store.before_write = self._maybe_killed

    def start(self) -> None:
        """Begin to pass, again and again."""
        self._schedule(self.pace.every_s)

    def ring(self) -> None:
        """Something changed: do not wait for the next pass."""
        self._schedule(self.pace.doorbell_s)

    def _schedule(self, delay_s: float) -> None:
        due_s = self._site.queue.now_s + delay_s
        if self._due_s is None or due_s < self._due_s:
            self._due_s = due_s
            self._site.queue.at(due_s, lambda: self._due(due_s))

    def _due(self, due_s: float) -> None:
        if due_s == self._due_s:
            self._due_s = None
            self._pass()
            self._schedule(self.pace.quiet_s if self.is_quiet() else self.pace.every_s)

    def _pass(self) -> None:
        now_s = self._site.queue.now_s
        if now_s < self.down_until_s or now_s < self._lease_until_s:
            return
        self._lease_until_s = now_s + LEASE_TTL_S
        try:
            for _ in range(MAX_ROUNDS):
                if not self._round():
                    break
        except Killed:
            self.kills += 1
            self.last_kill_s = now_s
            self.down_until_s = now_s + self.mishaps.restart_s
            self._site.note("killed", "reconciler", "killed between two writes; the lease runs on")
            self._schedule(max(0.0, self._lease_until_s - now_s))
            return
        if self._lease_until_s:
            self._lease_until_s = now_s
        self.passes += 1
        self.on_pass()
        self.last_kill_s = None

    def _round(self) -> int:
        """The first planner whose decisions change something ends the round."""
        now = self._site.queue.now
        view = self._view(now)
        for planner in PLANNERS:
            decisions = planner(view, self.settings, now)
            self.planned += len(decisions)
            if decisions and self._stalls():
                self._site.note("stalled", "reconciler", f"stalls with {len(decisions)} decisions; another takes over")
                self._site.queue.after(self.mishaps.stall_s, partial(self._write_late, decisions))
                return 0
            done = sum(self._apply(decision, now) for decision in decisions)
            if done:
                return done
        return 0

    def _view(self, now: datetime) -> FleetView:
        view = self.prepare(self._store.fleet())
        doubt = nodes_in_doubt(view, self.settings, now)
        if not doubt:
            return view
        nodes = dict(view.nodes)
        for node in doubt:
            nodes[node] = replace(nodes[node], provider=self._provider.describe(node))
        return replace(view, nodes=nodes)

    def _apply(self, decision: Decision, now: datetime) -> bool:
        try:
            self._store.apply(decision, now)
        except Stale:
            self.stale += 1
            return False
        return True

    def _write_late(self, decisions: tuple[Decision, ...]) -> None:
        for decision in decisions:
            self._apply_quietly(decision)

    def _apply_quietly(self, decision: Decision) -> None:
        try:
            self._apply(decision, self._site.queue.now)
        except Killed:
            self.kills += 1

    def _stalls(self) -> bool:
        return self.mishaps.stalled > 0 and self._site.random.random() < self.mishaps.stalled

    def _maybe_killed(self) -> None:
        if self.kill_at is not None and self._store.writes >= self.kill_at:
            self.kill_at = None
            raise Killed
        if self.mishaps.killed and self._site.random.random() < self.mishaps.killed:
            raise Killed
