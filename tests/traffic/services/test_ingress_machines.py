"""Machines that joined as ingresses: several a region, each by its own id, and none that nobody is."""

import pytest

from engine_agent.protocol.messages import Hello
from engine_agent.protocol.states import AgentKind
from fleet.models import Machine, Region
from fleet.planning.states import MachineRole, MachineState
from fleet.selectors.machine import machine_orders
from fleet.services.enrolment import agents_identify, credential_issue
from fleet.services.machine import machine_remove
from tests.fleet import rows
from tests.fleet.rows import NOW
from traffic.consumers.ingress_handler import IngressHandler
from traffic.models import Ingress
from traffic.services.ingress import ingress_revoke
from traffic.services.ingress_machines import ingress_machines_follow

pytestmark = pytest.mark.django_db


def joined(name: str, address: str) -> Machine:
    role = MachineRole.INGRESS.value
    return rows.machine(name, role=role, address=address, port_base=8080, instance_type=None)


def test_a_region_has_as_many_ingresses_as_machines_joined_for_it() -> None:
    joined("m-0000000a", "10.0.0.8")
    joined("m-0000000b", "10.0.0.9")
    rows.machine("m-0000000c")  # a node's
    ingress_machines_follow(now=NOW)
    ingress_machines_follow(now=NOW)
    found = Ingress.objects.values_list("id", "region_id", "address", "port")
    assert set(found) == {("i-0000000a", "pool", "10.0.0.8", 8080), ("i-0000000b", "pool", "10.0.0.9", 8080)}
    assert Region.objects.get(name="pool").ingress_url == "http://10.0.0.8:8080"
    run = machine_orders({"m-0000000a": 0})["m-0000000a"].run
    assert run is not None
    assert (run.kind, run.id, run.port) == ("ingress", "i-0000000a", 8080)


def test_an_ingress_leaves_with_its_machine_and_the_region_names_another() -> None:
    joined("m-0000000a", "10.0.0.8")
    joined("m-0000000b", "10.0.0.9")
    ingress_machines_follow(now=NOW)
    machine_remove(machine_id="m-0000000a", actor="ada", now=NOW)
    ingress_machines_follow(now=NOW)
    assert list(Ingress.objects.values_list("id", flat=True)) == ["i-0000000b"]
    assert Region.objects.get(name="pool").ingress_url == "http://10.0.0.9:8080"
    assert Machine.objects.get(id="m-0000000a").state == MachineState.WIPING


def test_nobody_waits_for_an_ingress_without_a_machine() -> None:
    machine = joined("m-0000000a", "10.0.0.8")
    ingress_machines_follow(now=NOW)
    Machine.objects.filter(id=machine.id).update(state=MachineState.GONE.value, runs="")
    ingress_machines_follow(now=NOW)
    assert not Ingress.objects.exists()
    assert Region.objects.get(name="pool").ingress_url == ""


def _hello(name: str) -> Hello:
    return Hello(protocol=1, kind=AgentKind.INGRESS, id=name, boot_id="b", agent_version="1")


def test_an_ingress_whose_machine_leaves_is_trusted_no_longer() -> None:
    joined("m-0000000a", "10.0.0.8")
    ingress_machines_follow(now=NOW)
    credential = credential_issue(kind="ingress", subject="i-0000000a", region="pool", now=NOW)
    assert IngressHandler().on_hellos([_hello("i-0000000a")]) == {}
    machine_remove(machine_id="m-0000000a", actor="ada", now=NOW)
    ingress_machines_follow(now=NOW)
    assert agents_identify([credential]) == [None]
    refused = IngressHandler().on_hellos([_hello("i-0000000a")])
    assert str(refused["i-0000000a"]) == "i-0000000a is no ingress"


def test_the_machine_of_a_revoked_ingress_is_out_for_good() -> None:
    machine = joined("m-0000000a", "10.0.0.8")
    ingress_machines_follow(now=NOW)
    credential = credential_issue(kind="machine", subject=machine.id, region="pool", now=NOW)
    ingress_revoke(ingress_id="i-0000000a", actor="ada", now=NOW)
    assert agents_identify([credential]) == [None]
    ingress_machines_follow(now=NOW)
    ingress_machines_follow(now=NOW)
    machine.refresh_from_db()
    assert (machine.state, machine.runs) == (MachineState.GONE, "")
    assert not Ingress.objects.exists()
