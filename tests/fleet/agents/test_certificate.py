"""The fleet's authorities and their certificates: one name each, revoked for all hosts, rotated without a gap."""

import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from django.db import connection, connections, transaction
from django.test import override_settings

from engine_agent.node.identity import Identity
from engine_agent.protocol.identity import BadName, IdentityKind
from engine_agent.protocol.states import AgentKind
from fleet.agents.models import FleetAuthority, IssuedCertificate
from fleet.agents.planner import AuthorityState
from fleet.agents.selectors import Trust, counting_certificates, server_pin, trust_now
from fleet.agents.services import authority as authorities
from fleet.agents.services.authority import (
    MOST_AT_ONCE,
    CertificateOrder,
    SealedAway,
    SignedCertificate,
    TooManyCertificates,
    agent_trust_end,
    authority_advance,
    authority_ensure,
    authority_rotate,
    certificate_issue,
    certificates_issue,
    certificates_trim,
)
from fleet.agents.services.enrolment import (
    CREDENTIAL_RENEWED_AFTER,
    AgentCertificate,
    AgentOrder,
    CertificateNotShown,
    CredentialRevoked,
    agent_certificates_issue,
    agents_identify,
    credential_issue,
    credentials_bind,
    join_token_issue,
)
from fleet.nodes.models import AgentCredential, JoinToken
from kernel import clock
from kernel.authority import BadRequest
from kernel.models import Event
from kernel.refusals import Conflict
from tests.controlplane.embedded.processes import eventually

NOW = datetime(2026, 11, 23, 12, 0, tzinfo=UTC)
NODE = IdentityKind.NODE


def credential(subject: str, kind: str = "node") -> None:
    AgentCredential.objects.create(
        prefix=subject[-8:], digest="d", kind=kind, subject=subject, region="us-east-1", created_at=NOW
    )


def signed(home: Path, subject: str = "n-1", *, now: datetime = NOW) -> SignedCertificate:
    """A certificate of an agent that has today's bundle."""
    believed = authority_ensure(now).bundle_digest
    order = CertificateOrder(NODE, subject, Identity(home / subject).signing_request(), believed)
    return certificate_issue(order, now=now)


def states() -> list[str]:
    return list(FleetAuthority.objects.values_list("state", flat=True))


def leaf(certificate: SignedCertificate) -> x509.Certificate:
    return x509.load_pem_x509_certificate(certificate.chain.encode())


def revoked_serials(trust: Trust | None) -> list[str]:
    assert trust is not None
    first, *_ = trust.revoked.split("-----END X509 CRL-----")
    listed = x509.load_pem_x509_crl((first + "-----END X509 CRL-----").encode())
    return [f"{entry.serial_number:x}" for entry in listed]


@pytest.mark.django_db
def test_the_first_authority_is_made_once() -> None:
    first = authority_ensure(NOW)
    assert authority_ensure(NOW) == first == trust_now()
    assert states() == ["current"]


@pytest.mark.django_db(transaction=True)
def test_many_hosts_that_start_at_once_make_one_authority() -> None:
    made: list[str] = []

    def start() -> None:
        made.append(authority_ensure(NOW).fleet)
        connections.close_all()

    hosts = [threading.Thread(target=start) for _ in range(6)]
    for host in hosts:
        host.start()
    for host in hosts:
        host.join()
    assert len(made) == 6
    assert len(set(made)) == FleetAuthority.objects.count() == 1


@pytest.mark.django_db
def test_no_row_holds_a_key_in_plain_text_and_another_secret_key_opens_none(tmp_path: Path) -> None:
    authority_ensure(NOW)
    row = FleetAuthority.objects.get()
    assert "PRIVATE KEY" not in row.sealed_secret + row.certificate
    authorities._opened.clear()
    with override_settings(SECRET_KEY="another" * 10), pytest.raises(SealedAway, match="SWITCHYARD_SECRET_KEY"):
        signed(tmp_path)
    assert signed(tmp_path).chain


@pytest.mark.django_db
def test_an_agent_gets_its_own_name_and_it_is_recorded(tmp_path: Path) -> None:
    certificate = signed(tmp_path)
    validity = Identity(tmp_path / "n-1").store(
        chain=certificate.chain, bundle=certificate.trust.bundle, revoked=certificate.trust.revoked
    )
    assert (validity.name.kind, validity.name.id, validity.name.fleet) == (NODE, "n-1", certificate.trust.fleet)
    row = IssuedCertificate.objects.get()
    assert (row.serial, row.subject, row.not_after) == (
        f"{leaf(certificate).serial_number:x}",
        "n-1",
        NOW + timedelta(hours=24),
    )
    assert Identity(tmp_path / "n-1").fleet() == certificate.trust.fleet


@pytest.mark.django_db
def test_one_bad_request_keeps_nobody_else_from_a_certificate(tmp_path: Path) -> None:
    request = Identity(tmp_path).signing_request()
    outcomes = certificates_issue(
        [
            CertificateOrder(NODE, "n-1", "no request"),
            CertificateOrder(NODE, "N 2", request),
            CertificateOrder(NODE, "n-3", request),
            CertificateOrder(NODE, "n-4", request, believed="\0"),
            CertificateOrder(NODE, "n-5", request, believed="A" * 64),
        ],
        now=NOW,
    )
    assert [type(outcome) for outcome in outcomes] == [BadRequest, BadName, SignedCertificate, BadRequest, BadRequest]
    assert IssuedCertificate.objects.get().subject == "n-3"


@pytest.mark.django_db
def test_what_is_revoked_is_in_the_list_that_all_are_told(tmp_path: Path) -> None:
    credential("n-1")
    serial = f"{leaf(signed(tmp_path)).serial_number:x}"
    signed(tmp_path, "n-2")
    before = trust_now()
    agent_trust_end(kind="node", subject="n-1", now=NOW)
    after = trust_now()
    assert revoked_serials(before) == []
    assert revoked_serials(after) == [serial]
    assert before
    assert after
    assert (before.version != after.version, before.bundle) == (True, after.bundle)
    assert AgentCredential.objects.get().revoked_at == NOW
    agent_trust_end(kind="node", subject="n-1", now=NOW)
    assert trust_now() == after


@pytest.mark.django_db
def test_whose_credential_was_revoked_gets_no_certificate_though_its_socket_is_open(tmp_path: Path) -> None:
    for subject in ("n-1", "n-2"):
        credential(subject)
    request = Identity(tmp_path).signing_request()
    agent_trust_end(kind="node", subject="n-1", now=NOW)
    orders = [AgentOrder(CertificateOrder(NODE, subject, request), subject, False) for subject in ("n-1", "n-2")]
    refused, issued = agent_certificates_issue(orders, now=NOW)
    assert isinstance(refused, CredentialRevoked)
    assert isinstance(issued, AgentCertificate)
    assert IssuedCertificate.objects.get().subject == "n-2"


@pytest.mark.django_db
def test_a_credential_that_was_shown_with_a_certificate_gets_another_only_with_one(tmp_path: Path) -> None:
    credential("n-1")
    order = CertificateOrder(NODE, "n-1", Identity(tmp_path).signing_request())
    (first,) = agent_certificates_issue([AgentOrder(order, "n-1", False)], now=NOW)
    assert isinstance(first, AgentCertificate)
    credentials_bind(["n-1"], now=NOW)
    later = NOW + CREDENTIAL_RENEWED_AFTER
    refused, renewed = agent_certificates_issue(
        [AgentOrder(order, "n-1", is_certified) for is_certified in (False, True)], now=later
    )
    assert isinstance(refused, CertificateNotShown)
    assert isinstance(renewed, AgentCertificate)
    assert renewed.credential
    [newest] = agents_identify([renewed.credential])
    assert newest is not None
    assert newest.is_bound
    assert newest.is_successor


def _someone_waits_for_a_lock() -> bool:
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_stat_clear_snapshot()")  # a transaction keeps its first snapshot
        cursor.execute(
            "SELECT EXISTS (SELECT FROM pg_stat_activity"
            " WHERE datname = current_database() AND wait_event_type = 'Lock')"
        )
        return bool(cursor.fetchone()[0])


ENDS: dict[str, Callable[[datetime], object]] = {
    "revoked": lambda now: agent_trust_end(kind="node", subject="n-1", now=now),
    "enrolled anew": lambda now: credential_issue(kind="node", subject="n-1", region="r", now=now),
}


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_what_ends_trust_during_the_signing_revokes_what_is_signed_and_renewed(
    end: Callable[[datetime], object], tmp_path: Path
) -> None:
    authority_ensure(NOW)
    credential("n-1")
    later = NOW + CREDENTIAL_RENEWED_AFTER + timedelta(minutes=1)
    order = CertificateOrder(NODE, "n-1", Identity(tmp_path).signing_request())

    def revoke() -> None:
        with transaction.atomic():
            end(later)
        connections.close_all()

    revoking = threading.Thread(target=revoke)
    with transaction.atomic():
        (issued,) = agent_certificates_issue([AgentOrder(order, "n-1", False)], now=later)
        revoking.start()
        assert eventually(lambda: not revoking.is_alive() or _someone_waits_for_a_lock())
    revoking.join()
    assert isinstance(issued, AgentCertificate)
    assert issued.credential
    [renewed] = agents_identify([issued.credential])
    assert renewed is None
    assert revoked_serials(trust_now()) == [IssuedCertificate.objects.get().serial]


@pytest.mark.django_db
def test_no_join_token_of_whose_trust_ended_is_left() -> None:
    for kind, subject in ((AgentKind.NODE, "n-1"), (AgentKind.INGRESS, "n-1"), (AgentKind.NODE, "n-2")):
        join_token_issue(kind=kind, subject=subject, region="r", expires_at=NOW + timedelta(minutes=15))
    agent_trust_end(kind="node", subject="n-1", now=NOW)
    assert set(JoinToken.objects.values_list("kind", "subject")) == {("ingress", "n-1"), ("node", "n-2")}


@pytest.mark.django_db
def test_certificates_that_ended_leave_the_list_and_then_the_table(tmp_path: Path) -> None:
    signed(tmp_path)
    agent_trust_end(kind="node", subject="n-1", now=NOW)
    later = NOW + timedelta(hours=26)
    signed(tmp_path, "n-2", now=later)
    agent_trust_end(kind="node", subject="n-2", now=later)
    row = IssuedCertificate.objects.get(subject="n-2")
    assert revoked_serials(trust_now()) == [row.serial]
    assert certificates_trim(now=NOW + timedelta(days=8, hours=1)) == 1


@pytest.mark.django_db
def test_a_rotation_waits_until_all_believe_the_next_and_until_the_last_certificate_has_ended(tmp_path: Path) -> None:
    for subject in ("n-1", "n-2"):
        credential(subject)
        signed(tmp_path, subject)
    old = authority_ensure(NOW)
    authority_rotate(actor="ada", now=NOW)
    with pytest.raises(Conflict, match="is in rotation already"):
        authority_rotate(actor="ada", now=NOW)
    assert authority_ensure(NOW).bundle.startswith(old.bundle)
    assert authority_advance(now=NOW).unaware == ("node n-1", "node n-2")
    signed(tmp_path, "n-1")
    assert authority_advance(now=NOW).unaware == ("node n-2",)
    assert states() == ["current", "next"]

    signed(tmp_path, "n-2")
    assert authority_advance(now=NOW).done
    assert states() == ["previous", "current"]
    certificate = signed(tmp_path, "n-1")
    second = x509.load_pem_x509_certificates(certificate.trust.bundle.encode())[1]
    leaf(certificate).verify_directly_issued_by(second)

    assert not authority_advance(now=NOW + timedelta(hours=23)).done
    signed(tmp_path, "n-1", now=NOW + timedelta(hours=23))
    assert authority_advance(now=NOW + timedelta(hours=24, seconds=1)).done
    assert states() == ["current"]
    assert Event.objects.filter(kind__startswith="authority.").count() == 3


@pytest.mark.django_db
def test_hosts_are_shown_the_keys_of_the_control_planes_listeners(tmp_path: Path, settings: Any) -> None:
    signed(tmp_path)
    for host in ("a", "b"):
        request = Identity(tmp_path / host).signing_request()
        for _ in range(2):
            certificate_issue(CertificateOrder(IdentityKind.CONTROL, "control", request), now=clock.now())
    pins = server_pin(clock.now()).split(";")
    assert len(pins) == 2
    assert all(pin.startswith("sha256//") for pin in pins)
    settings.PLAIN_LINKS = True
    assert server_pin(clock.now()) == ""


@pytest.mark.django_db
def test_who_left_the_fleet_holds_up_no_rotation_and_force_waits_for_nobody(tmp_path: Path) -> None:
    credential("n-1")
    signed(tmp_path, "n-1")
    signed(tmp_path, "n-gone")
    authority_rotate(actor="ada", now=NOW)
    assert authority_advance(now=NOW).unaware == ("node n-1",)
    assert authority_advance(now=NOW, force=True).done
    assert FleetAuthority.objects.get(state=AuthorityState.CURRENT).pk == FleetAuthority.objects.latest("pk").pk


@pytest.mark.django_db
def test_an_agent_that_asks_without_end_makes_no_long_revocation_list(tmp_path: Path) -> None:
    credential("n-1")
    order = CertificateOrder(NODE, "n-1", Identity(tmp_path).signing_request(), authority_ensure(NOW).bundle_digest)
    refused, said = 0, ""
    for step in range(36):
        try:
            certificate_issue(order, now=NOW + timedelta(minutes=10 * step))
        except TooManyCertificates as error:
            refused, said = refused + 1, str(error)
    assert refused == 36 - 9
    assert said == (
        "node n-1 has 9 valid certificates; it gets another at 18:30:00 UTC, or when the fleet trusts another authority"
    )
    end = NOW + timedelta(hours=6)
    assert signed(tmp_path, "n-2", now=end).chain
    agent_trust_end(kind="node", subject="n-1", now=end)
    assert len(revoked_serials(trust_now())) == 9


@pytest.mark.django_db
def test_requests_of_one_batch_count_and_what_they_claim_to_believe_lets_one_through(tmp_path: Path) -> None:
    bundle, request = authority_ensure(NOW).bundle_digest, Identity(tmp_path).signing_request()
    orders = [CertificateOrder(NODE, "n-1", request, f"{number:064x}") for number in range(4)]
    orders += [
        CertificateOrder(NODE, "n-1", request, believed) for believed in ("a" * 64, bundle, "b" * 64, bundle, "")
    ]
    outcomes = certificates_issue(orders, now=NOW)
    assert [isinstance(outcome, SignedCertificate) for outcome in outcomes[4:]] == [False, True, False, False, False]
    controls = [CertificateOrder(IdentityKind.CONTROL, "control", request)] * 6
    assert all(isinstance(outcome, SignedCertificate) for outcome in certificates_issue(controls, now=NOW))


@pytest.mark.django_db
def test_who_enrols_anew_has_what_it_had_revoked_and_its_list_stays_short(tmp_path: Path) -> None:
    for number in range(MOST_AT_ONCE):
        credential_issue(kind="node", subject="n-1", region="r", now=NOW)
        signed(tmp_path / str(number))
        assert counting_certificates(NOW).filter(subject="n-1").count() == 1
    credential_issue(kind="node", subject="n-1", region="r", now=NOW)
    assert not counting_certificates(NOW).filter(subject="n-1").exists()
    trust = trust_now()
    assert trust is not None
    listed = x509.load_pem_x509_crl(trust.revoked.encode())
    assert {f"{entry.serial_number:x}" for entry in listed} == {
        serial.lstrip("0") for serial in IssuedCertificate.objects.values_list("serial", flat=True)
    }
    with pytest.raises(TooManyCertificates):
        signed(tmp_path / "further")
