"""The planner divides a machine of spares for cells that wait: what the step writes, what makes it stale, and a whole
pass from the waiting cell to nodes of its size. And the layout of an invitation."""

import json
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from engine_agent.node.devices import resources_from
from engine_agent.protocol.machine_messages import MachineFacts, MachineReport, NodeResources, NodeRun, machine_id_of
from engine_agent.protocol.messages import Hello
from engine_agent.protocol.states import AgentKind, MachinePhase
from fleet.cells.models import Cell, Disruption
from fleet.cells.services import cell_drain_charged
from fleet.clouds.base import LaunchSpec, ProviderError
from fleet.clouds.local import LocalProvider
from fleet.clouds.machines import MachinesProvider
from fleet.deployments.models import Deployment, DeploymentRegion
from fleet.faults.models import Incident
from fleet.machines.models import Machine
from fleet.machines.selectors import free_machines, notices_of, pool_of
from fleet.machines.services.layouts import layout_change, machine_layout_set
from fleet.machines.services.machines import (
    invitation_create,
    machine_enrol,
    machine_launched,
    machine_move,
    machine_remove,
)
from fleet.machines.services.reports import ReceivedMachineReport, machine_hellos_store, machine_reports_store
from fleet.nodes.models import Node, NodeReport
from fleet.reconcile.planning.decisions import ChangeLayout, DrainCell
from fleet.reconcile.planning.states import DisruptionCause, MachineRole, MachineState, NodeState
from fleet.reconcile.selectors.snapshot import LISTENING_LEASE, fleet_view
from fleet.reconcile.services import reconcile
from kernel import clock
from kernel.leases import lease_take
from kernel.models import Event
from kernel.refusals import InvalidInput
from kernel.transitions import StaleDecision
from models_registry.instance_types.models import InstanceType
from tests.controlplane.api.client import bearer
from tests.fleet import rows
from tests.fleet.machines.test_layouts import PLAIN
from tests.fleet.provision import Clock
from tests.fleet.rows import NOW

pytestmark = [pytest.mark.slow, pytest.mark.django_db]
BEFORE = NOW - timedelta(hours=1)
NAMES = tuple(f"n-0000000{number}" for number in range(8))


@pytest.fixture(autouse=True)
def time(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(clock, "now", made)
    lease_take(name=LISTENING_LEASE, holder="web", ttl_s=7200, now=NOW - timedelta(minutes=10))
    return made


@pytest.fixture(autouse=True)
def types() -> None:
    rows.region("pool", provider="machines")
    for shares in (1, 2, 8):
        InstanceType.objects.create(name=f"cpu.{shares}", accelerator="cpu", memory_gib=8 * shares, cores=1)


@pytest.fixture
def machine() -> Machine:
    """A host of 64 GiB in eight shares, with a spare node on each."""
    made = rows.machine("m-00000001", facts=msgspec.to_builtins(PLAIN), created_at=BEFORE)
    machine_layout_set(machine_id=made.id, layout="8x1", actor="ada", now=BEFORE, instance_type="cpu.1")
    for name in NAMES:
        rows.node(name, where="pool", instance_type_id="cpu.1", spare_since=BEFORE)
        MachinesProvider().launch([LaunchSpec(name, AgentKind.NODE, "pool", "", instance_type="cpu.1")])
        Node.objects.filter(id=name).update(topology=[made.id])
    return made


def wiped(*names: str) -> None:
    """The machine's agent has only these nodes left."""
    nodes = tuple(NodeRun(name, MachinePhase.RUNNING) for name in names)
    phase = MachinePhase.RUNNING if names else MachinePhase.IDLE
    one = MachineReport(1, 99, phase, names[0] if names else "", nodes=nodes)
    machine_reports_store([ReceivedMachineReport("m-00000001", "k", True, clock.now(), one)])


def give_back() -> None:
    """The provider carries out every termination."""
    for name in Node.objects.filter(state=NodeState.RETIRED).values_list("id", flat=True):
        MachinesProvider(lambda seconds: wiped()).terminate(name)


DECIDED = ChangeLayout("m-00000001", "8x1", NAMES, "4x2", ("cpu.2",) * 4, "cells wait")


def want(cells: int, kind: str, where: str = "pool") -> None:
    version = rows.version(kind, nodes=1, parallelism={kind: {"nodes": 1}})
    made, _ = Deployment.objects.get_or_create(
        name=f"on-{kind.replace('.', '-')}",
        defaults={"model_version": version, "instance_types": [kind], "created_at": NOW},
    )
    DeploymentRegion.objects.update_or_create(deployment=made, region=rows.region(where), defaults={"cells": cells})


def passes(time: Clock, seconds: float) -> None:
    time.now += timedelta(seconds=seconds)
    NodeReport.objects.update(last_seen_at=time.now)
    reconcile()


@pytest.mark.usefixtures("machine")
def test_cells_that_wait_get_the_machine_in_nodes_of_their_size(time: Clock) -> None:
    want(4, "cpu.2")
    passes(time, 1)
    passes(time, 10)
    assert Cell.objects.filter(state="pending").count() == 4
    assert not Machine.objects.get().layout_changes, "they have not waited long enough"
    passes(time, 10)
    machine = Machine.objects.get()
    assert (machine.layout, machine.layout_changes, machine.next_layout) == ("8x1", True, "4x2")
    assert {node.state for node in Node.objects.all()} == {NodeState.RETIRED}
    assert "It becomes 4x2 when its nodes are wiped." in notices_of(machine, time.now)
    entry = Disruption.objects.get()
    assert (entry.machine_id, entry.cause, entry.cell_id) == (machine.id, DisruptionCause.LAYOUT, None)
    said = Event.objects.filter(kind="machine.layout").latest("pk").message
    assert said.startswith("m-00000001 is divided into 4x2: on-cpu-2-pool-")
    assert said.endswith("its 8 nodes are spare and become 4x2 instead of 8x1")
    give_back()
    machine.refresh_from_db()
    assert (machine.layout, machine.layout_changes) == ("4x2", False)
    assert free_machines() == {"pool": {"cpu.2": 4}}
    entry.refresh_from_db()
    assert entry.closed_at == time.now
    passes(time, 1)
    assert Node.objects.filter(state=NodeState.JOINING, instance_type="cpu.2").count() == 4
    passes(time, 120)
    assert Machine.objects.get().layout == "4x2"


@pytest.mark.usefixtures("machine")
def test_a_pinned_layout_stays_until_an_operator_unpins_it(time: Clock) -> None:
    body = {"layout": "8x1", "pinned": True}
    shown = bearer("operator").post("/api/v1/machines/m-00000001/layout/", body, format="json").json()
    assert (shown["layout_pinned"], Event.objects.latest("pk").message.endswith("the layout of m-00000001")) == (
        True,
        True,
    )
    assert Node.objects.filter(state=NodeState.READY).count() == 8, "its nodes stay"
    want(1, "cpu.8")
    passes(time, 1)
    passes(time, 30)
    assert not Machine.objects.get().layout_changes
    with pytest.raises(StaleDecision, match="is pinned, broken or away"):
        layout_change(DECIDED, now=NOW)
    machine_layout_set(machine_id="m-00000001", layout="8x1", actor="ada", now=NOW)
    passes(time, 30)
    assert Machine.objects.get().next_layout == "1x8"


STALE: tuple[tuple[dict[str, Any], str], ...] = (
    ({"seen": "2x4"}, "has another layout, other nodes"),
    ({"nodes": NAMES[1:]}, "has another layout, other nodes"),
    ({"layout": "99x1"}, "has too many nodes"),
)


@pytest.mark.usefixtures("machine")
def test_a_step_whose_premises_have_changed_writes_nothing() -> None:
    for changes, why in STALE:
        with pytest.raises(StaleDecision, match=why):
            layout_change(replace(DECIDED, **changes), now=NOW)
    Machine.objects.update(broken={"machine": "its driver is silent"})
    with pytest.raises(StaleDecision, match="pinned, broken or away"):
        layout_change(DECIDED, now=NOW)
    assert not Disruption.objects.exists()
    assert Node.objects.filter(state=NodeState.READY).count() == 8


@pytest.mark.usefixtures("machine")
def test_a_node_that_joined_a_cell_meanwhile_keeps_the_machine_as_it_is() -> None:
    rows.cell("c", Node.objects.get(id=NAMES[5]), region=rows.region("pool"))
    with pytest.raises(StaleDecision, match=f"node {NAMES[5]} joined a cell"):
        layout_change(DECIDED, now=NOW)
    assert Node.objects.filter(state=NodeState.READY).count() == 8
    assert not Disruption.objects.exists()
    assert not Machine.objects.get().layout_changes


@pytest.mark.usefixtures("machine")
def test_layouts_and_cells_share_one_budget() -> None:
    """Two per region; a change that takes too long, because its machine is away, does not count."""
    region, other = rows.region("pool"), rows.deployment("other")
    for number in range(2):
        cell = rows.cell(f"c{number}", region=region, deployment=other)
        Disruption.objects.create(
            cell=cell, deployment=cell.deployment, region=region, cause="rollout", reason="a rollout", opened_at=NOW
        )
    with pytest.raises(StaleDecision, match="keeps its layout: 2 cells of the region are down on purpose"):
        layout_change(DECIDED, now=NOW)
    Disruption.objects.filter(cell="c0").delete()
    layout_change(DECIDED, now=NOW)
    assert fleet_view(now=NOW).layouts_changing == {"pool": 1}
    serving = rows.cell("c2", region=region, state_since=BEFORE)
    rows.cell("c3", region=region, state_since=BEFORE)
    DeploymentRegion.objects.create(deployment=serving.deployment, region=region, cells=2)
    drain = DrainCell("c2", 1, DisruptionCause.ROLLOUT, "a rollout")
    with pytest.raises(StaleDecision, match="2 cells of the region are down on purpose"):
        cell_drain_charged(drain, now=NOW)
    late = NOW + timedelta(minutes=11)
    assert fleet_view(now=late).layouts_changing == {}
    cell_drain_charged(drain, now=late)


@pytest.mark.usefixtures("machine")
def test_a_removed_machine_leaves_no_entry_in_the_ledger() -> None:
    layout_change(DECIDED, now=NOW)
    machine_remove(machine_id="m-00000001", actor="ada", now=NOW)
    give_back()
    machine_move(Machine.objects.get(), MachineState.GONE, "it has uninstalled itself", now=NOW)
    assert not Disruption.objects.filter(closed_at=None).exists()


@pytest.fixture
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalProvider:
    """Provider `local` on 16 CPUs in two regions. It starts no process."""
    rows.region("here", provider="local")
    rows.region("there", provider="local", position=1)
    monkeypatch.setattr("fleet.clouds.local.spawn_detached", lambda argv, *_: None)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(total=128 * 2**30))
    return LocalProvider(home=tmp_path, checkout=tmp_path, server_url="http://x", first_port=30000, layout="8x1")


def launched(provider: LocalProvider, name: str, kind: str, where: str = "here") -> NodeResources:
    """What a new node owns."""
    made = rows.node(name, where=where, instance_type_id=kind, spare_since=BEFORE)
    (found,) = provider.launch([LaunchSpec(name, AgentKind.NODE, where, "", instance_type=kind)])
    Node.objects.filter(id=name).update(topology=list(found.topology or ()))
    machine_launched(made, now=NOW)
    argv = json.loads((provider.home / "nodes" / name / "boot.json").read_bytes())["argv"]
    return resources_from(argv[argv.index("--owns") + 1])


def test_the_part_of_this_computer_in_a_region_is_divided_for_cells_that_wait(
    local: LocalProvider, time: Clock
) -> None:
    owned = [launched(local, name, "cpu.1") for name in NAMES]
    assert [(part.devices, part.cpus) for part in owned] == [((number,), (number,)) for number in range(8)]
    assert launched(local, "n-0000000a", "cpu.1", "there").cpus == (8,)
    machine = Machine.objects.get(region="here")
    Machine.objects.filter(region="here").update(layout_at=BEFORE)
    assert {tuple(node.topology) for node in Node.objects.filter(region="here")} == {(machine.id,)}
    assert (machine.provider, machine.layout, machine.state) == ("local", "8x1", MachineState.TAKEN)
    view = fleet_view(now=NOW)
    assert [view.regions[name].free for name in ("here", "there")] == [{}, {"cpu.1": 7}]
    with pytest.raises(ProviderError, match="no machine is free"):
        local.launch([LaunchSpec("n-0000000b", AgentKind.NODE, "here", "", instance_type="cpu.1")])
    want(2, "cpu.2", "here")
    passes(time, 1)
    passes(time, 20)
    machine.refresh_from_db()
    assert (machine.layout, machine.next_layout) == ("8x1", "4x2")
    for name in NAMES:
        local.terminate(name)
    machine.refresh_from_db()
    assert (machine.layout, machine.layout_changes, machine.state) == ("4x2", False, MachineState.POOL)
    assert launched(local, "n-0000000c", "cpu.2").cpus == (0, 1)
    assert Machine.objects.get(region="there").layout == "8x1"


def test_a_part_of_this_computer_that_was_removed_is_divided_anew(local: LocalProvider) -> None:
    launched(local, NAMES[0], "cpu.1")
    first = Machine.objects.get()
    with pytest.raises(InvalidInput, match="one node is layout 1x1 here"):
        machine_layout_set(machine_id=first.id, layout="", actor="ada", now=NOW)
    machine_remove(machine_id=first.id, actor="ada", now=NOW)
    assert Node.objects.get(id=NAMES[0]).state == NodeState.RETIRED
    local.terminate(NAMES[0])
    first.refresh_from_db()
    assert first.state == MachineState.GONE
    assert fleet_view(now=NOW).regions["here"].free is None
    local.layout = "2x4"
    assert launched(local, NAMES[1], "cpu.1").cpus == (0, 1, 2, 3)
    local.layout = "3by3"
    with pytest.raises(ProviderError, match="SWITCHYARD_LOCAL_LAYOUT: layout '3by3' must be NODESxDEVICES"):
        launched(local, NAMES[2], "cpu.1", "there")


def test_a_node_whose_agent_does_not_start_leaves_its_slot(
    local: LocalProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise OSError("no processes left")

    with monkeypatch.context() as small:
        small.setattr("fleet.clouds.local.spawn_detached", fails)
        with pytest.raises(ProviderError, match="no processes left"):
            launched(local, NAMES[0], "cpu.1")
    assert free_machines() == {"here": {"cpu.1": 8}}
    assert launched(local, NAMES[1], "cpu.1").devices == (0,)


NONCE = "5e" * 32


def joined(invitation: dict[str, Any], facts: MachineFacts = PLAIN) -> Machine:
    """A host that joins by an invitation, with these facts."""
    new = invitation_create(region="pool", count=1, expires_in=timedelta(hours=1), actor="ada", now=NOW, **invitation)
    name = machine_id_of(NONCE)
    machine_enrol(token=new.text, kind="machine", subject=name, nonce=NONCE, now=NOW)
    hello = Hello(1, AgentKind.MACHINE, name, "boot", "0.1.0", machine=facts)
    assert machine_hellos_store([hello], now=NOW) == {}
    assert name not in {one.id for one in pool_of("pool", MachineRole.NODE)}, "no node before it has its layout"
    wiped_report = MachineReport(1, 99, MachinePhase.IDLE)
    machine_reports_store([ReceivedMachineReport(name, "k2", True, NOW, wiped_report)])
    return Machine.objects.get(id=name)


def test_a_host_is_divided_as_its_invitation_says_when_it_joins() -> None:
    made = joined({"layout": "4x2", "instance_type": "cpu.2"})
    assert (made.layout, made.layout_changes, made.state) == ("4x2", False, MachineState.POOL)
    assert [slot.instance_type_id for slot in made.slots.all()] == ["cpu.2"] * 4
    assert not Incident.objects.exists(), "the type is that of its nodes"


def test_a_host_that_cannot_have_the_layout_of_its_invitation_joins_as_one_node() -> None:
    made = joined({"layout": "4x2"}, msgspec.structs.replace(PLAIN, cpus=()))
    assert (made.layout, made.layout_changes, made.state) == ("", False, MachineState.POOL)
    assert "keeps layout one node" in Event.objects.filter(kind="machine.layout").latest("pk").message


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"layout": "4by2"}, "must be NODESxDEVICES"),
        ({"layout": "99x1"}, "too many nodes"),
        ({"layout": "2x1", "role": "ingress"}, "an ingress has no nodes"),
    ],
)
def test_an_invitation_with_an_impossible_layout_is_refused(body: dict[str, str], says: str) -> None:
    answer = bearer("operator").post("/api/v1/machines/invitations/", {"region": "pool", **body}, format="json")
    assert (answer.status_code, says in answer.content.decode()) == (400, True)
