"""A simulated world over real rows: machines and engines on virtual time, the fleet in PostgreSQL, and every round run
by two reconcilers at the same time without a lease. Both plan from the same moment, but one sees cells in reverse order
and learns of one fault later, so they choose different cells, machines and nodes. Only the services keep the fleet
consistent."""

from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import datetime, timedelta
from threading import Barrier
from typing import Any

import pytest
from django.db import IntegrityError, connections
from django.db.models import Count

from engine_agent.protocol.load_messages import Load
from engine_agent.protocol.messages import Health, Observed, Report
from fleet.cells.models import CellMember, Disruption
from fleet.cells.services import cell_mark_unrouted
from fleet.clouds.base import LaunchSpec, Machine
from fleet.faults.models import Replacement
from fleet.faults.planning.planner import plan_faults
from fleet.faults.planning.views import Rule
from fleet.nodes.models import Node
from fleet.nodes.services.reports import ReceivedReport, reports_store
from fleet.reconcile import services as reconcile
from fleet.reconcile.planning.decisions import Decision
from fleet.reconcile.planning.planner import MAX_ROUNDS, PLANNERS, plan_reconcile
from fleet.reconcile.planning.snapshot import FleetView, ProviderStatus
from fleet.reconcile.planning.states import CellState
from fleet.reconcile.selectors.snapshot import fleet_view
from kernel import clock
from kernel.transitions import StaleDecision
from simulator.clock import EventQueue
from simulator.invariants import INVARIANTS
from simulator.reconciler import Reconciler
from simulator.rows import Write
from simulator.store import Store
from simulator.world import World
from tests.fleet.cloud import Cloud
from tests.fleet.provision import provision
from tests.fleet.rows import NOW

DEADLINE_S = 60.0
NEWS_FOR = timedelta(seconds=3)
DISAGREE_ON = (plan_faults, plan_reconcile)
"""Reasons of rollouts must agree, or each reconciler would correct the other's forever."""


class RealRows(Store):
    """The rows last loaded from PostgreSQL. Changes go there first."""

    def mark_unrouted(self, cell_id: str, generation: int, now: datetime) -> bool:
        return cell_mark_unrouted(cell_id=cell_id, generation=generation, now=now)

    def load(self, view: FleetView, now: datetime) -> None:
        """Loads the database, and reports every changed cell."""
        before, self.cells = self.cells, dict(view.cells)
        self.nodes, self.deployments, self.rollouts = dict(view.nodes), dict(view.deployments), dict(view.rollouts)
        self.faults, self.listening_since = view.faults, view.listening_since
        self.member_of = {member.node: cell.id for cell in self.cells.values() for member in cell.members}
        for name in sorted({*before, *self.cells}):
            was, now_is = before.get(name), self.cells.get(name)
            if was is not None and now_is is None:
                now_is = replace(was, state=CellState.STOPPED, members=(), disruption=None)
            if was != now_is:
                self._commit(Write("two reconcilers", now, was, now_is))
        versions = Counter(dict(Node.objects.values_list("id", "desired_version")))
        changed = [node for node, version in versions.items() if version != self.versions[node]]
        self.versions = versions
        self.on_desired(changed)


class SimulatedCloud(Cloud):
    """Describes the simulated machines. Its effects wait until both reconcilers are done."""

    world: World

    def __init__(self) -> None:
        super().__init__()
        self.effects: list[Any] = []

    def _boot(self, spec: LaunchSpec) -> Machine:
        machine = super()._boot(spec)
        self.effects.append(lambda: self.world.provider.launch(spec.id, spec.region, machine.topology or ()))
        return machine

    def describe_all(self) -> dict[str, ProviderStatus]:
        return {}

    def restart_agent(self, node_id: str) -> None:
        self.effects.append(lambda: self.world.provider.restart_agent(node_id))

    def reboot(self, node_id: str) -> None:
        self.effects.append(lambda: self.world.provider.reboot(node_id))

    def terminate(self, node_id: str) -> None:
        self.effects.append(lambda: self.world.provider.terminate(node_id))

    def describe(self, node_ids: Sequence[str]) -> dict[str, ProviderStatus]:
        return {node: self.world.provider.describe(node) for node in node_ids}

    def work(self) -> None:
        effects, self.effects = self.effects, []
        for effect in effects:
            effect()


class TwoReconcilers(Reconciler):
    """Runs both at every step of every pass, each on its own connection. `refused`: decisions that one of them lost."""

    cloud: SimulatedCloud
    threads: ThreadPoolExecutor
    refused: list[str]

    def run_pass(self) -> None:
        now, rows = self.context.queue.now, self.store
        assert isinstance(rows, RealRows)
        reports_store([_received(node.id, node.report) for node in rows.nodes.values() if node.report.last_seen_at])
        for _ in range(MAX_ROUNDS):
            provision()
            view = fleet_view(now=now)
            rows.load(view, now)
            if not self._both_decide(view, now):
                break
        provision()
        self.cloud.work()
        self.passes += 1
        self.on_pass()

    def _both_decide(self, view: FleetView, now: datetime) -> int:
        """The first planner with an applied decision ends the round."""
        for planner in PLANNERS:
            other = mirrored(view, now) if planner in DISAGREE_ON else view
            ours, theirs = planner(view, self.settings, now), planner(other, self.settings, now)
            if (ours or theirs) and (done := self._race(ours, theirs, now)):
                return done
        return 0

    def _race(self, ours: Sequence[Decision], theirs: Sequence[Decision], now: datetime) -> int:
        together = Barrier(2, timeout=DEADLINE_S)
        racing = [self.threads.submit(self._apply_all, decisions, now, together) for decisions in (ours, theirs)]
        return sum(running.result(DEADLINE_S) for running in racing)

    def _apply_all(self, decisions: Sequence[Decision], now: datetime, together: Barrier) -> int:
        done = 0
        together.wait()
        for decision in decisions:
            try:
                reconcile.apply(decision, now)
                done += 1
            except (StaleDecision, IntegrityError) as refused:
                self.refused.append(f"{type(decision).__name__}: {refused}")
        return done


class RacedWorld(World):
    """The fleet of the database. Close it with `close`."""

    store_type = RealRows
    reconciler_type = TwoReconcilers


def mirrored(view: FleetView, now: datetime) -> FleetView:
    """The same fleet with the newest cells first and one fault hidden."""
    first = view.faults.signals[:1]
    is_news = any(now - signal.first_at < NEWS_FOR for signal in first)
    moments = sorted(cell.created_at for cell in view.cells.values())
    other = dict(zip(moments, reversed(moments), strict=True))
    cells = [replace(cell, created_at=other[cell.created_at]) for cell in list(view.cells.values())[::-1]]
    return replace(
        view,
        cells={cell.id: cell for cell in cells},
        faults=replace(view.faults, signals=view.faults.signals[1:]) if is_news else view.faults,
    )


def raced_world(monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[World, TwoReconcilers]:
    """The fleet of the database and its two racing reconcilers."""
    queue = EventQueue(NOW)
    monkeypatch.setattr(clock, "now", lambda: queue.now)
    world = RacedWorld(fleet_view(now=NOW), queue=queue, invariants=INVARIANTS, **options)
    both = world.reconciler
    assert isinstance(both, TwoReconcilers)
    both.cloud, both.threads, both.refused = SimulatedCloud(), ThreadPoolExecutor(2), []
    both.cloud.world = world
    monkeypatch.setattr("fleet.machines.services.provisioning.provider_named", lambda _: both.cloud)
    return world, both


def close(both: TwoReconcilers) -> None:
    together = Barrier(2, timeout=DEADLINE_S)

    def hang_up() -> None:
        together.wait()
        connections.close_all()

    for ending in [both.threads.submit(hang_up) for _ in range(2)]:
        ending.result(DEADLINE_S)
    both.threads.shutdown()


def broken_rows(max_unavailable: int) -> Iterator[str]:
    """Invariants that two reconcilers could break together, counted in the database."""
    open_entries = Disruption.objects.filter(closed_at__isnull=True)
    for deployment, count in Counter(open_entries.values_list("deployment_id", flat=True)).items():
        if count > max_unavailable:
            yield f"I10: {count} cells of {deployment} are down on purpose, {max_unavailable} may be"
    twice = CellMember.objects.values("node_id").annotate(cells=Count("cell_id")).filter(cells__gt=1)
    yield from (f"I4: {row['node_id']} is in {row['cells']} cells" for row in twice)
    # A lost machine is a fact, so the limit does not apply.
    decided = Replacement.objects.exclude(rule__in=[Rule.SILENCE, Rule.OPERATOR])
    work = decided.filter(closed_at__isnull=True).select_related("node")
    for cell, count in Counter(one.cell for one in work if one.cell).items():
        if count > 1:
            yield f"{count} nodes of {cell} are being replaced at once"
    for pool, count in Counter((one.node.region_id, one.node.instance_type_id) for one in work).items():
        if count > 1:
            yield f"{count} nodes of {pool} are being replaced at once"


def _received(node: str, report: Any) -> ReceivedReport:
    observed = Observed(report.state, report.cell, report.generation, reason=report.reason)
    health = Health(ok=report.unhealthy_since is None, reason=report.health_reason)
    return ReceivedReport(
        node,
        "k",
        report.connected,
        report.connection_changed_at,
        report.last_seen_at,
        Report(1, observed, health, Load(in_flight=report.in_flight)),
    )
