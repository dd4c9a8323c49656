"""Invitations, joins and removals of machines, with the errors for operators."""

import hashlib
from datetime import timedelta
from typing import Any

import msgspec
import pytest

from engine_agent.node.machine.join import ports_of
from engine_agent.protocol.machine_messages import Device, MachineReport, machine_id_of
from engine_agent.protocol.messages import Hello
from engine_agent.protocol.ports import first_ports
from engine_agent.protocol.states import AgentKind, MachinePhase
from fleet.agents.services.enrolment import EnrolmentRefused, agent_enrol, agents_identify, credential_issue
from fleet.faults.models import Incident
from fleet.machines.models import Invitation, Machine
from fleet.machines.selectors import machine_orders, notices_of
from fleet.machines.services.machines import (
    InvitationRefused,
    NewInvitation,
    invitation_create,
    invitation_withdraw,
    join_refused,
    machine_enrol,
    machine_launched,
    machine_remove,
)
from fleet.machines.services.reports import ReceivedMachineReport, machine_hellos_store, machine_reports_store
from fleet.machines.services.revocation import machine_revoke
from fleet.nodes.models import AgentCredential, Node
from fleet.reconcile.planning.states import MachineRole, MachineState, NodeState
from fleet.tasks import trim_join_tokens
from kernel import clock
from kernel.models import Event
from kernel.refusals import Conflict, InvalidInput
from models_registry.instance_types.planner import INSTANCE_TYPES, unknown_type_text
from tests.fleet import rows
from tests.fleet.rows import NOW

pytestmark = pytest.mark.django_db

HOUR = timedelta(hours=1)
NONCE = "ab" * 32
OTHER = "cd" * 32


def invite(count: int = 1, **options: Any) -> NewInvitation:
    rows.region("pool", provider="machines")
    return invitation_create(region="pool", count=count, expires_in=HOUR, actor="ada", now=NOW, **options)


def enrol(token: str, nonce: str = NONCE, subject: str = "", now: Any = NOW) -> str:
    return machine_enrol(token=token, kind="machine", subject=subject or machine_id_of(nonce), nonce=nonce, now=now)


def hello(machine: str, **facts: Any) -> Hello:
    stated = msgspec.structs.replace(rows.FACTS, **facts)
    return Hello(1, AgentKind.MACHINE, machine, "b0", "0.1.0", machine=stated)


def report(machine: str, phase: MachinePhase, *, runs: str = "", version: int = 99, connected: bool = True) -> None:
    one = MachineReport(1, version, phase, runs)
    machine_reports_store([ReceivedMachineReport(machine, "k", connected, NOW, one)])


def test_of_a_token_only_the_hash_is_kept() -> None:
    new = invite()
    assert new.invitation.digest == hashlib.sha256(new.text.encode()).hexdigest()
    assert new.text not in str(new.invitation.__dict__)


@pytest.mark.parametrize(
    ("region", "count", "expires_in", "kind", "says"),
    [
        ("nowhere", 1, HOUR, "", "there is no region 'nowhere'; there are: pool, rented"),
        ("rented", 1, HOUR, "", "region rented gets its machines from provider local; hosts join regions of machines"),
        ("pool", 0, HOUR, "", "count is 0; it must be 1 to 1000"),
        ("pool", 1, timedelta(days=8), "", "it expires in 691200 s; it must be 60 s to 7 days"),
        ("pool", 1, HOUR, "p6", f"{unknown_type_text('p6', INSTANCE_TYPES)}"),
    ],
)
def test_an_invitation_that_makes_no_sense_is_refused(
    region: str, count: int, expires_in: timedelta, kind: str, says: str
) -> None:
    rows.region("pool", provider="machines")
    rows.region("rented")
    with pytest.raises(InvalidInput) as refusal:
        invitation_create(region=region, count=count, expires_in=expires_in, instance_type=kind, actor="ada", now=NOW)
    assert str(refusal.value) == says


def test_a_host_becomes_a_machine_of_the_pool() -> None:
    new = invite()
    credential = enrol(new.text)
    machine = Machine.objects.get()
    assert (machine.id, machine.state) == (machine_id_of(NONCE), MachineState.JOINING)
    [identity] = agents_identify([credential])
    assert identity is not None
    assert (identity.kind, identity.id, identity.region) == (AgentKind.MACHINE, machine.id, "pool")
    rows.deployment()  # its detected type
    assert machine_hellos_store([hello(machine.id)], now=NOW) == {}
    machine.refresh_from_db()
    assert (machine.state, machine.address, machine.instance_type_id) == (MachineState.POOL, "10.0.0.7", rows.KIND)


EIGHT = (Device("nvidia", "NVIDIA H100 80GB HBM3", memory_bytes=80 * 2**30),) * 8


def joined(kind: str = "", **facts: Any) -> Machine:
    new = invite(instance_type=kind)
    enrol(new.text)
    assert machine_hellos_store([hello(machine_id_of(NONCE), **facts)], now=NOW) == {}
    return Machine.objects.get()


def differing() -> list[tuple[str, str]]:
    return list(Incident.objects.filter(kind="hardware-differs").order_by("id").values_list("state", "summary"))


def test_a_host_of_a_shipped_type_gets_its_row_and_one_of_no_type_gets_a_new_one() -> None:
    assert joined(devices=EIGHT).instance_type_id == "p5.48xlarge"
    Machine.objects.all().delete()
    machine = joined(devices=EIGHT[:3])
    assert machine.instance_type_id == "found.3xh100-80gib"
    assert machine.instance_type is not None
    assert (machine.instance_type.origin, machine.instance_type.changed_by) == ("found", machine.id)
    assert Event.objects.filter(kind="instance_type.found").count() == 1
    assert differing() == []


def test_a_machine_that_is_not_its_type_opens_an_incident_that_closes_with_the_difference() -> None:
    machine = joined("p5.48xlarge", devices=EIGHT[:7])
    opened = Incident.objects.get(kind="hardware-differs")
    assert (opened.subject, opened.region, opened.state) == (machine.id, "pool", "open")
    assert opened.evidence["difference"] == "has 7 chips of h100 instead of 8"
    assert (machine.instance_type_id, machine.state) == ("p5.48xlarge", MachineState.POOL)
    machine_hellos_store([hello(machine.id, devices=EIGHT[:7])], now=NOW)
    assert len(differing()) == 1
    machine_hellos_store([hello(machine.id, devices=EIGHT[:6])], now=NOW)
    assert differing() == [
        ("closed", f"{machine.id} is stated as p5.48xlarge, but has 7 chips of h100 instead of 8"),
        ("open", f"{machine.id} is stated as p5.48xlarge, but has 6 chips of h100 instead of 8"),
    ]
    machine_hellos_store([hello(machine.id, devices=EIGHT)], now=NOW)
    assert [state for state, _ in differing()] == ["closed", "closed"]


def test_a_free_machine_that_loses_a_device_keeps_its_type_and_one_that_gains_some_changes_it() -> None:
    machine = joined(devices=EIGHT)
    machine_hellos_store([hello(machine.id, devices=EIGHT[:7])], now=NOW)
    machine.refresh_from_db()
    assert machine.instance_type_id == "p5.48xlarge"
    assert differing() == [("open", f"{machine.id} was found as p5.48xlarge, but has 7 chips of h100 instead of 8")]
    machine_hellos_store([hello(machine.id, devices=EIGHT)], now=NOW)
    assert [state for state, _ in differing()] == ["closed"]
    Machine.objects.update(instance_type=rows.KIND)
    machine_hellos_store([hello(machine.id, devices=EIGHT)], now=NOW)
    machine.refresh_from_db()
    assert machine.instance_type_id == "p5.48xlarge"


def test_the_incident_of_a_machine_closes_when_it_is_gone() -> None:
    machine = joined("p5.48xlarge", devices=EIGHT[:7])
    Machine.objects.update(connected=False)
    machine_remove(machine_id=machine.id, actor="ada", now=NOW)
    assert [state for state, _ in differing()] == ["closed"]
    assert Incident.objects.get(kind="hardware-differs").resolution == "the machine is gone"


def test_who_used_a_token_may_use_it_again_and_nobody_beyond_its_count() -> None:
    new = invite()
    first = enrol(new.text)
    assert enrol(new.text) != first
    assert agents_identify([first]) == [None]
    with pytest.raises(
        InvitationRefused, match="this token was for one host and is used up; `switchyard machine add` makes a new one"
    ):
        enrol(new.text, OTHER)
    assert Machine.objects.count() == 1


@pytest.mark.parametrize(
    ("text", "later", "says"),
    [
        (
            f"sw_{14 * '0'}_{48 * '0'}",
            timedelta(0),
            "this token is unknown; `switchyard machine add` prints a line",
        ),
        ("nonsense", timedelta(0), "this token is unknown"),
        ("", HOUR, "this token expired at 2026-11-21 13:00:00 UTC; `switchyard machine add` makes a new one"),
    ],
)
def test_a_wrong_or_expired_token_is_named(text: str, later: timedelta, says: str) -> None:
    new = invite()
    with pytest.raises(InvitationRefused) as refusal:
        enrol(text or new.text, now=NOW + later)
    assert str(refusal.value).startswith(says)
    assert not Machine.objects.exists()


def test_nobody_joins_as_a_machine_whose_nonce_he_does_not_know() -> None:
    new = invite(count=2)
    enrol(new.text)
    with pytest.raises(InvitationRefused, match="the id of a machine must be"):
        enrol(new.text, OTHER, subject=machine_id_of(NONCE))


def test_why_a_host_did_not_join_is_in_the_timeline_as_text() -> None:
    new = invite()
    join_refused(token=new.text, address="10.0.0.7", reason="port 14000\nis taken", now=NOW)
    event = Event.objects.get(kind="machine.refused")
    assert event.message == "a host at 10.0.0.7 did not join pool: port 14000 is taken"
    assert event.region == "pool"


def test_expired_invitations_are_deleted_a_week_later(monkeypatch: pytest.MonkeyPatch) -> None:
    invite()
    monkeypatch.setattr(clock, "now", lambda: NOW + timedelta(days=2))
    trim_join_tokens()
    assert Invitation.objects.count() == 1
    monkeypatch.setattr(clock, "now", lambda: NOW + timedelta(days=9))
    trim_join_tokens()
    assert Invitation.objects.count() == 0


def test_a_machine_enrols_what_it_was_told_to_run_and_nothing_else() -> None:
    new = invite()
    credential = enrol(new.text)
    Machine.objects.update(state=MachineState.TAKEN.value, runs="n-00000001")
    own = agent_enrol(token=credential, kind="node", subject="n-00000001", nonce=OTHER, now=NOW)
    [identity] = agents_identify([own])
    assert identity is not None
    assert (identity.kind, identity.id) == (AgentKind.NODE, "n-00000001")
    for kind, subject in (("node", "n-00000002"), ("ingress", "n-00000001"), ("machine", machine_id_of(NONCE))):
        with pytest.raises(EnrolmentRefused, match="has no order to run"):
            agent_enrol(token=credential, kind=kind, subject=subject, nonce=OTHER, now=NOW)
    Machine.objects.update(state=MachineState.WIPING.value)
    with pytest.raises(EnrolmentRefused, match="has no order to run"):
        agent_enrol(token=credential, kind="node", subject="n-00000001", nonce=OTHER, now=NOW)


def test_a_machine_that_has_a_certificate_enrols_its_agent_only_with_it() -> None:
    """Its credential alone could take over the node."""
    credential = enrol(invite().text)
    machine = machine_id_of(NONCE)
    Machine.objects.update(state=MachineState.TAKEN.value, runs="n-00000001")
    AgentCredential.objects.update(bound_at=NOW)

    def enrol_node(certificate: object) -> str:
        return agent_enrol(
            token=credential, kind="node", subject="n-00000001", nonce=OTHER, now=NOW, certificate=certificate
        )

    with pytest.raises(EnrolmentRefused, match="none was presented"):
        enrol_node(None)
    with pytest.raises(EnrolmentRefused, match=f"the presented certificate is not {machine}'s"):
        enrol_node(peer("m-00000002"))
    assert agents_identify([enrol_node(peer(machine))])[0]


def peer(machine: str) -> dict[str, object]:
    names = (("URI", f"spiffe://f-0123abcd/machine/{machine}"), ("DNS", f"{machine}.machine.f-0123abcd"))
    return {"subjectAltName": names}


def test_a_machine_that_wiped_goes_back_to_the_pool() -> None:
    machine = rows.machine("m-00000001", state=MachineState.WIPING.value, runs="n-00000001", desired_version=7)
    report("m-00000001", MachinePhase.IDLE, version=6)
    machine.refresh_from_db()
    assert machine.state == MachineState.WIPING  # from an older order
    report("m-00000001", MachinePhase.IDLE, version=7)
    machine.refresh_from_db()
    assert (machine.state, machine.runs) == (MachineState.POOL, "")


def test_a_machine_in_use_is_emptied_before_it_leaves() -> None:
    node = rows.node("n-00000001", where="pool")
    machine = rows.machine("m-00000001", state=MachineState.TAKEN.value, runs=node.id)
    machine_remove(machine_id=machine.id, actor="ada", now=NOW, why="sold")
    node.refresh_from_db()
    assert (node.state, node.reason) == (NodeState.RETIRED, "its machine was removed by ada: sold")
    Machine.objects.update(state=MachineState.WIPING.value)
    report(machine.id, MachinePhase.IDLE)
    order = machine_orders({machine.id: 0})[machine.id]
    assert order.leave
    assert order.run is None
    report(machine.id, MachinePhase.LEFT)
    machine.refresh_from_db()
    assert machine.state == MachineState.GONE


def test_a_cell_on_a_removed_machine_gets_another_node_first() -> None:
    node = rows.node("n-00000001", where="pool")
    rows.cell("c", node, region=rows.region("pool"))
    machine = rows.machine("m-00000001", state=MachineState.TAKEN.value, runs=node.id)
    machine_remove(machine_id=machine.id, actor="ada", now=NOW)
    node.refresh_from_db()
    machine.refresh_from_db()
    assert (node.state, node.cordoned) == (NodeState.READY, True)
    assert (machine.state, machine.leaving) == (MachineState.TAKEN, True)
    with pytest.raises(Conflict, match="m-00000001 is leaving already"):
        machine_remove(machine_id=machine.id, actor="ada", now=NOW)


def test_a_machine_that_is_away_can_do_nothing_once_it_is_removed() -> None:
    new = invite()
    credential = enrol(new.text)
    machine = Machine.objects.get()
    machine_remove(machine_id=machine.id, actor="ada", now=NOW)
    machine.refresh_from_db()
    assert machine.state == MachineState.GONE
    assert agents_identify([credential]) == [None]
    with pytest.raises(InvitationRefused, match="was removed; uninstall it first"):
        enrol(new.text)
    refused = machine_hellos_store([hello(machine.id)], now=NOW)
    assert str(refused[machine.id]) == f"{machine.id} was removed; uninstall it and join it with a new token"


def test_a_machine_that_went_away_before_it_had_left_is_gone_when_it_is_removed_again() -> None:
    machine = rows.machine("m-00000001")
    credential = credential_issue(kind="machine", subject=machine.id, region="pool", now=NOW)
    machine_remove(machine_id=machine.id, actor="ada", now=NOW)
    with pytest.raises(Conflict, match="m-00000001 is leaving already"):
        machine_remove(machine_id=machine.id, actor="ada", now=NOW)
    Machine.objects.update(connected=False)
    machine_remove(machine_id=machine.id, actor="ada", now=NOW)
    machine.refresh_from_db()
    assert (machine.state, machine.reason) == (MachineState.GONE, "removed by ada, while away")
    assert agents_identify([credential]) == [None]
    with pytest.raises(Conflict, match="m-00000001 is gone already"):
        machine_remove(machine_id=machine.id, actor="ada", now=NOW)


def test_a_withdrawn_invitation_lets_nobody_join() -> None:
    new = invite(count=2)
    enrol(new.text)
    withdrawn = invitation_withdraw(prefix=new.invitation.prefix, actor="ada", now=NOW, why="mailed to the wrong list")
    assert withdrawn.state_at(NOW) == "withdrawn"
    for nonce in (NONCE, OTHER):
        with pytest.raises(InvitationRefused, match="this token was withdrawn; `switchyard machine add` makes a new"):
            enrol(new.text, nonce)
    event = Event.objects.get(kind="machine.invitation-withdrawn")
    assert event.message == f"ada withdrew invitation {new.invitation.prefix}: mailed to the wrong list"
    with pytest.raises(Conflict, match="is withdrawn already, since"):
        invitation_withdraw(prefix=new.invitation.prefix, actor="ada", now=NOW)
    assert Machine.objects.count() == 1


def test_no_token_undoes_a_revocation() -> None:
    new = invite()
    enrol(new.text)
    Machine.objects.update(state=MachineState.TAKEN.value, runs="n-00000001")
    machine_revoke(machine_id=machine_id_of(NONCE), actor="ada", now=NOW)
    with pytest.raises(InvitationRefused, match="was revoked"):
        enrol(new.text)


def test_a_launch_takes_no_row_of_a_host_that_joined() -> None:
    new = invite()
    credential = enrol(new.text)
    joined = Machine.objects.get()
    node = rows.node(f"n-{joined.id.removeprefix('m-')}", where="rented")
    machine_launched(node, now=NOW)
    machine_launched(node, now=NOW)
    joined.refresh_from_db()
    assert (joined.provider, joined.state, joined.runs) == ("machines", MachineState.JOINING, "")
    assert Machine.objects.get(runs=node.id).provider == "local"
    Machine.objects.filter(id=joined.id).update(provider="local", state=MachineState.TAKEN.value, runs="n-00000002")
    with pytest.raises(EnrolmentRefused, match="has no order to run node n-00000002"):
        agent_enrol(token=credential, kind="node", subject="n-00000002", nonce=OTHER, now=NOW)


def test_another_providers_machine_is_not_removed() -> None:
    rows.machine("m-00000001", provider="local", state=MachineState.TAKEN.value, runs="n-00000001")
    with pytest.raises(Conflict, match="belongs to provider local; replace or release node n-00000001 instead"):
        machine_remove(machine_id="m-00000001", actor="ada", now=NOW)


def test_the_end_of_an_older_connection_changes_nothing() -> None:
    machine = rows.machine("m-00000001", connection="newer")
    report(machine.id, MachinePhase.IDLE, connected=False)
    machine.refresh_from_db()
    assert machine.connected


def test_a_hello_without_facts_is_refused() -> None:
    rows.machine("m-00000001")
    refused = machine_hellos_store([Hello(1, AgentKind.MACHINE, "m-00000001", "b0", "0.1.0")], now=NOW)
    assert str(refused["m-00000001"]) == "the hello of m-00000001 lacks the facts of its host"


def test_silence_is_a_notice() -> None:
    machine = rows.machine("m-00000001")
    assert notices_of(machine, NOW) == ()
    assert notices_of(machine, NOW + timedelta(minutes=2)) == ("Its machine agent has been silent for 2 min.",)


def test_orders_say_whole_what_a_machine_runs() -> None:
    node = rows.node("n-00000001", where="pool")
    rows.machine("m-00000001", state=MachineState.TAKEN.value, runs=node.id, desired_version=4)
    rows.machine("m-00000002", desired_version=4)
    orders = machine_orders({"m-00000001": 3, "m-00000002": 4})
    assert set(orders) == {"m-00000001"}
    run = orders["m-00000001"].run
    assert run is not None
    assert (run.kind, run.id, run.address, run.port, run.instance_type) == (
        *(AgentKind.NODE, node.id, "10.0.0.7", 14000),
        rows.KIND,
    )
    assert Node.objects.count() == AgentCredential.objects.count() + 1


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        ({"address": "evil.example"}, "the address of a machine must be an IP address, not 'evil.example'"),
        ({"address": ""}, "the address of a machine must be an IP address, not ''"),
        ({"address": "::"}, "the address of a machine must be reachable from other hosts, not ::"),
        ({"address": "fe80::1%eth0"}, "the address of a machine must be reachable from other hosts, not fe80::1%eth0"),
        ({"port_base": 0}, "the first port of a machine must be 1024 to 65516, not 0"),
        ({"port_base": 65517}, "the first port of a machine must be 1024 to 65516, not 65517"),
        ({"port_base": -1}, "the first port of a machine must be 1024 to 65516, not -1"),
    ],
)
def test_what_no_ingress_could_connect_to_is_in_no_row(facts: dict[str, Any], says: str) -> None:
    rows.machine("m-1", state=MachineState.JOINING.value)
    refused = machine_hellos_store([hello("m-1", **facts)], now=NOW)
    assert str(refused["m-1"]) == says
    machine = Machine.objects.get()
    assert (machine.state, machine.address) == (MachineState.JOINING, rows.FACTS.address)


@pytest.mark.parametrize("role", list(MachineRole))
def test_every_first_port_with_which_a_host_may_join_is_taken(role: MachineRole) -> None:
    rows.machine("m-1", state=MachineState.JOINING.value, role=role.value)
    last = first_ports(AgentKind(role))[-1]
    assert ports_of(role, str(last))[0] == last
    refused = machine_hellos_store([hello("m-1", port_base=last + 1)], now=NOW)
    assert str(refused["m-1"]) == f"the first port of a machine must be 1024 to {last}, not {last + 1}"
    assert machine_hellos_store([hello("m-1", port_base=last)], now=NOW) == {}
    assert Machine.objects.get().port_base == last
