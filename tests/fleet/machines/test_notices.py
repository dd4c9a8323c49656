"""Notices from machines' metadata: about themselves, limited in rate, ending, and for each node of a machine."""

import dataclasses
import socket
from datetime import timedelta
from typing import Any

import pytest
from msgspec.structs import replace

from engine_agent.node.imds import Metadata
from engine_agent.protocol.machine_messages import MachineNotice, MachineReport
from engine_agent.protocol.states import MachineNoticeKind, MachinePhase
from fleet.clouds.models import CloudNotice
from fleet.faults.planning.notices import plan_notices
from fleet.machines.models import Machine
from fleet.machines.selectors import free_machines, machine_views, pool_of
from fleet.machines.services.machines import machine_remove
from fleet.machines.services.reports import ReceivedMachineReport, machine_reports_store
from fleet.reconcile.planning.decisions import CordonNode
from fleet.reconcile.planning.settings import FleetSettings
from fleet.reconcile.planning.states import MachineRole, MachineState, NoticeSource
from fleet.reconcile.selectors.snapshot import fleet_view
from kernel.models import Event
from lab.cloud.ec2_describe import schedule, warn_of_interruption
from lab.cloud.imds import serve_metadata
from lab.cloud.server import World, serve
from lab.cloud.world import Clock
from models_registry.instance_types.selectors import instance_shapes
from tests.fleet import rows
from tests.fleet.machines.test_layouts import divided, launch
from tests.fleet.rows import NOW
from tests.lab.cloud.conftest import make_network

pytestmark = pytest.mark.django_db

WARNING = MachineNotice(MachineNoticeKind.INTERRUPTION, NOW.timestamp() + 100)


@pytest.fixture
def machine() -> Any:
    """m-1, a cloud's machine, is n-1."""
    rows.node("n-1")
    return rows.machine("m-1", where="us-east-1", provider="aws", runs="n-1", state=MachineState.TAKEN)


def say(*notices: MachineNotice, machine: str = "m-1", after_s: float = 0.0, known: bool = True) -> None:
    now = NOW + timedelta(seconds=after_s)
    report = MachineReport(1, 99, MachinePhase.RUNNING, notices=notices if known else None)
    machine_reports_store([ReceivedMachineReport(machine, "k", True, now, report)])


def test_a_warning_counts_at_once_for_its_own_machine(machine: Machine) -> None:
    say(WARNING)
    notice = CloudNotice.objects.get()
    assert (notice.machine_id, notice.source, notice.settled_at) == ("m-1", NoticeSource.IMDS, None)
    assert notice.ends_at == NOW + timedelta(seconds=100)
    assert Event.objects.get(kind="node.notice").node == "n-1"


def test_ingresses_and_machines_that_are_gone_say_nothing(machine: Machine) -> None:
    rows.machine("m-2", role=MachineRole.INGRESS.value)
    Machine.objects.filter(id="m-1").update(state=MachineState.GONE)
    say(WARNING)
    say(WARNING, machine="m-2")
    assert not CloudNotice.objects.exists()


def test_ends_that_make_no_sense_are_bounded(machine: Machine) -> None:
    say(replace(WARNING, ends_at=1e300))
    assert CloudNotice.objects.get().ends_at == NOW + timedelta(days=60)


def test_what_changes_all_the_time_is_kept_once_a_minute_and_in_one_row(machine: Machine) -> None:
    for number in range(50):
        say(*(() if number % 2 else (replace(WARNING, ends_at=NOW.timestamp() + number),)), after_s=number)
    assert Event.objects.filter(kind="node.notice").count() == 1
    say(after_s=70)
    assert CloudNotice.objects.get().settled_at is not None
    say(WARNING, after_s=140)
    assert CloudNotice.objects.get().settled_at is None


def test_metadata_that_cannot_be_read_withdraw_nothing(machine: Machine) -> None:
    say(WARNING)
    say(known=False, after_s=100)
    say(WARNING, after_s=102)
    assert CloudNotice.objects.get().settled_at is None
    assert Event.objects.filter(kind="node.notice").count() == 1


@pytest.mark.cloud
def test_a_warning_of_a_divided_host_reaches_each_of_its_nodes_and_keeps_new_ones_away() -> None:
    """The host is an instance of the cloud of tests, and its agent reads that instance's metadata."""
    world = World(Clock(NOW.timestamp()))
    with serve(world), socket.create_server(("127.0.0.1", 0)) as listener:
        [instance] = make_network(world).launch(InstanceMarketOptions={"MarketType": "spot"})
        world.clock.advance(world.delays.pending_s)
        metadata = Metadata(listener.getsockname()[:2])
        host = divided("4x2")
        names = [launch(1), launch(2)]
        kinds, shapes = [rows.KIND], instance_shapes()
        with serve_metadata(world, instance, listener):
            say(*metadata.notices(0.0), machine=host.id)
            assert (fleet_view(now=NOW).notices, free_machines()) == ((), {"pool": {rows.KIND: 2}})
            assert len(machine_views(kinds, shapes)) == 1
            warn_of_interruption(world, instance)
            schedule(world, instance, "system-reboot", NOW.timestamp() + 86400)
            say(*metadata.notices(1.0), machine=host.id)
    fleet = fleet_view(now=NOW)
    assert {(one.node, one.kind.value) for one in fleet.notices} == {
        (name, kind) for name in names for kind in ("interruption", "maintenance")
    }
    decided = plan_notices(dataclasses.replace(fleet, listening_since=NOW), FleetSettings(), NOW)
    assert [one.node for one in decided if isinstance(one, CordonNode)] == names
    assert sorted(Event.objects.filter(kind="node.notice").values_list("node", flat=True)) == sorted(2 * names)
    assert (pool_of("pool", MachineRole.NODE), free_machines(), machine_views(kinds, shapes)) == ([], {}, ())
    say(machine=host.id, after_s=120)
    assert (fleet_view(now=NOW).notices, free_machines()) == ((), {"pool": {rows.KIND: 2}})


def test_notices_of_a_host_are_settled_when_it_is_removed() -> None:
    host = rows.machine("m-1", connected=True)
    say(WARNING)
    Machine.objects.update(connected=False)
    machine_remove(machine_id=host.id, actor="ada", now=NOW)
    assert CloudNotice.objects.get().settled_at == NOW
