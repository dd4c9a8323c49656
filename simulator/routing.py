"""Routing on virtual time: tables, the ingresses that follow them, and which draining cells get no new requests. The
decision which cells are unrouted is the live one; a table is only the set of cells to send to."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from fleet.reconcile.planning.states import CellState
from simulator.context import SimulationContext
from simulator.rows import ProcessKilled
from simulator.store import Store
from traffic.routing.planning.ingresses import FollowingIngress, TableInForce, plan_unrouted

PUBLISH_AFTER_S = 0.05
POLL_EVERY_S = 1.0
APPLY_S = 0.1
REPORT_EVERY_S = 2.0


@dataclass
class Ingress:
    """The ingress of one region. `revision` and `routed` are what it runs; `acknowledged` and `seen_at` what is known
    of it."""

    region: str
    revision: int = 0
    routed: frozenset[str] = frozenset()
    acknowledged: int = 0
    seen_at: datetime | None = None
    is_up: bool = True
    sent_at_s: float = 0.0
    sent_revision: int = 0


class Routing:
    """Publishes tables and waits for acknowledgements."""

    def __init__(self, context: SimulationContext, store: Store, on_unrouted: Callable[[], None]) -> None:
        self.tables: dict[str, TableInForce] = {region: TableInForce(0, frozenset()) for region in store.regions}
        self.ingresses = {region: Ingress(region) for region in store.regions}
        self.on_change: Callable[[], None] = lambda: None
        self.on_kill: Callable[[], None] = lambda: None
        self.is_reachable: Callable[[], bool] = lambda: True
        self._context = context
        self._store = store
        self._on_unrouted = on_unrouted
        self._is_due = False
        self._down_until_s = 0.0

    def start(self) -> None:
        """Publishes the first tables, which the ingresses run from the start."""
        self._publish()
        for region, ingress in self.ingresses.items():
            ingress.revision = ingress.acknowledged = self.tables[region].revision
            ingress.routed = self.tables[region].routed
            ingress.seen_at = self._context.queue.now

    def wake(self) -> None:
        if not self._is_due:
            self._is_due = True
            self._context.queue.after(PUBLISH_AFTER_S, self._poll)

    def routes_to(self, cell: str) -> bool:
        return any(ingress.is_up and cell in ingress.routed for ingress in self.ingresses.values())

    def crash(self, for_s: float) -> None:
        """Its process is gone for so long; the next one starts with a poll."""
        self._down_until_s = self._context.queue.now_s + for_s
        self._is_due = True
        self._context.queue.after(for_s, self._poll)

    def _poll(self) -> None:
        if self._context.queue.now_s < self._down_until_s:
            return
        self._is_due = False
        self._publish()
        for ingress in self.ingresses.values():
            if ingress.is_up and self.is_reachable():
                ingress.seen_at = self._context.queue.now
                self._send(ingress)
        try:
            self._mark_drained()
        except ProcessKilled:
            self.on_kill()

    def _mark_drained(self) -> None:
        draining = [cell for cell in self._store.cells.values() if cell.state is CellState.DRAINING]
        waiting = {cell.id: cell.generation for cell in draining if cell.unrouted_at is None}
        following = [
            FollowingIngress(ingress.region, ingress.acknowledged, ingress.seen_at)
            for ingress in self.ingresses.values()
        ]
        now = self._context.queue.now
        for cell in plan_unrouted(
            waiting, self.tables, following, listening_since=self._store.listening_since, now=now
        ):
            self._store.mark_unrouted(cell, waiting[cell], now)
            self._on_unrouted()
        behind = any(ingress.acknowledged < self.tables[ingress.region].revision for ingress in self.ingresses.values())
        if (waiting or behind) and not self._is_due:
            self._is_due = True
            self._context.queue.after(POLL_EVERY_S, self._poll)

    def _publish(self) -> None:
        routed: dict[str, set[str]] = {region: set() for region in self.tables}
        for cell in self._store.cells.values():
            if cell.state is CellState.READY:
                routed[cell.region].add(cell.id)
        for region, table in self.tables.items():
            if routed[region] != table.routed:
                self.tables[region] = TableInForce(table.revision + 1, frozenset(routed[region]))

    def _send(self, ingress: Ingress) -> None:
        table = self.tables[ingress.region]
        now_s = self._context.queue.now_s
        is_sent = ingress.sent_revision == table.revision and now_s - ingress.sent_at_s < REPORT_EVERY_S
        if ingress.acknowledged >= table.revision or is_sent:
            return
        ingress.sent_at_s, ingress.sent_revision = now_s, table.revision
        self._context.network.carry(lambda: self._context.queue.after(APPLY_S, lambda: self._apply(ingress, table)))

    def _apply(self, ingress: Ingress, table: TableInForce) -> None:
        if not ingress.is_up:
            return
        if table.revision > ingress.revision:
            ingress.revision, ingress.routed = table.revision, table.routed
            self.on_change()
        revision = ingress.revision
        self._context.network.carry(lambda: self._acknowledged(ingress, revision))

    def _acknowledged(self, ingress: Ingress, revision: int) -> None:
        if not self.is_reachable():
            return
        ingress.seen_at = self._context.queue.now
        if revision > ingress.acknowledged:
            ingress.acknowledged = revision
            self.wake()
