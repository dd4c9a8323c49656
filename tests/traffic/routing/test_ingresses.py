"""Creation and start of ingresses, and machines that joined as ingresses."""

from datetime import datetime, timedelta

import pytest

from engine_agent.protocol.messages import Hello
from engine_agent.protocol.states import AgentKind
from fleet.agents.services.enrolment import agent_enrol, agents_identify, credential_issue, join_token_issue
from fleet.machines.models import Machine
from fleet.machines.selectors import machine_orders
from fleet.machines.services.machines import machine_remove
from fleet.nodes.models import JoinToken
from fleet.reconcile.planning.snapshot import ProviderStatus
from fleet.reconcile.planning.states import MachineRole, MachineState
from fleet.regions.models import Region
from kernel.leases import lease_held_since, lease_take
from kernel.models import Event
from tests.fleet import rows
from tests.fleet.cloud import Cloud
from tests.fleet.rows import NOW
from traffic.routing.consumers import IngressHandler
from traffic.routing.models import Ingress, IngressReport
from traffic.routing.planning.ingresses import START_AGAIN_AFTER_S
from traffic.routing.services import ingresses
from traffic.routing.services.ingresses import ingress_create, ingress_machines_follow, ingress_revoke, ingresses_ensure

pytestmark = pytest.mark.django_db


@pytest.fixture
def cloud(monkeypatch: pytest.MonkeyPatch) -> Cloud:
    made = Cloud()
    monkeypatch.setattr(ingresses, "provider_named", lambda _: made)
    ingress_create(region=rows.region(), address="127.0.0.1", port=8080, now=NOW)
    return made


def later(seconds: float) -> datetime:
    return NOW + timedelta(seconds=seconds)


def report(**columns: object) -> None:
    defaults = {"connected": True, "last_seen_at": NOW, "connection_changed_at": NOW, **columns}
    IngressReport.objects.update_or_create(ingress_id="i-us-east-1", defaults=defaults)


def test_a_region_has_one_ingress_and_recording_it_again_moves_it() -> None:
    for port in (8080, 9090):
        ingress_create(region=rows.region(), address="127.0.0.1", port=port, now=later(port))
    ingress = Ingress.objects.get()
    assert (ingress.id, ingress.port, ingress.created_at) == ("i-us-east-1", 9090, later(8080))


def test_an_ingress_that_never_reported_is_booted_once(cloud: Cloud) -> None:
    assert ingresses_ensure(now=NOW) == ["i-us-east-1"]
    assert ingresses_ensure(now=later(1)) == []
    (spec,) = cloud.launched
    assert (spec.id, spec.port, spec.region) == ("i-us-east-1", 8080, "us-east-1")
    assert Event.objects.get(kind="ingress.started").detail == {"whole": True, "status": "gone"}


def test_a_connected_ingress_is_not_even_looked_at(cloud: Cloud) -> None:
    report()
    assert ingresses_ensure(now=later(9)) == []


def test_a_pass_is_due_when_the_oldest_report_counts_as_silence(cloud: Cloud) -> None:
    report()
    rests: list[float] = []
    for at in (1, 7, 11):
        ingresses_ensure(now=later(at), rest=rests.append)
    assert rests == [5.0, 3.0]


def test_a_connection_that_says_nothing_any_more_proves_nothing(cloud: Cloud) -> None:
    report()
    assert ingresses_ensure(now=later(11)) == ["i-us-east-1"]


def test_a_dead_agent_is_started_again_without_its_haproxy(cloud: Cloud) -> None:
    report(connected=False)
    cloud.status = ProviderStatus.AGENT_DEAD
    assert ingresses_ensure(now=later(2)) == ["i-us-east-1"]
    assert (cloud.restarted, cloud.launched) == (["i-us-east-1"], [])


def test_one_that_served_for_long_and_is_gone_is_started_at_once(cloud: Cloud) -> None:
    assert ingresses_ensure(now=NOW) == ["i-us-east-1"]
    report(connected=False, connection_changed_at=later(600), last_seen_at=later(600))
    assert ingresses_ensure(now=later(600)) == ["i-us-east-1"]
    assert ingresses_ensure(now=later(601)) == []


def test_a_start_that_fails_is_tried_again_after_its_pause_and_not_in_a_storm(cloud: Cloud) -> None:
    cloud.broken = True
    for second in range(4):
        assert ingresses_ensure(now=later(second)) == []
    assert JoinToken.objects.count() == 1
    cloud.broken = False
    assert ingresses_ensure(now=later(START_AGAIN_AFTER_S)) == ["i-us-east-1"]


def test_while_one_worker_boots_it_another_leaves_it_alone(cloud: Cloud) -> None:
    lease_take(name="ingress:i-us-east-1", holder="another worker", ttl_s=30, now=NOW)
    assert ingresses_ensure(now=later(29)) == []
    assert ingresses_ensure(now=later(31)) == ["i-us-east-1"]
    assert lease_held_since(name="ingress:i-us-east-1", now=later(31)) is None


def test_one_region_without_a_provider_does_not_keep_the_others_waiting(caplog: pytest.LogCaptureFixture) -> None:
    for position, (name, provider) in enumerate((("a-first", "mars"), ("b-second", "mars"))):
        region = rows.region(name, provider=provider)
        ingress_create(region=region, address="127.0.0.1", port=8080 + position, now=NOW)
    assert ingresses_ensure(now=NOW) == []
    assert caplog.text.count("unknown provider 'mars'") == 2


def test_a_revoked_ingress_proves_nothing_any_more_and_its_credential_is_refused() -> None:
    ingress = ingress_create(region=rows.region(), address="127.0.0.1", port=8080, now=NOW)
    token = join_token_issue(
        kind=AgentKind.INGRESS, subject=ingress.id, region="us-east-1", expires_at=NOW + timedelta(hours=1)
    )
    credential = agent_enrol(token=token, kind="ingress", subject=ingress.id, nonce="5e" * 32, now=NOW)
    ingress_revoke(ingress_id=ingress.id, actor="ada", now=NOW, why="stolen")
    assert agents_identify([credential]) == [None]
    event = Event.objects.get(kind="ingress.revoked")
    assert (event.actor, event.message) == ("ada", f"{ingress.id} was revoked by ada: stolen")
    ingress_revoke(ingress_id=ingress.id, actor="ada", now=NOW, why="again")
    assert Event.objects.filter(kind="ingress.revoked").count() == 1


def joined(name: str, address: str) -> Machine:
    role = MachineRole.INGRESS.value
    return rows.machine(name, role=role, address=address, port_base=8080, instance_type=None)


def test_a_region_has_as_many_ingresses_as_machines_joined_for_it() -> None:
    joined("m-0000000a", "10.0.0.8")
    joined("m-0000000b", "10.0.0.9")
    rows.machine("m-0000000c")  # port of a node
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


def test_an_ingress_without_a_machine_delays_nothing() -> None:
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
    assert str(refused["i-0000000a"]) == "i-0000000a is not an ingress"


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
