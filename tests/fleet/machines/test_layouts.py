"""A machine with a layout: which node owns what, and the way of a slot from free to taken, wiping and free."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
from django.db import connection
from hypothesis import given
from hypothesis import strategies as st

from engine_agent.protocol.machine_messages import Device, MachineFacts, MachineReport, NodeRun, instance_index
from engine_agent.protocol.states import AgentKind, MachinePhase
from fleet.agents.services.enrolment import EnrolmentRefused, agent_enrol, credential_issue
from fleet.clouds.base import LaunchSpec, ProviderError
from fleet.clouds.machines import MachinesProvider
from fleet.faults.models import Incident
from fleet.faults.services.incidents import hardware_fault_record
from fleet.machines.layouts import InvalidLayout, facts_of_node, missing_devices, parse_layout, plan_layout
from fleet.machines.models import Machine, MachineSlot
from fleet.machines.selectors import free_machines, machine_orders, nodes_sharing_devices, notices_of, pool_of
from fleet.machines.services.layouts import machine_layout_set
from fleet.machines.services.machines import machine_remove
from fleet.machines.services.reports import ReceivedMachineReport, machine_reports_store
from fleet.machines.services.revocation import node_revoke
from fleet.nodes.models import Node, NodeReport
from fleet.nodes.services.nodes import node_move, node_retire
from fleet.reconcile.planning.decisions import MoveNode, RetireNode
from fleet.reconcile.planning.snapshot import ProviderStatus
from fleet.reconcile.planning.states import MachineRole, MachineState, NodeState
from kernel.models import Event
from kernel.refusals import Conflict, InvalidInput
from tests.controlplane.api.client import bearer
from tests.controlplane.dashboard.clients import signed_in
from tests.fleet import rows
from tests.fleet.rows import NOW

NAME = "NVIDIA H100 80GB HBM3"
GPUS = tuple(Device("nvidia", NAME, None, 80 * 2**30, index, f"GPU-{index}", index // 4) for index in range(8))
HOST = MachineFacts(
    "10.0.0.7", 14000, cores=16, memory_bytes=64 * 2**30, disk_free_bytes=2**40,
    devices=GPUS, cpus=(tuple(range(8)), tuple(range(8, 16))),
)  # fmt: skip
PLAIN = msgspec.structs.replace(HOST, devices=())
CHIPS = msgspec.structs.replace(
    HOST, devices=tuple(Device("neuron", "trn1.32xlarge", cores=2, index=index) for index in range(16))
)


@pytest.mark.parametrize(
    ("text", "sizes"),
    [("8x1", (1,) * 8), ("4x2", (2,) * 4), ("1x8", (8,)), ("2x2+4x1", (2, 2, 1, 1, 1, 1)), ("1x1/1", (1,))],
)
def test_a_layout_states_the_devices_of_each_node(text: str, sizes: tuple[int, ...]) -> None:
    assert parse_layout(text) == sizes
    assert [len(owns.devices) for owns in plan_layout(text, HOST)] == list(sizes)


@pytest.mark.parametrize(
    "text", ["", "8", "8*1", "0x1", "1x0", "x", "8x1+", "٨x1", "8x1 ", "-1x2", "8x1\n", "8x1/", "8x1/0"]
)
def test_another_form_is_refused_with_examples(text: str) -> None:
    with pytest.raises(InvalidLayout, match="must be NODESxDEVICES, such as 8x1, 4x2, 1x8"):
        parse_layout(text)


@pytest.mark.parametrize(
    ("text", "facts", "says"),
    [
        ("4x3/2", HOST, "has 3/2 of a device; possible are 1/2 to 1/8 and whole devices"),
        ("9x1/9", HOST, "has 1/9 of a device"),
        ("17x1/2", HOST, "needs 9 devices, and the machine has 8"),
        ("2x1/2", PLAIN, "shares of CPUs cannot be divided further"),
        ("2x1/2", CHIPS, "devices of trn1.32xlarge cannot be divided further"),
        ("999x1", HOST, "has too many nodes or devices; at most 64 of each are possible"),
        ("+".join(["1x1"] * 60), HOST, "must be NODESxDEVICES"),
        ("4x4", HOST, "needs 16 devices, and the machine has 8 of NVIDIA H100 80GB HBM3; 1x8 or 8x1 would fit"),
        ("8x1", rows.FACTS, "its agent is too old for layouts"),
        ("8x1", msgspec.structs.replace(HOST, port_base=65500), "needs 160 ports from 65500, beyond the last port"),
        ("2x1", msgspec.structs.replace(HOST, devices=(GPUS[0], CHIPS.devices[1])), "its devices are of several makes"),
        ("2x1", msgspec.structs.replace(HOST, devices=(Device("neuron", "trn", index=0),) * 2), "does not report the"),
    ],
)
def test_what_a_machine_cannot_have_is_refused_by_name(text: str, facts: MachineFacts, says: str) -> None:
    with pytest.raises(InvalidLayout, match=says):
        plan_layout(text, facts)


def test_a_node_gets_devices_and_the_cpus_next_to_them() -> None:
    first, second = plan_layout("2x4", HOST)
    assert (first.kind, first.devices, first.uuids) == ("nvidia", (0, 1, 2, 3), tuple(f"GPU-{n}" for n in range(4)))
    assert (first.cpus, second.cpus) == (tuple(range(8)), tuple(range(8, 16)))
    assert (first.memory_bytes, second.devices) == (32 * 2**30, (4, 5, 6, 7))
    assert plan_layout("4x4", CHIPS)[1].cores_per_device == 2


def test_nodes_that_share_a_device_get_parts_of_its_memory_and_of_its_hosts() -> None:
    parts = plan_layout("2x1/2+1x1/4+1x2+1x1/2", HOST)
    assert [(owns.devices, owns.share) for owns in parts] == [
        *(((0,), 0.5), ((0,), 0.5), ((1,), 0.25), ((2, 3), 1.0), ((4,), 0.5)),
    ]
    assert [owns.memory_bytes / 2**30 for owns in parts] == [4, 4, 2, 16, 4]
    half = facts_of_node(HOST, parts[0])
    assert half.devices == (msgspec.structs.replace(GPUS[0], memory_bytes=40 * 2**30),)
    assert len(plan_layout("16x1/2", HOST)) == 16


def mig(number: int, profile: str) -> Device:
    return Device("nvidia", f"{NAME} MIG {profile}", None, 10 * 2**30, instance_index(0, number), f"MIG-{number}", 0)


SLICED = msgspec.structs.replace(
    HOST, devices=(mig(0, "1g.10gb"), mig(1, "3g.40gb"), *(mig(number, "1g.10gb") for number in (2, 3, 4)), GPUS[1])
)


def test_a_layout_of_profiles_gives_each_node_an_instance_of_its_profile() -> None:
    parts = plan_layout("1x3g.40gb+3x1g.10gb", SLICED)
    assert [owns.uuids for owns in parts] == [("MIG-1",), ("MIG-0",), ("MIG-2",), ("MIG-3",)]
    assert {owns.share for owns in parts} == {1.0}
    assert len(facts_of_node(SLICED, parts[0]).devices) == 1


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("7x1g.10gb", "needs 7 MIG instances of 1g.10gb, and the machine has 4 of 1g.10gb, 1 of 3g.40gb; create them"),
        ("1x2", "joins MIG instances, which have no links to each other"),
        ("99x1g.10gb", "has too many nodes"),
        ("1x8g.10gb", "must be NODESxDEVICES"),
        ("2x1/2+4x1", "cannot be divided further"),
    ],
)
def test_mig_instances_that_a_machine_does_not_have_are_named(text: str, says: str) -> None:
    with pytest.raises(InvalidLayout, match=says):
        plan_layout(text, msgspec.structs.replace(SLICED, devices=SLICED.devices[:-1]))


def test_shares_of_few_cpus_overlap() -> None:
    shared = plan_layout("8x1", msgspec.structs.replace(PLAIN, cpus=((0, 1),)))
    assert [owns.cpus for owns in shared] == [(0,)] * 4 + [(1,)] * 4
    assert {owns.kind for owns in shared} == {"cpu"}


@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=16),
    cpus=st.integers(1, 64),
    numa=st.lists(st.none() | st.integers(0, 2), min_size=64, max_size=64),
)
def test_nothing_belongs_to_two_nodes(sizes: list[int], cpus: int, numa: Sequence[int | None]) -> None:
    devices = tuple(Device("nvidia", "H100", index=at, uuid=f"GPU-{at}", numa=numa[at]) for at in range(sum(sizes)))
    groups = (tuple(range(cpus // 2)), tuple(range(cpus // 2, cpus)))
    facts = msgspec.structs.replace(HOST, devices=devices, cpus=groups)
    parts = plan_layout("+".join(f"1x{size}" for size in sizes), facts)
    owned = [device for part in parts for device in part.devices]
    assert sorted(owned) == sorted(set(owned)) == list(range(sum(sizes)))
    assert all(part.cpus for part in parts)
    assert sum(part.memory_bytes for part in parts) <= facts.memory_bytes
    if all(len(group) >= sum(sizes) for group in groups):
        used = [cpu for part in parts for cpu in part.cpus]
        assert len(used) == len(set(used))


def test_a_device_that_is_gone_is_named_even_if_others_are_renumbered() -> None:
    owns = plan_layout("4x2", HOST)[1]
    left = tuple(msgspec.structs.replace(gpu, index=at) for at, gpu in enumerate(gpu for gpu in GPUS if gpu.index != 2))
    assert missing_devices(HOST, owns) == ()
    assert missing_devices(msgspec.structs.replace(HOST, devices=left), owns) == ("GPU-2",)


def divided(layout: str = "8x1", facts: MachineFacts = PLAIN, **columns: Any) -> Machine:
    machine = rows.machine("m-00000001", facts=msgspec.to_builtins(facts), **columns)
    machine_layout_set(machine_id=machine.id, layout=layout, actor="ada", now=NOW, instance_type=rows.KIND)
    machine.refresh_from_db()
    return machine


def launch(number: int) -> str:
    name = f"n-0000000{number}"
    rows.node(name, where="pool")
    spec = LaunchSpec(name, AgentKind.NODE, "pool", "", instance_type=rows.KIND)
    [launched] = MachinesProvider().launch([spec])
    shared = MachineSlot.objects.filter(runs=name).exists()
    assert launched.topology == (("m-00000001",) if shared else None), "its failure domain"
    return name


def report(*runs: str, phase: MachinePhase = MachinePhase.RUNNING, version: int = 99) -> None:
    nodes = tuple(NodeRun(name, phase) for name in runs)
    one = MachineReport(1, version, phase if runs else MachinePhase.IDLE, runs[0] if runs else "", nodes=nodes)
    machine_reports_store([ReceivedMachineReport("m-00000001", "k", True, NOW, one)])


@pytest.mark.django_db
def test_every_slot_of_a_machine_gets_one_node_with_its_own_ports_and_devices() -> None:
    machine = divided("4x2")
    assert free_machines() == {"pool": {rows.KIND: 4}}
    assert len(pool_of("pool", MachineRole.NODE)) == 4
    for number in range(4):
        launch(number)
        machine.refresh_from_db()
        assert machine.state == MachineState.TAKEN
    with pytest.raises(ProviderError, match="no machine is free"):
        launch(5)
    order = machine_orders({machine.id: 0})[machine.id]
    assert order.run is None
    assert [(run.id, run.port) for run in order.nodes] == [(f"n-0000000{n}", 14000 + 20 * n) for n in range(4)]
    assert bearer().get("/api/v1/nodes/n-00000002/").json()["machine"] == machine.id
    page = signed_in().get("/nodes/n-00000002/").text
    assert f"{machine.id}</a>, of which it owns cpu 4,5; 4 CPUs; 16 GiB" in page
    owned = [run.owns.devices for run in order.nodes if run.owns]
    assert owned == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert free_machines() == {}


@pytest.mark.django_db
def test_a_repeated_launch_returns_the_same_slot() -> None:
    divided("2x4")
    spec = LaunchSpec("n-00000001", AgentKind.NODE, "pool", "", instance_type=rows.KIND)
    first = MachinesProvider().launch([spec])
    assert MachinesProvider().launch([spec]) == first
    assert MachineSlot.objects.filter(state=MachineState.TAKEN).count() == 1


@pytest.mark.django_db(transaction=True)
def test_concurrent_launches_take_different_slots() -> None:
    divided("4x2")

    def take(number: int) -> None:
        try:
            spec = LaunchSpec(f"n-0000000{number}", AgentKind.NODE, "pool", "", instance_type=rows.KIND)
            MachinesProvider().launch([spec])
        finally:
            connection.close()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(take, range(4)))
    assert sorted(MachineSlot.objects.values_list("runs", flat=True)) == [f"n-0000000{n}" for n in range(4)]


@pytest.mark.django_db
def test_a_slot_is_free_again_once_its_node_is_wiped_while_the_others_run_on() -> None:
    machine = divided("2x4")
    first, second = launch(1), launch(2)
    report(first, second)
    assert MachinesProvider().describe([first, second]) == dict.fromkeys([first, second], ProviderStatus.RUNNING)

    def wipe(seconds: float) -> None:
        report(second)

    MachinesProvider(wipe).terminate(first)
    machine.refresh_from_db()
    assert machine.state == MachineState.TAKEN
    assert [slot.state for slot in machine.slots.all()] == [MachineState.POOL, MachineState.TAKEN]
    MachinesProvider(lambda seconds: report()).terminate(second)
    machine.refresh_from_db()
    assert machine.state == MachineState.POOL
    assert pool_of("pool", MachineRole.NODE) != []


@pytest.mark.django_db
def test_a_wiped_slot_is_not_freed_by_a_report_on_an_older_order() -> None:
    machine = divided("2x4")
    name = launch(1)
    machine.refresh_from_db()
    Machine.objects.update(connected=False)
    with pytest.raises(ProviderError, match=f"m-00000001 is not connected; it wipes {name} when it reconnects"):
        MachinesProvider().terminate(name)
    report(version=machine.desired_version)
    assert machine.slots.get(number=0).runs == name
    report(version=machine.desired_version + 1)
    assert machine.slots.get(number=0).runs == ""


@pytest.mark.django_db
def test_the_death_of_one_agent_is_not_that_of_its_neighbour() -> None:
    divided("2x4")
    first, second = launch(1), launch(2)
    nodes = (NodeRun(first, MachinePhase.AGENT_DEAD, "its agent exited"), NodeRun(second, MachinePhase.RUNNING))
    one = MachineReport(1, 99, MachinePhase.AGENT_DEAD, first, nodes=nodes)
    machine_reports_store([ReceivedMachineReport("m-00000001", "k", True, NOW, one)])
    assert MachinesProvider().describe([first, second]) == {
        first: ProviderStatus.AGENT_DEAD,
        second: ProviderStatus.RUNNING,
    }


@pytest.mark.django_db
def test_a_machine_enrols_only_the_nodes_that_it_has() -> None:
    machine = divided("2x4")
    name = launch(1)
    credential = credential_issue(kind="machine", subject=machine.id, region="pool", now=NOW)
    assert agent_enrol(token=credential, kind="node", subject=name, nonce="5e" * 32, now=NOW)
    for kind, subject in (("node", "n-0000000f"), ("ingress", name)):
        with pytest.raises(EnrolmentRefused, match=f"m-00000001 has no order to run {kind} {subject}"):
            agent_enrol(token=credential, kind=kind, subject=subject, nonce="5e" * 32, now=NOW)


@pytest.mark.django_db
def test_a_machine_with_spares_gets_another_layout_when_they_are_wiped() -> None:
    machine = divided("2x4")
    names = [launch(1), launch(2)]
    machine_layout_set(machine_id=machine.id, layout="8x1", actor="ada", now=NOW, instance_type=rows.KIND)
    machine.refresh_from_db()
    assert (machine.layout, machine.layout_changes, machine.next_layout) == ("2x4", True, "8x1")
    assert {node.state for node in Node.objects.filter(id__in=names)} == {NodeState.RETIRED}
    assert (pool_of("pool", MachineRole.NODE), free_machines()) == ([], {})
    MachinesProvider(lambda seconds: report(names[1])).terminate(names[0])
    assert pool_of("pool", MachineRole.NODE) == [], "no new node while the others are retired"
    MachinesProvider(lambda seconds: report()).terminate(names[1])
    machine.refresh_from_db()
    assert (machine.layout, machine.layout_changes, machine.slots.count()) == ("8x1", False, 8)
    assert free_machines() == {"pool": {rows.KIND: 8}}


@pytest.mark.django_db
def test_a_whole_machine_with_a_spare_is_divided_and_made_whole_again() -> None:
    machine = rows.machine("m-00000001", facts=msgspec.to_builtins(HOST))
    name = launch(1)
    machine_layout_set(machine_id=machine.id, layout="8x1", actor="ada", now=NOW, instance_type=rows.KIND)
    MachinesProvider(lambda seconds: report()).terminate(name)
    assert free_machines() == {"pool": {rows.KIND: 8}}
    machine_layout_set(machine_id=machine.id, layout="", actor="ada", now=NOW)
    assert free_machines() == {"pool": {rows.KIND: 1}}


@pytest.mark.django_db
def test_hardware_that_changed_meanwhile_keeps_the_former_layout() -> None:
    machine = divided("2x4", HOST)
    name = launch(1)
    machine_layout_set(machine_id=machine.id, layout="8x1", actor="ada", now=NOW)
    Machine.objects.update(facts=msgspec.to_builtins(msgspec.structs.replace(HOST, devices=GPUS[:7])))
    MachinesProvider(lambda seconds: report()).terminate(name)
    machine.refresh_from_db()
    assert (machine.layout, machine.layout_changes) == ("2x4", False)
    assert "keeps layout 2x4: m-00000001: layout 8x1 needs 8 devices" in Event.objects.latest("pk").message


@pytest.mark.django_db
def test_a_node_in_a_cell_keeps_its_machine_as_it_is() -> None:
    machine = divided("2x4")
    spare, serving = launch(1), launch(2)
    rows.cell("c", Node.objects.get(id=serving), region=rows.region("pool"))
    with pytest.raises(Conflict, match=f"m-00000001 has nodes in use: node {serving} joined a cell; drain its cell"):
        machine_layout_set(machine_id=machine.id, layout="8x1", actor="ada", now=NOW)
    assert Node.objects.get(id=spare).state == NodeState.READY
    assert not Machine.objects.get().layout_changes
    ingress = rows.machine("m-00000002", role=MachineRole.INGRESS.value, facts=msgspec.to_builtins(PLAIN))
    with pytest.raises(Conflict, match="m-00000002 is no joined host for nodes"):
        machine_layout_set(machine_id=ingress.id, layout="8x1", actor="ada", now=NOW)


@pytest.mark.django_db
def test_a_machine_that_is_removed_loses_all_of_its_nodes_first() -> None:
    machine = divided("2x4")
    names = [launch(1), launch(2)]
    machine_remove(machine_id=machine.id, actor="ada", now=NOW)
    assert {node.state for node in Node.objects.filter(id__in=names)} == {NodeState.RETIRED}
    MachinesProvider(lambda seconds: report(names[1])).terminate(names[0])
    MachinesProvider(lambda seconds: report()).terminate(names[1])
    order = machine_orders({machine.id: 0})[machine.id]
    assert (order.leave, order.nodes) == (True, ())


@pytest.mark.django_db
def test_a_host_that_is_revoked_with_one_node_is_revoked_with_all() -> None:
    divided("2x4")
    names = [launch(1), launch(2)]
    node_revoke(node_id=names[0], actor="ada", now=NOW)
    assert {node.state for node in Node.objects.filter(id__in=names)} == {NodeState.FAULTY}
    for name in names:
        MachinesProvider().terminate(name)
    assert Machine.objects.get().state == MachineState.GONE


@pytest.mark.django_db
@pytest.mark.parametrize(("connected", "subjects"), [(False, {"m-00000001"}), (True, {"n-00000001", "n-00000002"})])
def test_the_loss_of_a_machine_is_one_incident(connected: bool, subjects: set[str]) -> None:
    divided("2x4")
    names = [launch(1), launch(2)]
    Machine.objects.update(connected=connected)
    for name in names:
        seen = NodeReport.objects.filter(node_id=name).values_list("last_seen_at", flat=True).first()
        node_move(MoveNode(name, NodeState.READY, NodeState.LOST, "silent for 31 s", seen), now=NOW)
    assert {row.subject for row in Incident.objects.all()} == subjects
    assert {node.state for node in Node.objects.filter(id__in=names)} == {NodeState.LOST}


@pytest.mark.django_db
def test_a_slot_without_its_device_gets_no_node() -> None:
    machine = divided("8x1", HOST)
    Machine.objects.update(facts=msgspec.to_builtins(msgspec.structs.replace(HOST, devices=GPUS[:7])))
    assert [one.slot for one in pool_of("pool", MachineRole.NODE)] == list(range(7))
    machine.refresh_from_db()
    assert "Its node 7 lacks GPU-7, which the machine no longer has." in notices_of(machine, NOW)


@pytest.mark.django_db
def test_a_layout_over_http() -> None:
    rows.machine("m-00000001", facts=msgspec.to_builtins(HOST))
    url, body = "/api/v1/machines/m-00000001/layout/", {"layout": "4x2", "why": "small models"}
    shown = bearer("operator").post(url, body, format="json").json()
    assert (shown["layout"], shown["nodes"][1]["devices"]) == ("4x2", [2, 3])
    refused = bearer("operator").post(url, {"layout": "4x4"}, format="json")
    assert (refused.status_code, "4x4 needs 16 devices" in refused.content.decode()) == (400, True)
    with pytest.raises(InvalidInput, match="layout '8y1' must be NODESxDEVICES"):
        machine_layout_set(machine_id="m-00000001", layout="8y1", actor="ada", now=NOW)


@pytest.mark.django_db
def test_nodes_that_share_a_device_or_have_instances_of_it_are_known_by_the_names_of_their_faults() -> None:
    divided("2x1/2+2x1", HOST)
    names = [launch(number) for number in range(1, 4)]
    assert nodes_sharing_devices() == {("m-00000001", "GPU-0"): (names[0], names[1])}
    instances = {"kind": "nvidia", "devices": [instance_index(3, 0)], "uuids": ["MIG-7"]}
    MachineSlot.objects.filter(number__gt=0).update(owns=instances)
    assert nodes_sharing_devices()["m-00000001", "nvidia 3"] == (names[1], names[2])


def break_node(name: str, signature: str, evidence: dict[str, Any]) -> None:
    """The node becomes faulty, is retired, and its slot is wiped."""
    node = Node.objects.get(id=name)
    hardware_fault_record(node=node, cell="", signature=signature, summary="it broke", evidence=evidence, now=NOW)
    Node.objects.filter(id=name).update(state=NodeState.FAULTY.value)
    node_retire(RetireNode(name, NodeState.FAULTY, "it is faulty and in no cell"), now=NOW)
    MachinesProvider(lambda seconds: report()).terminate(name)


@pytest.mark.django_db
def test_a_broken_device_gets_no_other_node_until_it_is_repaired() -> None:
    machine = divided("2x4", HOST)
    first = launch(1)
    break_node(first, "nvidia_xid_fatal", {"xid": 79, "device": 2, "uuid": "GPU-2"})
    machine.refresh_from_db()
    assert machine.broken == {"GPU-2": "nvidia_xid_fatal: it broke"}
    assert (machine.state, free_machines()) == (MachineState.POOL, {"pool": {rows.KIND: 1}})
    assert [one.slot for one in pool_of("pool", MachineRole.NODE)] == [1]
    assert MachineSlot.objects.get(runs=launch(2)).number == 1
    says = "GPU-2 is out of use until `switchyard machine repaired m-00000001`: nvidia_xid_fatal: it broke."
    assert says in notices_of(machine, NOW)
    path = f"/api/v1/machines/{machine.id}/repaired"
    assert bearer().post(path, {"why": "new board"}, content_type="application/json").json()["broken"] == {}
    assert bearer().post(path).status_code == 409
    assert free_machines() == {"pool": {rows.KIND: 1}}
    assert (
        Event.objects.filter(kind="machine.repaired")
        .get()
        .message.endswith("returns GPU-2 of m-00000001 to use: new board")
    )


@pytest.mark.django_db
@pytest.mark.parametrize("layout", ["2x4", ""])
def test_a_broken_machine_gets_no_node_at_all(layout: str) -> None:
    machine = divided(layout, HOST) if layout else rows.machine("m-00000001", facts=msgspec.to_builtins(HOST))
    break_node(launch(1), "deep_check_failed", {"check": "memory"})
    machine.refresh_from_db()
    assert machine.broken == {"machine": "deep_check_failed: it broke"}
    assert (free_machines(), pool_of("pool", MachineRole.NODE)) == ({}, [])
    with pytest.raises(ProviderError, match="no machine is free"):
        launch(2)
