"""Passes of the reconciler on real PostgreSQL with a provider that boots nothing."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import datetime, timedelta
from threading import Barrier
from typing import get_args

import pytest
from django.db import connection, connections
from django.test.utils import CaptureQueriesContext

from engine_agent.protocol.states import EngineState
from fleet.cells.models import Cell, CellMember
from fleet.nodes.models import Node, NodeReport
from fleet.reconcile import services as reconciler
from fleet.reconcile.planning.decisions import Decision, MoveNode
from fleet.reconcile.planning.settings import FleetSettings
from fleet.reconcile.planning.snapshot import FleetView, ProviderStatus
from fleet.reconcile.planning.states import CellState, NodeState
from fleet.reconcile.selectors.cache import FleetCache
from fleet.reconcile.selectors.snapshot import LISTENING_LEASE
from fleet.reconcile.services import APPLY, LEASE, reconcile, reconcile_alone
from kernel import clock, wake_ups
from kernel.leases import lease_held_since, lease_take
from kernel.models import Event
from tests.fleet import rows
from tests.fleet.cloud import Cloud
from tests.fleet.provision import Clock, provision
from tests.fleet.rows import NOW

pytestmark = pytest.mark.django_db(transaction=True)

DEADLINE_S = 60.0


@pytest.fixture(autouse=True)
def time(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(clock, "now", made)
    lease_take(name=LISTENING_LEASE, holder="web", ttl_s=3600, now=NOW - timedelta(minutes=10))
    return made


@pytest.fixture(autouse=True)
def cloud(monkeypatch: pytest.MonkeyPatch) -> Cloud:
    made = Cloud()
    monkeypatch.setattr("fleet.machines.services.provisioning.provider_named", lambda _: made)
    return made


def spares(count: int) -> None:
    for index in range(count):
        rows.node(f"n-{index}")


def agents_obey() -> None:
    """Every agent reports its ordered engine as ready."""
    for member in CellMember.objects.select_related("cell"):
        report = {"cell": member.cell_id, "generation": member.cell.generation, "state": EngineState.READY.value}
        NodeReport.objects.filter(node=member.node).update(**report)


def cells() -> dict[str, str]:
    return dict(Cell.objects.values_list("id", "state"))


def test_a_pass_goes_on_until_there_is_nothing_left_to_decide() -> None:
    rows.deployment(cells=2)
    spares(4)
    assert reconcile() == 4, "two cells created and started"
    assert set(cells().values()) == {"starting"}
    assert reconcile() == 0
    agents_obey()
    assert reconcile() == 2
    assert set(cells().values()) == {"ready"}


def test_a_deadline_that_passes_while_no_row_changes_is_acted_on(time: Clock) -> None:
    rows.deployment(cells=1)
    spares(2)
    cache = FleetCache()
    assert reconcile(cache=cache) == 2, "a cell created and started"
    time.now += timedelta(seconds=300)
    NodeReport.objects.update(last_seen_at=time.now)
    assert reconcile(cache=cache) == 0
    time.now += timedelta(seconds=100)
    lease_take(name=LISTENING_LEASE, holder="web", ttl_s=3600, now=time.now)
    settings = replace(FleetSettings(), doubt_after_s=1e6, suspect_after_s=1e6)
    assert reconcile(settings=settings, cache=cache) > 0
    assert set(cells().values()) == {"failed"}, "it was not ready in time, and nobody has written anything"


def test_a_controller_that_starts_after_another_died_in_the_middle_looks_at_everything() -> None:
    rows.deployment(cells=2)
    spares(4)
    dies_at = [3]

    def die(execute: Callable[..., object], statement: object, *arguments: object) -> object:
        dies_at[0] -= "UPDATE fleet_cell " in str(statement).replace('"', "")
        if dies_at[0] <= 1:
            raise KeyboardInterrupt
        return execute(statement, *arguments)

    with connection.execute_wrapper(die), pytest.raises(KeyboardInterrupt):
        reconcile(cache=FleetCache())
    assert set(cells().values()) == {"pending", "starting"}
    assert reconcile(cache=FleetCache()) == 1
    assert set(cells().values()) == {"starting"}


def test_a_row_that_makes_no_sense_keeps_nobody_else_waiting() -> None:
    rows.deployment(cells=1)
    odd = rows.deployment("odd")
    odd.model_version = rows.version("odd", parallelism={})
    odd.save()
    spares(4)
    assert reconcile() == 2, "the other deployment's cell is created and started"
    assert set(Cell.objects.values_list("deployment_id", flat=True)) == {"sim-70b"}


def test_a_region_without_machines_gets_them_launched(cloud: Cloud) -> None:
    rows.deployment(cells=1)
    reconcile()
    assert not cloud.launched, "it is ordered: a pass waits for no provider"
    provision()
    assert len(cloud.launched) == 2
    assert reconcile() == 0, "they are on their way"
    assert set(Node.objects.values_list("state", flat=True)) == {"joining"}


def test_a_machine_that_is_gone_is_replaced_in_its_cell_and_ended(cloud: Cloud, time: Clock) -> None:
    spares(3)
    rows.cell("c1", Node.objects.get(id="n-0"), Node.objects.get(id="n-1"))
    NodeReport.objects.filter(node="n-1").update(connected=False)
    cloud.statuses = {"n-1": ProviderStatus.GONE}
    provision()
    reconcile()
    assert Cell.objects.values_list("state", flat=True).get() == "lost"
    time.now += timedelta(seconds=2)
    NodeReport.objects.exclude(node="n-1").update(last_seen_at=time.now)  # the other nodes have reported since
    reconcile()
    provision()
    assert list(CellMember.objects.order_by("rank").values_list("node_id", flat=True)) == ["n-0", "n-2"]
    assert Cell.objects.values_list("state", "generation").get() == ("starting", 2)
    assert Node.objects.get(id="n-1").state == NodeState.RETIRED
    assert cloud.terminated == ["n-1"]


def test_a_provider_that_does_not_answer_condemns_nobody(cloud: Cloud, caplog: pytest.LogCaptureFixture) -> None:
    rows.deployment(cells=0)
    spares(2)
    NodeReport.objects.filter(node="n-1").update(connected=False)
    cloud.silent = True
    provision()
    assert reconcile() == 0
    assert "did not answer: no answer" in caplog.text


def test_what_its_provider_refuses_stops_no_other_decision(cloud: Cloud, time: Clock) -> None:
    rows.deployment(cells=1)
    rows.node("n-lost", state=NodeState.LOST, terminated_at=None)
    cloud.broken = True
    reconcile()
    provision()
    assert set(cells().values()) == {"pending"}
    assert Node.objects.get(id="n-lost").state == NodeState.RETIRED
    assert reconcile() == 0, "its end is ordered once"
    cloud.broken = False
    time.now += timedelta(seconds=2)
    provision()
    assert "n-lost" in cloud.terminated


def test_while_another_holds_the_lease_nothing_is_done_and_soon_after_its_death_it_is(time: Clock) -> None:
    rows.deployment(cells=1)
    spares(2)
    lease_take(name=LEASE, holder="a worker that dies", ttl_s=15, now=NOW)
    assert reconcile() == 0
    time.now += timedelta(seconds=15)
    assert reconcile() > 0


def test_the_lease_is_given_back_even_by_a_pass_that_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(reconciler, "PLANNERS", (broken,))
    with pytest.raises(RuntimeError):
        reconcile()
    assert lease_held_since(name=LEASE, now=NOW) is None


def test_who_lost_the_lease_in_the_middle_leaves_the_rest_to_the_new_holder(
    time: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("n-0", "n-1"):
        rows.node(name, state=NodeState.JOINING)

    def slow_plan(view: FleetView, settings: FleetSettings, now: datetime) -> tuple[Decision, ...]:
        time.now += timedelta(seconds=20)
        lease_take(name=LEASE, holder="another", ttl_s=60, now=time.now)
        return tuple(MoveNode(name, NodeState.JOINING, NodeState.READY, "joined") for name in view.nodes)

    monkeypatch.setattr(reconciler, "PLANNERS", (slow_plan,))
    assert reconcile() == 0
    assert not Event.objects.exists()
    assert lease_held_since(name=LEASE, now=time.now) is not None, "the other's lease is not released"


def race(pass_: Callable[[], int], *, passes: int = 4) -> None:
    """Two threads, each with its own connection, begin every pass at the same time."""
    together = Barrier(2, timeout=DEADLINE_S)

    def one_of_two() -> None:
        try:
            for _ in range(passes):
                together.wait()
                pass_()
        finally:
            connections.close_all()

    with ThreadPoolExecutor(2) as threads:
        for running in [threads.submit(one_of_two) for _ in range(2)]:
            running.result(DEADLINE_S)


def decided(kind: str) -> int:
    return Event.objects.filter(kind=kind).count()


def test_two_reconcilers_do_the_work_of_one() -> None:
    rows.deployment(cells=4)
    spares(8)
    race(reconcile)
    assert set(cells().values()) == {"starting"}
    assert decided("cell.pending") == decided("cell.starting") == 4
    assert CellMember.objects.count() == 8


@pytest.mark.slow
def test_without_a_lease_two_reconcilers_still_take_every_decision_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lease saves work. Consistency comes from compare-and-set in each step's transaction."""
    monkeypatch.setattr(reconciler, "lease_take", lambda **_: 1)
    rows.deployment(cells=6)
    for index in range(6):
        rows.cell(f"c{index}", state=CellState.PENDING, generation=0)
    spares(12)
    race(reconcile)
    agents_obey()
    race(reconcile)
    assert set(Cell.objects.values_list("state", "generation")) == {("ready", 1)}
    assert decided("cell.starting") == decided("cell.ready") == 6
    assert set(CellMember.objects.values_list("cell_id", "rank")) == {
        (f"c{i}", rank) for i in range(6) for rank in (0, 1)
    }
    assert CellMember.objects.values("node_id").distinct().count() == 12


def test_every_type_of_decision_has_a_service_that_applies_it() -> None:
    assert set(APPLY) == set(get_args(Decision))


@pytest.mark.parametrize("count", [3, 30])
def test_a_fleet_that_comes_back_is_moved_in_as_many_statements_as_one_node(count: int) -> None:
    for index in range(count):
        rows.node(f"n-{index}", state=NodeState.SUSPECT)
    with CaptureQueriesContext(connection) as made:
        assert reconcile() == count
    assert set(Node.objects.values_list("state", flat=True)) == {NodeState.READY}
    assert len([query for query in made if query["sql"].startswith(("UPDATE", "INSERT"))]) <= 8


def test_a_pass_that_has_lasted_long_leaves_the_rest_and_rings(monkeypatch: pytest.MonkeyPatch) -> None:
    woken: list[str] = []
    monkeypatch.setattr(wake_ups, "send", woken.append)
    monkeypatch.setattr(reconciler, "LOADS_PER_PASS", 0)
    rows.deployment(cells=3)
    spares(6)
    assert reconcile_alone(limit_s=1e-9) == 1, "never none, however slow the host is"
    assert len(cells()) == 1
    assert woken.count("fleet.reconcile") >= 1
    woken.clear()
    assert reconcile_alone() == 5
    assert len(cells()) == 3


def test_a_pass_that_has_lasted_long_begins_no_further_round(monkeypatch: pytest.MonkeyPatch) -> None:
    rows.deployment(cells=1)
    spares(2)
    monkeypatch.setattr(reconciler, "LOADS_PER_PASS", 0)
    assert reconcile_alone(limit_s=1e-9) == 1
    assert set(cells().values()) == {"pending"}, "it was made, and the next pass starts it"
    assert reconcile_alone(limit_s=1e-9) == 1
    assert set(cells().values()) == {"starting"}


def test_a_fleet_that_takes_long_to_look_at_has_as_long_for_what_it_saw(monkeypatch: pytest.MonkeyPatch) -> None:
    rows.deployment(cells=3)
    spares(6)
    seconds = iter(range(10_000))
    monkeypatch.setattr(reconciler, "monotonic", lambda: next(seconds))
    monkeypatch.setattr(reconciler, "LOADS_PER_PASS", 1_000)
    assert reconcile_alone(limit_s=1e-9) == 6
