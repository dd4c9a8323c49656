"""The reconciler on virtual time: the live planners, in the live order, over the reference store. Its process can be
killed before any write, and can stall between planning and writing while another one works."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial

from fleet.faults.planning.liveness import nodes_in_doubt
from fleet.reconcile.planning.decisions import Decision
from fleet.reconcile.planning.planner import LEASE_TTL_S, MAX_ROUNDS, PLANNERS
from fleet.reconcile.planning.settings import FleetSettings
from fleet.reconcile.planning.snapshot import FleetView
from simulator.context import SimulationContext
from simulator.rows import ProcessKilled, Provider, StaleWrite
from simulator.store import Store

RECONCILER, TRAFFIC = "reconciler", "traffic"


@dataclass(frozen=True, slots=True)
class ProcessFaults:
    """Faults of processes: shares of writes and of passes. `restart_s`: until a new process runs. `whole`: a kill also
    hits the other processes of the control plane, as the loss of a machine would."""

    killed: float = 0.0
    stalled: float = 0.0
    restart_s: float = 2.0
    stall_s: float = 20.0
    whole: bool = False


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds between passes: `every_s` during activity, `quiet_s` otherwise, `wake_up_s` after news. In production the
    first two are 1 s; a quiet pass decides nothing that one a minute later would not."""

    every_s: float = 1.0
    quiet_s: float = 1.0
    wake_up_s: float = 0.05


class Reconciler:
    """One reconciler at a time holds the lease, unless one of two has stalled."""

    def __init__(self, context: SimulationContext, store: Store, provider: Provider, settings: FleetSettings) -> None:
        self.settings = settings
        self.process_faults = ProcessFaults()
        self.pace = Pace()
        self.kill_before_write: int | None = None
        """The number of the write before which the process is killed, once."""
        self.passes = self.planned = self.kills = self.stale = 0
        self.down_until_s = 0.0
        self.last_kill_s: float | None = None
        self.on_pass: Callable[[], None] = lambda: None
        self.on_kill: Callable[[str], None] = lambda _: None
        self.prepare: Callable[[FleetView], FleetView] = lambda view: view
        self.is_quiet: Callable[[], bool] = lambda: False
        self.context = context
        self.store = store
        self._provider = provider
        self._lease_until_s = 0.0
        self._due_s: float | None = None
        store.before_write = self._maybe_killed

    def start(self) -> None:
        self._schedule(self.pace.every_s)

    def wake(self) -> None:
        self._schedule(self.pace.wake_up_s)

    def killed(self, whose: str) -> None:
        """This process was killed before a write; its lease remains."""
        now_s = self.context.queue.now_s
        self.kills += 1
        self.last_kill_s = now_s
        self.context.note("killed", whose, "killed between two writes")
        if whose == RECONCILER or self.process_faults.whole:
            self.down_until_s = now_s + self.process_faults.restart_s
            self._schedule(max(self._lease_until_s, self.down_until_s) - now_s)
        self.on_kill(whose)

    def _schedule(self, delay_s: float) -> None:
        due_s = self.context.queue.now_s + delay_s
        if self._due_s is None or due_s < self._due_s:
            self._due_s = due_s
            self.context.queue.at(due_s, lambda: self._run_if_due(due_s))

    def _run_if_due(self, due_s: float) -> None:
        if due_s == self._due_s:
            self._due_s = None
            self.run_pass()
            self._schedule(self.pace.quiet_s if self.is_quiet() else self.pace.every_s)

    def run_pass(self) -> None:
        """Runs rounds until nothing is left to decide, unless another process holds the lease."""
        now_s = self.context.queue.now_s
        if now_s < self.down_until_s or now_s < self._lease_until_s:
            return
        self._lease_until_s = now_s + LEASE_TTL_S
        try:
            for _ in range(MAX_ROUNDS):
                if not self._round():
                    break
        except ProcessKilled:
            self.killed(RECONCILER)
            return
        self._lease_until_s = now_s
        self.passes += 1
        self.on_pass()
        self.last_kill_s = None

    def _round(self) -> int:
        """The first planner whose decisions change something ends the round."""
        now = self.context.queue.now
        view = self._view(now)
        for planner in PLANNERS:
            decisions = planner(view, self.settings, now)
            self.planned += len(decisions)
            if decisions and self._stalls():
                self.context.note(
                    "stalled", "reconciler", f"stalls with {len(decisions)} decisions; another takes over"
                )
                self.context.queue.after(self.process_faults.stall_s, partial(self._write_late, decisions))
                return 0
            done = sum(self._apply(decision, now) for decision in decisions)
            if done:
                return done
        return 0

    def _view(self, now: datetime) -> FleetView:
        view = self.prepare(self.store.fleet())
        doubt = nodes_in_doubt(view, self.settings, now)
        if not doubt:
            return view
        nodes = dict(view.nodes)
        for node in doubt:
            nodes[node] = replace(nodes[node], provider=self._provider.describe(node))
        return replace(view, nodes=nodes)

    def _apply(self, decision: Decision, now: datetime) -> bool:
        try:
            self.store.apply(decision, now)
        except StaleWrite:
            self.stale += 1
            return False
        return True

    def _write_late(self, decisions: tuple[Decision, ...]) -> None:
        try:
            for decision in decisions:
                self._apply(decision, self.context.queue.now)
        except ProcessKilled:
            self.kills += 1

    def _stalls(self) -> bool:
        return self.process_faults.stalled > 0 and self.context.random.random() < self.process_faults.stalled

    def _maybe_killed(self) -> None:
        if self.kill_before_write is not None and self.store.writes >= self.kill_before_write:
            self.kill_before_write = None
            raise ProcessKilled
        if self.process_faults.killed and self.context.random.random() < self.process_faults.killed:
            raise ProcessKilled
