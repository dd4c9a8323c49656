"""The control plane's end of the agents' lines: keeps what they report and tells them what they must do.

It may be down; then nobody listens, and the rows stay as they were.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial

from engine_agent.protocol.states import EngineState
from fleet.planning.snapshot import ReportView
from simulator.machine import Machine
from simulator.site import Said, Site
from simulator.store import Store

TELL_AFTER_S = 0.05
"""A doorbell rings when orders change; the hub then looks."""
BREAKS_AFTER_S = (1.0, 5.0)
"""A line on which a message was lost is given up so much later, and the agent comes back."""
REFUSED_AFTER_S = 1.0


@dataclass
class Line:
    """An open connection. `told`: the version of the order last sent on it."""

    connection: int
    since: datetime
    told: int = 0
    telling: bool = False


class SteadyReport(ReportView):
    """A report that is repeated every two seconds without an event for each: it was last seen at the newest pass."""

    __slots__ = ("_hub",)

    def __init__(self, report: ReportView, hub: "Hub") -> None:
        for name in ReportView.__slots__:
            if name != "last_seen_at":
                object.__setattr__(self, name, getattr(report, name))
        object.__setattr__(self, "_hub", hub)

    @property
    def last_seen_at(self) -> datetime:
        hub: Hub = self._hub  # type: ignore[attr-defined]
        return hub.heard_at


class Hub:
    """All lines. `machines` are who is at their other ends; `on_news` rings for the reconciler."""

    def __init__(self, store: Store, on_news: Callable[[], None]) -> None:
        self.lines: dict[str, Line] = {}
        self.machines: dict[str, Machine] = {}
        self.is_up = True
        self.heard_at = datetime.min.replace(tzinfo=UTC)
        self._store = store
        self._on_news = on_news
        self._site: Site | None = None
        store.on_order = self.tell

    def attach(self, site: Site) -> None:
        """Begin to listen in this world."""
        self._site = site
        self.heard_at = site.queue.now
        if self._store.listening_since is None:
            self._store.listening_since = site.queue.now

    @property
    def site(self) -> Site:
        if self._site is None:
            raise RuntimeError("the hub listens to nobody yet")
        return self._site

    def goes_down(self, listening_lapses_s: float = 5.0) -> None:
        """Its process dies: all lines close, and after the lease's time nobody listens."""
        self.is_up = False
        lines, self.lines = self.lines, {}
        for node, line in lines.items():
            self._hang_up(node, line.connection)
        self.site.queue.after(listening_lapses_s, self._lease_lapses)

    def comes_up(self) -> None:
        """Another process listens. Who listened before matters not: there was a gap."""
        self.is_up = True
        self._store.listening_since = self.site.queue.now

    def _lease_lapses(self) -> None:
        if not self.is_up:
            self._store.listening_since = None

    # --- from agents -------------------------------------------------------------------------------------------------

    def joined(self, node: str, connection: int) -> None:
        """A line was opened; an older one of the same agent gives way."""
        if not self.is_up or node not in self._store.nodes:
            self.site.queue.after(REFUSED_AFTER_S, lambda: self._hang_up(node, connection))
            return
        self.lines[node] = Line(connection, self.site.queue.now)
        self.tell([node])

    def heard(self, node: str, said: Said) -> None:
        """A report came."""
        line = self.lines.get(node)
        if line is None or line.connection != said.connection:
            return
        now, known = self.site.queue.now, self._store.nodes.get(node)
        if known is None:
            return
        healthy = said.health is None or said.health.ok
        report = ReportView(
            connected=True,
            last_seen_at=now,
            connection_changed_at=line.since,
            state=said.observed.state,
            cell=said.observed.cell or "",
            generation=said.observed.generation,
            reason=said.observed.reason,
            unhealthy_since=None if healthy else (known.report.unhealthy_since or now),
            health_reason=said.health.reason if said.health is not None else "",
            in_flight=said.in_flight,
        )
        steady = self.site.steady and said.observed.state in (EngineState.IDLE, EngineState.READY) and healthy
        if self._store.report(node, SteadyReport(report, self) if steady else report):
            self._on_news()

    def knows(self, node: str, said: Said) -> bool:
        """Whether this is what was last heard, for good, and nobody wants to tell the node anything."""
        line, known = self.lines.get(node), self._store.nodes.get(node)
        if line is None or known is None or not isinstance(known.report, SteadyReport):
            return False
        report, seen = known.report, said.observed
        same = (report.state, report.cell, report.generation) == (seen.state, seen.cell or "", seen.generation)
        return same and line.told == self._store.versions[node]

    def left(self, node: str, connection: int) -> None:
        """A line ended, or counts as ended."""
        line = self.lines.get(node)
        if line is None or line.connection != connection:
            return
        del self.lines[node]
        known = self._store.nodes.get(node)
        if known is not None:
            now = self.site.queue.now
            report = known.report
            closed = ReportView(
                connected=False,
                last_seen_at=report.last_seen_at,
                connection_changed_at=now,
                state=report.state,
                cell=report.cell,
                generation=report.generation,
                reason=report.reason,
                unhealthy_since=report.unhealthy_since,
                health_reason=report.health_reason,
                in_flight=report.in_flight,
            )
            if self._store.report(node, closed):
                self._on_news()

    # --- to agents ---------------------------------------------------------------------------------------------------

    def tell(self, nodes: Iterable[str]) -> None:
        """The orders of these nodes changed: look soon."""
        for node in nodes:
            line = self.lines.get(node)
            if line is not None and not line.telling:
                line.telling = True
                self.site.queue.after(TELL_AFTER_S, partial(self._tell, node, line))

    def _tell(self, node: str, line: Line) -> None:
        line.telling = False
        if self.lines.get(node) is not line or line.told == self._store.versions[node]:
            return
        order = self._store.desired(node)
        line.told = order.version
        machine = self.machines.get(node)

        def deliver() -> None:
            if machine is not None and machine.has_line:
                machine.receive(order)

        if not self.site.network.carry(deliver):
            low, high = BREAKS_AFTER_S
            pause_s = low + (high - low) * self.site.random.random()
            self.site.queue.after(pause_s, lambda: self._give_up(node, line))

    def _give_up(self, node: str, line: Line) -> None:
        if self.lines.get(node) is line:
            self.left(node, line.connection)
            self._hang_up(node, line.connection)

    def _hang_up(self, node: str, connection: int) -> None:
        machine = self.machines.get(node)
        if machine is not None and machine.has_line:
            machine.disconnected(connection)
