"""Which machines a proof lets join: those launched here, with the nonce of their first proof."""

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import msgspec
import pytest
from django.db import transaction
from django.test import Client

from fleet.agents.planner import BadProof, ProofRefused
from fleet.agents.services.enrolment import NotYet, agent_enrol, agents_identify, machine_attest
from fleet.clouds.models import CloudRegion, LaunchAttempt, LaunchUnit
from fleet.clouds.planning.upkeep import CloudBase
from fleet.machines.models import Invitation, Machine
from fleet.machines.services.machines import InvitationRefused, machine_enrol
from fleet.machines.services.reports import machine_hellos_store
from fleet.reconcile.planning.states import CloudRegionState, MachineRole, MachineState
from kernel import clock
from kernel.rest.throttling import RateStatus
from tests.fleet import rows
from tests.fleet.clouds.aws.sts_server import Sts, answering
from tests.fleet.machines.test_services import hello
from tests.fleet.proofs import NONCE, SERVER, body_of, proof
from tests.fleet.rows import NOW

pytestmark = pytest.mark.django_db

ACCOUNT, INSTANCE = "123456789012", "i-0123456789abcdef0"
ARN = f"arn:aws:sts::{ACCOUNT}:assumed-role/sw-node/{INSTANCE}"
OTHER = "cd" * 32


@pytest.fixture
def sts(settings: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sts]:
    settings.AGENT_URLS = [f"https://{SERVER}"]
    with answering() as sts:
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", sts.url)
        sts.knows(ARN)
        yield sts


@pytest.fixture
def machine(sts: Sts) -> Machine:
    """Launched as n-00000001."""
    region = rows.region("us", provider="aws")
    base = CloudBase(
        account=ACCOUNT, zones={}, node_group="sg-1", node_profile="arn:node", node_role="sw-node",
        ingress_role="sw-ingress",
    )  # fmt: skip
    CloudRegion.objects.create(
        region=region, aws_region="us-east-1", stack="switchyard", state=CloudRegionState.READY.value,
        base=msgspec.to_builtins(base),
    )  # fmt: skip
    return rows.machine(
        "m-00000001", where="us", provider="aws", provider_id=INSTANCE, state=MachineState.TAKEN.value,
        runs="n-00000001", address="10.1.16.4", facts=None, nonce_digest="",
    )  # fmt: skip


def attest(sts: Sts, **made: Any) -> str:
    return machine_attest(body_of(proof(host=sts.host, **made)), now=NOW)


def enrol(ticket: str, nonce: str = NONCE, subject: str = "m-00000001") -> str:
    return machine_enrol(token=ticket, kind="machine", subject=subject, nonce=nonce, now=NOW)


def test_a_proof_lets_one_machine_join_and_enrol_its_node(sts: Sts, machine: Machine) -> None:
    credential = enrol(attest(sts))

    [identity] = agents_identify([credential])
    assert identity is not None
    assert (identity.id, identity.region) == ("m-00000001", "us")
    assert machine_hellos_store([hello("m-00000001", address="10.1.16.4")], now=NOW) == {}
    machine.refresh_from_db()
    assert (machine.state, machine.runs) == (MachineState.TAKEN, "n-00000001")
    assert agent_enrol(token=credential, kind="node", subject="n-00000001", nonce=OTHER, now=NOW)


def test_a_ticket_is_worth_nothing_without_the_nonce_and_for_another_machine(sts: Sts, machine: Machine) -> None:
    ticket = attest(sts)

    for nonce, subject in ((OTHER, "m-00000001"), (NONCE, "m-00000002")):
        with pytest.raises(InvitationRefused, match="this ticket is only for m-00000001 with the nonce of its proof"):
            enrol(ticket, nonce, subject)
    with pytest.raises(InvitationRefused, match="expired"):
        machine_enrol(token=ticket, kind="machine", subject="m-00000001", nonce=NONCE, now=NOW + timedelta(minutes=15))


def test_a_lost_answer_is_asked_for_again_and_another_nonce_is_refused(sts: Sts, machine: Machine) -> None:
    first, second = attest(sts), attest(sts)

    enrol(second)
    with pytest.raises(InvitationRefused, match="unknown"):
        enrol(first)
    assert Invitation.objects.count() == 1
    with pytest.raises(ProofRefused, match="has attested itself already, with another nonce"):
        attest(sts, nonce=OTHER)


@pytest.mark.parametrize(
    ("arn", "says"),
    [
        (
            ARN.replace("sw-node", "admin"),
            "role admin of account 123456789012 is not a role of this fleet in us-east-1",
        ),
        (ARN.replace(ACCOUNT, "999999999999"), "role sw-node of account 999999999999 is not a role of this fleet"),
        (ARN.replace("sw-node", "sw-ingress"), "is a node in us, which has another role"),
        (f"arn:aws:iam::{ACCOUNT}:user/ada", "which is not a machine"),
        (ARN.replace("abcdef0", "abcdef1"), "was not launched by this fleet"),
    ],
)
def test_keys_of_others_are_refused(sts: Sts, machine: Machine, arn: str, says: str) -> None:
    sts.knows(arn)
    with pytest.raises(ProofRefused, match=says):
        attest(sts)


def of_another_region(sts: Sts, machine: Machine) -> None:
    CloudRegion.objects.update(aws_region="eu-west-1")


def of_a_stack_that_is_not_read(sts: Sts, machine: Machine) -> None:
    CloudRegion.objects.update(base={})


def terminated(sts: Sts, machine: Machine) -> None:
    Machine.objects.update(cloud_state="terminated")


def gone(sts: Sts, machine: Machine) -> None:
    Machine.objects.update(state=MachineState.GONE.value)


def revoked(sts: Sts, machine: Machine) -> None:
    Machine.objects.update(revoked_at=NOW)


def elsewhere(sts: Sts, machine: Machine) -> None:
    Machine.objects.update(address="10.1.16.5")


def refused_by_sts(sts: Sts, machine: Machine) -> None:
    sts.refuses("SignatureDoesNotMatch")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (of_another_region, "no region of this fleet is in us-east-1"),
        (of_a_stack_that_is_not_read, "is not a role of this fleet"),
        (terminated, "has ended"),
        (gone, "has ended"),
        (revoked, "was revoked or removed"),
        (elsewhere, "has the address 10.1.16.5, and the proof states 10.1.16.4"),
        (refused_by_sts, "STS rejected the signature: SignatureDoesNotMatch"),
    ],
)
def test_a_machine_that_may_not_join_is_refused(
    sts: Sts, machine: Machine, change: Callable[[Sts, Machine], None], says: str
) -> None:
    change(sts, machine)
    with pytest.raises(ProofRefused, match=says):
        attest(sts)
    assert not Invitation.objects.exists()


def test_a_launch_that_is_not_noted_yet_is_waited_for(sts: Sts, machine: Machine) -> None:
    unit = LaunchUnit.objects.create(
        id="u-1", region=machine.region, instance_type_id=rows.KIND, role=MachineRole.NODE.value,
        created_at=NOW,
    )  # fmt: skip
    attempt = LaunchAttempt.objects.create(
        unit=unit, number=1, pool_seen={}, base={}, token="t", subjects=[], begun_at=NOW, called_at=NOW
    )
    sts.knows(ARN.replace("abcdef0", "abcdef1"))
    with pytest.raises(NotYet, match="the launch of i-0123456789abcdef1 is not recorded yet"):
        attest(sts)
    LaunchAttempt.objects.filter(pk=attempt.pk).update(ended_at=NOW)
    with pytest.raises(ProofRefused, match="was not launched by this fleet"):
        attest(sts)


def test_without_sts_nobody_is_refused_for_good(sts: Sts, machine: Machine) -> None:
    sts.status = 500
    with pytest.raises(NotYet, match="answered 500"):
        attest(sts)


def test_what_proves_nothing_asks_nobody(sts: Sts, machine: Machine) -> None:
    for made in ({"server": "other.example"}, {"at": NOW - timedelta(hours=1)}):
        with pytest.raises(ProofRefused):
            attest(sts, **made)
    with pytest.raises(BadProof):
        machine_attest(b"{}", now=NOW)
    assert sts.asked == []


def test_over_http(sts: Sts, machine: Machine) -> None:
    def post(body: bytes) -> tuple[int, dict[str, Any], str]:
        answer = Client().post("/agents/join/attest", body, content_type="application/json")
        return answer.status_code, answer.json(), answer.headers.get("Retry-After", "")

    good = body_of(proof(host=sts.host, at=clock.now()))
    status, said, _ = post(good)
    assert (status, said["ticket"][:3]) == (200, "sw_")
    seen = Client().post(
        "/agents/join/check", {"port": 21000, "nonce": "ab" * 16}, content_type="application/json",
        headers={"Authorization": f"Bearer {said['ticket']}"},
    ).json()  # fmt: skip
    assert (seen["machine"], seen["cloud"], seen["address"], seen["trouble"]) == (
        "m-00000001", "aws", "10.1.16.4", "",
    )  # fmt: skip
    assert post(b"x" * 9000)[:2] == (400, {"error": "the proof has 9000 bytes; the limit is 8192"})
    assert post(body_of(proof(host=sts.host, at=clock.now(), nonce=OTHER)))[0] == 403
    sts.status = 503
    assert post(good)[0::2] == (503, "10")


def test_a_proof_that_does_not_say_its_length_could_not_be_judged_outside_of_a_transaction(sts: Sts) -> None:
    piecemeal = Client().post(
        "/agents/join/attest", body_of(proof(host=sts.host)), content_type="application/json",
        headers={"Transfer-Encoding": "chunked"},
    )  # fmt: skip
    assert (piecemeal.status_code, piecemeal.json()) == (411, {"error": "Content-Length is required"})


def test_a_proof_is_counted_and_asked_about_once_and_outside_of_the_transaction(
    sts: Sts, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[str] = []
    monkeypatch.setattr("fleet.agents.api.joining.count_request", lambda kind, *_: counted.append(kind))
    body = body_of(proof(host=sts.host, at=clock.now()))
    with pytest.raises(RuntimeError, match="a question to STS inside of a transaction"), transaction.atomic():
        machine_attest(body, now=clock.now())
    answer = Client().post("/agents/join/attest", body, content_type="application/json")
    assert (answer.status_code, counted) == (200, ["attest"])


def test_a_network_that_asks_too_often_keeps_no_ticket_out(
    sts: Sts, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticket = machine_attest(body_of(proof(host=sts.host, at=clock.now())), now=clock.now())
    full = RateStatus(limit=1, count=2, reset_s=9)
    for where in ("fleet.agents.api.joining", "fleet.nodes.api"):
        monkeypatch.setattr(f"{where}.count_request", lambda kind, *_: None if kind == "join-ticket" else full)

    def post(path: str, token: str, body: dict[str, Any]) -> int:
        headers = {"Authorization": f"Bearer {token}"}
        return Client().post(path, body, content_type="application/json", headers=headers).status_code

    enrolment = {"kind": "machine", "id": "m-00000001", "nonce": NONCE}
    for path, body in (("/agents/join/check", {"port": 0, "nonce": "ab" * 16}), ("/agents/enrol", enrolment)):
        assert post(path, ticket, body) == 200
        assert post(path, f"sw_00000000000000_{'0' * 48}", body) == 429


def test_the_script_carries_the_proof_and_the_host_of_sts(sts: Sts) -> None:
    script = Client().get("/join/aws").content.decode()
    assert f"STS_HOST='{sts.host}'" in script
    assert "Action=GetCallerIdentity" in script


def test_a_machine_that_states_another_address_is_not_heard(sts: Sts, machine: Machine) -> None:
    refused = machine_hellos_store([hello("m-00000001", address="10.9.9.9")], now=NOW)
    assert str(refused["m-00000001"]) == "m-00000001 has the address 10.1.16.4, and its hello states 10.9.9.9"


TASK = "0123456789abcdef0123456789abcdef"


def test_a_task_of_ecs_joins_by_the_session_of_its_role(sts: Sts, machine: Machine) -> None:
    region = rows.region("cluster", provider="ecs")
    base = CloudBase(
        account=ACCOUNT, zones={}, node_group="", node_profile="", node_role="sw-node-task",
        ingress_role="sw-ingress-task",
    )  # fmt: skip
    CloudRegion.objects.create(
        region=region, aws_region="us-east-1", stack="ecs", state=CloudRegionState.READY.value,
        base=msgspec.to_builtins(base),
    )  # fmt: skip
    rows.machine(
        "m-00000002", where="cluster", provider="ecs", provider_id=TASK, state=MachineState.TAKEN.value,
        runs="n-00000002", address="10.1.16.4", facts=None, nonce_digest="",
    )  # fmt: skip
    sts.knows(f"arn:aws:sts::{ACCOUNT}:assumed-role/sw-node-task/{TASK}")
    assert attest(sts)

    sts.knows(f"arn:aws:sts::{ACCOUNT}:assumed-role/sw-node/{TASK}")
    with pytest.raises(ProofRefused, match="another role"):
        attest(sts)
    sts.knows(f"arn:aws:sts::{ACCOUNT}:assumed-role/sw-node-task/{TASK[:-1]}0")
    with pytest.raises(ProofRefused, match="was not launched"):
        attest(sts)
    Machine.objects.filter(id="m-00000002").update(cloud_state="STOPPED")
    sts.knows(f"arn:aws:sts::{ACCOUNT}:assumed-role/sw-node-task/{TASK}")
    with pytest.raises(ProofRefused, match="has ended"):
        attest(sts)
