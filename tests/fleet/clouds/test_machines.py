"""The `machines` provider: one machine for a launch however often it is called, none assigned twice, and only wiped
ones."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from django.db import connection

from engine_agent.protocol.machine_messages import MachineReport
from engine_agent.protocol.states import AgentKind, MachinePhase
from fleet.clouds.base import Later, LaunchSpec, ProviderError
from fleet.clouds.machines import MachinesProvider
from fleet.faults.models import Repair
from fleet.faults.planning.repairs import ladder_of
from fleet.faults.planning.views import Rung
from fleet.faults.services.incidents import hardware_fault_record
from fleet.faults.services.repairs import repair_check, repair_try
from fleet.machines.models import Machine, MachineSlot
from fleet.machines.selectors import free_machines, machine_orders, nodes_that_may_reboot, pool_of
from fleet.machines.services.layouts import slot_assign
from fleet.machines.services.reports import ReceivedMachineReport, machine_reports_store
from fleet.nodes.models import Node
from fleet.nodes.services.nodes import nodes_launch
from fleet.placement.planning.packing import Spares
from fleet.placement.planning.supply import plan_supply
from fleet.reconcile.planning.decisions import CheckRepair, LaunchNodes, TryRepair
from fleet.reconcile.planning.settings import FleetSettings
from fleet.reconcile.planning.snapshot import ProviderStatus
from fleet.reconcile.planning.states import MachineRole, MachineState, NodeState
from fleet.reconcile.selectors.snapshot import fleet_view
from tests.fleet import rows
from tests.fleet.provision import provision
from tests.fleet.rows import NOW

SPEC = LaunchSpec("n-00000001", AgentKind.NODE, "pool", "", instance_type=rows.KIND)


def no_wait(seconds: float) -> None:
    """Replaces the sleep: the machine wipes in the meantime."""
    Machine.objects.filter(state=MachineState.WIPING).update(state=MachineState.POOL.value, runs="")


@pytest.mark.django_db
def test_a_launch_takes_one_machine_however_often_it_is_called() -> None:
    for number in range(3):
        rows.machine(f"m-0000000{number}", port_base=14000)
    (first,) = MachinesProvider().launch([SPEC])
    assert (first.address, first.port_base) == ("10.0.0.7", 14000)
    assert MachinesProvider().launch([SPEC]) == (first,)
    assert Machine.objects.filter(state=MachineState.TAKEN).count() == 1


@pytest.mark.django_db
def test_what_is_not_there_is_said() -> None:
    rows.deployment()
    with pytest.raises(ProviderError, match="no machine is free; `switchyard machine add` invites one"):
        MachinesProvider().launch([SPEC])


@pytest.mark.django_db
def test_machines_that_leave_or_are_away_are_not_taken() -> None:
    rows.machine("m-00000001", leaving=True)
    rows.machine("m-00000002", connected=False)
    with pytest.raises(ProviderError, match="none of the 1 free machines is connected"):
        MachinesProvider().launch([SPEC])


@pytest.mark.django_db(transaction=True)
def test_two_launches_at_once_take_two_machines() -> None:
    names = [f"n-0000000{number}" for number in range(4)]
    for number in range(4):
        rows.machine(f"m-0000000{number}")

    def launch(node: str) -> None:
        try:
            MachinesProvider().launch([LaunchSpec(node, AgentKind.NODE, "pool", "", instance_type=rows.KIND)])
        finally:
            connection.close()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(launch, names))
    assert sorted(Machine.objects.values_list("runs", flat=True)) == names


@pytest.mark.django_db
def test_a_machine_is_free_again_once_it_has_wiped() -> None:
    rows.machine("m-00000001")
    provider = MachinesProvider(no_wait)
    provider.launch([SPEC])
    before = Machine.objects.get().desired_version
    provider.terminate(SPEC.id)
    machine = Machine.objects.get()
    assert (machine.state, machine.runs) == (MachineState.POOL, "")
    assert machine.desired_version == before + 1
    provider.terminate(SPEC.id)  # a machine that is gone is not an error


@pytest.mark.django_db
def test_a_disconnected_machine_is_released_immediately_and_wipes_when_it_reconnects() -> None:
    """Its provider's calls do not wait for it."""
    rows.machine("m-00000001", state=MachineState.TAKEN.value, runs=SPEC.id, connected=False)

    def must_not_wait(seconds: float) -> None:
        pytest.fail(f"it waits {seconds} s")

    for _ in range(2):
        with pytest.raises(ProviderError, match=f"m-00000001 is not connected; it wipes {SPEC.id} when it reconnects"):
            MachinesProvider(must_not_wait).terminate(SPEC.id)
    machine = Machine.objects.get()
    assert (machine.state, machine.runs) == (MachineState.WIPING, SPEC.id)
    assert machine.reason == f"{SPEC.id} was given back; it is not connected and wipes it when it reconnects"


@pytest.mark.django_db
def test_a_machine_that_was_removed_while_away_is_forgotten() -> None:
    rows.machine("m-00000001", state=MachineState.TAKEN.value, runs=SPEC.id, leaving=True, connected=False)
    MachinesProvider(no_wait).terminate(SPEC.id)
    assert Machine.objects.get().state == MachineState.GONE


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("connected", "phase", "state", "status"),
    [
        (True, MachinePhase.RUNNING, MachineState.TAKEN, ProviderStatus.RUNNING),
        (True, MachinePhase.AGENT_DEAD, MachineState.TAKEN, ProviderStatus.AGENT_DEAD),
        (False, MachinePhase.RUNNING, MachineState.TAKEN, ProviderStatus.SILENT),
        (True, MachinePhase.WIPING, MachineState.WIPING, ProviderStatus.GONE),
    ],
)
def test_a_silent_machine_is_no_witness(
    connected: bool, phase: MachinePhase, state: MachineState, status: ProviderStatus
) -> None:
    rows.machine("m-00000001", state=state.value, runs=SPEC.id, connected=connected, phase=phase.value)
    described = MachinesProvider().describe([SPEC.id, "n-0000000f"])
    assert described == {SPEC.id: status, "n-0000000f": ProviderStatus.GONE}


@pytest.mark.django_db
def test_every_free_machine_becomes_a_spare_and_none_is_given_back() -> None:
    for number in range(3):
        rows.machine(f"m-0000000{number}")
    fleet = fleet_view(now=NOW)
    spares = Spares(fleet)
    [launch] = plan_supply(fleet, FleetSettings(), NOW, spares, {})
    assert isinstance(launch, LaunchNodes)
    assert (launch.region, launch.instance_type, launch.count) == ("pool", rows.KIND, 3)
    nodes_launch(launch, now=NOW)
    again = fleet_view(now=NOW)
    assert [node.state for node in again.nodes.values()] == [NodeState.JOINING] * 3
    assert plan_supply(again, FleetSettings(), NOW, Spares(again), {}) == []


def reported(order: str = "", trouble: str = "", *, allowed: bool = True) -> None:
    one = MachineReport(
        1, 99, MachinePhase.RUNNING, SPEC.id, may_reboot=allowed, rebooted=order, reboot_trouble=trouble
    )
    machine_reports_store([ReceivedMachineReport("m-00000001", "k", True, NOW, one)])


def reboot_due(layout: str = "") -> str:
    """A faulty node of a joined host whose repair waits for a reboot. Returns the order that the host gets."""
    rows.region("pool", provider="machines")
    node = rows.node(SPEC.id, where="pool", state=NodeState.FAULTY.value)
    runs: dict[str, Any] = {"runs": "" if layout else SPEC.id, "layout": layout}
    machine = rows.machine("m-00000001", state=MachineState.TAKEN.value, **runs)
    if layout:
        owns = {"kind": "nvidia", "devices": [0], "uuids": ["GPU-0"]}
        MachineSlot.objects.create(machine=machine, number=0, owns=owns, state=MachineState.TAKEN.value, runs=SPEC.id)
    repair_try(TryRepair(node.id, Rung.REBOOT, "nvidia_xid_fatal: XID 79"), now=NOW)
    return machine_orders({machine.id: 0})[machine.id].reboot


@pytest.mark.django_db
@pytest.mark.parametrize("layout", ["", "1x1"])
def test_a_joined_host_reboots_on_order_if_its_operator_allows_it(layout: str) -> None:
    order = reboot_due(layout)
    assert order
    reported()
    assert nodes_that_may_reboot() == {SPEC.id}
    before = Machine.objects.get().desired_version
    with pytest.raises(Later, match="m-00000001 has not rebooted yet"):
        MachinesProvider().reboot(SPEC.id)
    assert Machine.objects.get().desired_version == before + 1, "so that the order is sent"
    reported("another")
    with pytest.raises(Later):
        MachinesProvider().reboot(SPEC.id)
    reported(order)
    MachinesProvider().reboot(SPEC.id)
    repair = Repair.objects.get()
    repair_check(CheckRepair(repair.pk, SPEC.id), now=NOW)
    assert machine_orders({"m-00000001": 0})["m-00000001"].reboot == "", "it is not ordered again"


@pytest.mark.django_db
def test_a_reboot_that_is_not_allowed_or_fails_ends_its_attempt_by_name() -> None:
    order = reboot_due()
    reported(allowed=False)
    assert nodes_that_may_reboot() == frozenset()
    with pytest.raises(ProviderError, match="the operator of m-00000001 does not allow reboots"):
        MachinesProvider().reboot(SPEC.id)
    reported(order, "`shutdown -r now` failed with status 1: not permitted")
    provision()
    assert Repair.objects.get().result == (
        "its provider refused: m-00000001 was not rebooted: `shutdown -r now` failed with status 1: not permitted"
    )
    assert machine_orders({"m-00000001": 0})["m-00000001"].reboot == ""


@pytest.mark.django_db
@pytest.mark.parametrize("change", [{"state": NodeState.READY.value}, {"state": NodeState.RETIRED.value}])
def test_a_host_whose_repair_was_given_up_is_not_rebooted_when_it_returns(change: dict[str, str]) -> None:
    reboot_due()
    Node.objects.update(**change)
    assert machine_orders({"m-00000001": 0})["m-00000001"].reboot == ""
    with pytest.raises(ProviderError, match="its repair has ended"):
        MachinesProvider().reboot(SPEC.id)


@pytest.mark.django_db
def test_a_host_with_a_node_in_use_is_not_rebooted_and_gets_no_node_before_a_reboot() -> None:
    order = reboot_due("2x1")
    machine = Machine.objects.get()
    owns = {"kind": "nvidia", "devices": [1], "uuids": ["GPU-1"]}
    free = MachineSlot.objects.create(machine=machine, number=1, owns=owns, instance_type_id=rows.KIND)
    assert (pool_of("pool", MachineRole.NODE), free_machines()) == ([], {})
    assert not slot_assign(machine_id=machine.id, number=1, node="n-00000009", now=NOW)
    rows.node("n-00000009", where="pool")
    MachineSlot.objects.filter(pk=free.pk).update(runs="n-00000009", state=MachineState.TAKEN.value)
    assert machine_orders({machine.id: 0})[machine.id].reboot == ""
    reported()
    with pytest.raises(ProviderError, match="n-00000009 of m-00000001 in use"):
        MachinesProvider().reboot(SPEC.id)
    reported(order)
    MachinesProvider().reboot(SPEC.id)
    Node.objects.filter(id="n-00000009").update(state=NodeState.RETIRED.value)
    assert machine_orders({machine.id: 0})[machine.id].reboot == order
    Repair.objects.update(ended_at=NOW)
    MachineSlot.objects.filter(pk=free.pk).update(runs="", state=MachineState.POOL.value)
    assert slot_assign(machine_id=machine.id, number=1, node="n-0000000a", now=NOW)


@pytest.mark.django_db
def test_the_ladder_of_a_node_on_a_joined_host_reboots_only_where_that_is_allowed() -> None:
    reboot_due()
    Repair.objects.all().delete()
    evidence = {"xid": 79, "device": 0, "uuid": "GPU-1"}
    node = Node.objects.get()
    hardware_fault_record(
        node=node, cell="", signature="nvidia_xid_fatal", summary="XID 79", evidence=evidence, now=NOW
    )
    for allowed, step in (
        (True, ("next", "XID 79")),
        (False, ("skipped", "its host's operator does not allow reboots")),
    ):
        reported(allowed=allowed)
        fleet = fleet_view(now=NOW)
        ladder = ladder_of(fleet, fleet.nodes[SPEC.id], FleetSettings().faults, NOW)
        assert ladder is not None
        assert (ladder.steps[2].state, ladder.steps[2].reason) == step
