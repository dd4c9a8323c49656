"""Join commands for hosts, enrolment of agents, their credentials and certificates, and the attestation of cloud
machines. A join token is bound to one agent, short-lived, and exchanged once for a credential. A machine that a cloud
launched proves its identity without a secret and receives a ticket: an invitation for that machine and one nonce, with
which it joins like any host. The nonce stays the same for the machine's life: other processes on the machine can sign
too, but get nothing."""

import hashlib
import hmac
import ipaddress
import logging
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec
from django.conf import settings
from django.db import connection, transaction

from engine_agent.protocol.identity import BadName, name_of_peer
from engine_agent.protocol.states import AgentKind
from fleet.agents.planner import Caller, Proof, ProofRefused, check_proof, read_caller, read_proof
from fleet.agents.selectors import server_pin
from fleet.agents.services.authority import CertificateOrder, SignedCertificate, certificates_issue, credentials_revoke
from fleet.clouds.aws.identity import StsUnavailable, caller_arn, sts_host, sts_url
from fleet.clouds.models import CloudRegion, LaunchAttempt
from fleet.machines.models import Invitation, Machine
from fleet.machines.planner import ENDED, has_machine_agent
from fleet.nodes.models import AgentCredential, JoinToken
from fleet.reconcile.planning.states import MachineRole, MachineState
from kernel import clock
from kernel.events import event_record
from kernel.outside_transaction import refuse_inside_transaction, run_outside_transaction
from kernel.secrets import secret_issue_again, secret_matches, secret_prefix, secret_row_create
from kernel.tones import Tone


class JoinLine(NamedTuple):
    """`text`: the command to run. `notices`: sentences about problems for hosts."""

    text: str
    notices: tuple[str, ...]


def join_line(token: str) -> JoinLine:
    """Returns the command for a host. curl checks the pinned key even if it does not know the certificate's signer."""
    url, pin = settings.AGENT_URLS[0], server_pin(clock.now())
    trust = f"-fsSLk --pinnedpubkey '{pin}'" if pin else "-fsSL"
    return JoinLine(f"curl {trust} {url}/join | sh -s -- {token}", tuple(_join_notices(url)))


def _join_notices(url: str) -> list[str]:
    host = urlsplit(url).hostname or ""
    try:
        is_own = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_own = host == "localhost"
    if not is_own:
        return []
    return [f"{url} is reachable only on this computer; set SWITCHYARD_AGENT_URL to one that the hosts reach."]


_JOIN_TOKENS = "fleet.join_tokens"
"""Salt: the same token can be shown again while SECRET_KEY is unchanged."""
JOIN_TOKENS_KEPT = timedelta(days=7)
"""After expiry: until then errors say "expired" instead of "unknown"."""

CREDENTIAL_RENEWED_AFTER = timedelta(hours=11)
"""Less than half of a certificate's life: each renewed certificate brings a new credential."""
COMMITTED_LATE = 500
"""Credentials that may be in concurrent transactions."""

_REVOKED = """
SELECT shown.prefix FROM unnest(%s::text[]) AS shown (prefix)
LEFT JOIN fleet_agentcredential AS known ON known.prefix = shown.prefix AND known.revoked_at IS NULL
WHERE known.id IS NULL
"""
_SHOWN = """
SELECT shown.prefix, shown.digest, shown.kind, shown.subject, shown.region, shown.bound_at IS NOT NULL, EXISTS (
    SELECT FROM fleet_agentcredential AS older WHERE older.kind = shown.kind AND older.subject = shown.subject
    AND older.id < shown.id AND older.revoked_at IS NULL
)
FROM fleet_agentcredential AS shown WHERE shown.prefix = ANY(%s) AND shown.revoked_at IS NULL
"""
_REPLACED = """
UPDATE fleet_agentcredential AS older SET revoked_at = %s FROM fleet_agentcredential AS shown
WHERE shown.prefix = ANY(%s) AND older.kind = shown.kind AND older.subject = shown.subject
AND older.id < shown.id AND older.revoked_at IS NULL
"""
_NONCE = re.compile(r"[0-9a-f]{32,128}")
PEER_CERTIFICATE = "peer_certificate"
"""ASGI scope key: the client certificate that TLS verified, as `ssl` decodes it; None or absent without one."""

log = logging.getLogger(__name__)


class EnrolmentRefused(Exception):
    """The token does not allow this enrolment; the text says why."""


class CredentialRevoked(Exception):
    """The credential of a certificate request is revoked."""


class CertificateNotShown(Exception):
    """The credential is valid only with the agent's certificate, which was not presented."""


@dataclass(frozen=True, slots=True)
class AgentIdentity:
    """The agent of a connection. `is_bound`: its credential is valid only with a certificate.
    `is_successor`: an earlier credential of the agent is still valid."""

    kind: AgentKind
    id: str
    region: str
    prefix: str
    is_bound: bool = False
    is_successor: bool = False


def certificate_is_of(certificate: Any, identity: AgentIdentity) -> bool:
    """Whether a certificate, as `ssl` decodes it, belongs to the credential's agent. TLS has checked authority and
    revocation. It may have expired: the key still proves an agent that was off for long."""
    try:
        name = name_of_peer(certificate)
    except BadName as error:
        log.warning("refused %s %s: %s", identity.kind, identity.id, error)
        return False
    if (name.kind.value, name.id) != (identity.kind.value, identity.id):
        log.warning("refused a credential of %s %s with the certificate of %s", identity.kind, identity.id, name)
        return False
    return True


def certificate_missing(identity: AgentIdentity) -> str:
    """Returns why a credential without a certificate is rejected and how to fix it, or ""."""
    if not identity.is_bound or settings.PLAIN_LINKS:
        return ""
    return (
        f"the credential of {identity.kind} {identity.id} is valid only with the agent's certificate, and none was "
        "presented; an agent that has lost its certificate must join again"
    )


def join_token_issue(*, kind: AgentKind, subject: str, region: str, expires_at: datetime) -> str:
    """Returns the join token of the agent `subject`. Its text is stored only by the agent. An unused one is returned
    again with a later expiry, because a waiting launch is repeated every minute."""
    own = {"kind": kind.value, "subject": subject, "region": region}
    with transaction.atomic():
        unused = JoinToken.objects.select_for_update().filter(**own, used_at__isnull=True).order_by("-id").first()
        if unused is not None:
            known = secret_issue_again(_JOIN_TOKENS, unused.prefix)
            if hmac.compare_digest(known.digest, unused.digest):
                JoinToken.objects.filter(pk=unused.pk).update(expires_at=max(expires_at, unused.expires_at))
                return known.text
        issue = partial(secret_issue_again, _JOIN_TOKENS)
        return secret_row_create(JoinToken, issue, **own, expires_at=expires_at)[1]


def agent_enrol(*, token: str, kind: str, subject: str, nonce: str, now: datetime, certificate: Any = None) -> str:
    """Exchanges a join token for a credential and revokes older credentials of the agent.

    The first user of a token may repeat the exchange until the token expires, because the response may have been lost:
    `nonce` is random, kept by the agent, and sent with every try. Another holder of the token gets no credential and
    cannot revoke the agent's. A machine sends its credential, with its `certificate` (as `ssl` decodes it), in place of
    a token. Raises EnrolmentRefused if it is unknown, expired, issued for another agent, or used with another or an
    invalid nonce."""
    by_machine = agents_identify([token])[0]
    if by_machine is not None and by_machine.kind is AgentKind.MACHINE:
        refusal = certificate_missing(by_machine) if certificate is None else ""
        if refusal or (certificate is not None and not certificate_is_of(certificate, by_machine)):
            raise EnrolmentRefused(refusal or f"the presented certificate is not {by_machine.id}'s")
        return _enrol_by_machine(by_machine, kind, subject, now)
    with transaction.atomic():
        row = JoinToken.objects.select_for_update().filter(prefix=secret_prefix(token) or "").first()
        if row is None or not secret_matches(token, row.digest):
            raise EnrolmentRefused("unknown join token")
        if row.expires_at <= now:
            raise EnrolmentRefused(f"the join token expired at {row.expires_at:%Y-%m-%d %H:%M:%S} UTC")
        if (row.kind, row.subject) != (kind, subject):
            raise EnrolmentRefused(f"the join token is for {row.kind} {row.subject}, not for {kind} {subject}")
        _bind_nonce(row, nonce)
        row.used_at = now
        row.save(update_fields=["used_at", "nonce_digest"])
        return credential_issue(kind=kind, subject=subject, region=row.region, now=now)


def _enrol_by_machine(machine: AgentIdentity, kind: str, subject: str, now: datetime) -> str:
    """A machine enrols the agent that it was ordered to run by its own credential, so that no join token is
    sent to it."""
    with transaction.atomic():
        row = Machine.objects.select_for_update().get(id=machine.id)
        is_served = has_machine_agent(row.provider) and row.state == MachineState.TAKEN and row.revoked_at is None
        has_node = kind == AgentKind.NODE and row.slots.filter(runs=subject, state=MachineState.TAKEN).exists()
        if not is_served or ((row.role, row.runs) != (kind, subject) and not has_node):
            raise EnrolmentRefused(f"{machine.id} has no order to run {kind} {subject}")
        return credential_issue(kind=kind, subject=subject, region=row.region_id, now=now)


def credential_issue(*, kind: str, subject: str, region: str, now: datetime) -> str:
    """Returns a new credential, in the caller's transaction. Revokes the agent's older credentials and certificates: an
    agent that enrols again has lost them, or another process has them."""
    credentials_revoke(kind=kind, subject=subject, now=now)
    return secret_row_create(AgentCredential, kind=kind, subject=subject, region=region, created_at=now)[1]


def _bind_nonce(row: JoinToken, nonce: str) -> None:
    if not _NONCE.fullmatch(nonce):
        raise EnrolmentRefused(
            "nonce must be 32 to 128 hexadecimal digits that the agent generated at random and keeps"
        )
    digest = hashlib.sha256(nonce.encode()).hexdigest()
    if row.nonce_digest and not hmac.compare_digest(row.nonce_digest, digest):
        raise EnrolmentRefused(f"the join token was used by another process already; {row.subject} needs a new one")
    row.nonce_digest = digest


def join_tokens_trim(*, now: datetime) -> int:
    """Deletes tokens that expired long ago, used or not. Returns how many."""
    return JoinToken.objects.filter(expires_at__lt=now - JOIN_TOKENS_KEPT).delete()[0]


def agents_identify(credentials: Sequence[str]) -> list[AgentIdentity | None]:
    """Returns the agent of each credential; None if unknown or revoked. One query."""
    prefixes = {secret_prefix(credential) or "" for credential in credentials}
    with connection.cursor() as cursor:
        cursor.execute(_SHOWN, [list(prefixes)])
        known = {prefix: row for prefix, *row in cursor.fetchall()}
    return [_agent_identity(credential, known) for credential in credentials]


def credentials_replaced(prefixes: list[str], *, now: datetime) -> int:
    """Revokes the predecessors of these credentials: they were presented, so their agents have them. Returns
    how many."""
    with connection.cursor() as cursor:
        cursor.execute(_REPLACED, [now, prefixes])
        return int(cursor.rowcount)


def credentials_bind(prefixes: Sequence[str], *, now: datetime) -> None:
    """From now on these credentials are valid only with their agent's certificate, because each was presented
    with one."""
    AgentCredential.objects.filter(prefix__in=prefixes, bound_at__isnull=True).update(bound_at=now)


@dataclass(frozen=True, slots=True)
class AgentOrder:
    """A certificate request over a connection with the credential of this prefix; `is_certified`: and with its
    certificate."""

    order: CertificateOrder
    prefix: str
    is_certified: bool


@dataclass(frozen=True, slots=True)
class AgentCertificate:
    """The answer to a request. `credential`: a newer one, if the current one is old enough."""

    certificate: SignedCertificate
    credential: str | None


def agent_certificates_issue(orders: Sequence[AgentOrder], *, now: datetime) -> list[AgentCertificate | Exception]:
    """Signs the requests of agents. Returns certificates or the exception for each: `CredentialRevoked`,
    `CertificateNotShown`, `BadRequest` or `BadName`.

    A concurrent revocation waits, and then also revokes what was issued here. Raises SealedAway if the key of the
    current authority cannot be decrypted."""
    prefixes = {one.prefix for one in orders}
    with transaction.atomic():
        rows = AgentCredential.objects.select_for_update().filter(prefix__in=prefixes, revoked_at__isnull=True)
        counting = {row.prefix: row for row in rows.order_by("pk")}
        refusals = [_order_refusal(one, counting.get(one.prefix)) for one in orders]
        allowed = [one.order for one, refusal in zip(orders, refusals, strict=True) if refusal is None]
        signed = iter(certificates_issue(allowed, now=now))
        outcomes: list[AgentCertificate | Exception] = []
        for one, refusal in zip(orders, refusals, strict=True):
            outcome = refusal or next(signed)
            if isinstance(outcome, Exception):
                outcomes.append(outcome)
            else:
                outcomes.append(AgentCertificate(outcome, _renew_credential(counting[one.prefix], now)))
    return outcomes


def _order_refusal(wanted: AgentOrder, credential: AgentCredential | None) -> Exception | None:
    if credential is None:
        return CredentialRevoked(f"the credential of {wanted.order.subject} was revoked")
    if credential.bound_at is not None and not wanted.is_certified:
        return CertificateNotShown(f"{wanted.order.subject} did not present its certificate, and gets no new one")
    return None


def _renew_credential(row: AgentCredential, now: datetime) -> str | None:
    """A new credential if this one is old enough. Both are valid until the new one is presented."""
    if row.created_at > now - CREDENTIAL_RENEWED_AFTER:
        return None
    return secret_row_create(
        AgentCredential, kind=row.kind, subject=row.subject, region=row.region, created_at=now, bound_at=row.bound_at
    )[1]


def _agent_identity(credential: str, known: Mapping[str, list[Any]]) -> AgentIdentity | None:
    prefix = secret_prefix(credential) or ""
    if prefix not in known:
        return None
    digest, kind, subject, region, is_bound, is_successor = known[prefix]
    if not secret_matches(credential, digest):
        return None
    return AgentIdentity(AgentKind(kind), subject, region, prefix, is_bound=is_bound, is_successor=is_successor)


def credential_prefixes(newest: int) -> tuple[int, list[str]]:
    """Returns the prefixes of credentials newer than `newest`, as returned by an earlier call, and the newest now.
    Includes some older ones: transactions may commit out of order."""
    rows = AgentCredential.objects.filter(pk__gt=newest - COMMITTED_LATE, revoked_at__isnull=True)
    found = list(rows.values_list("pk", "prefix"))
    return max((pk for pk, _ in found), default=newest), [prefix for _, prefix in found]


def credentials_revoked(prefixes: list[str]) -> set[str]:
    """Returns those of these credentials that are no longer valid."""
    with connection.cursor() as cursor:
        cursor.execute(_REVOKED, [prefixes])
        return {prefix for (prefix,) in cursor.fetchall()}


TICKET_FOR = timedelta(minutes=15)
RETRY_AFTER_S = 10
AT_ONCE = 16
"""Of one web process; each waits for STS."""
WAIT_S = 3.0

_asking = threading.BoundedSemaphore(AT_ONCE)


class NotYet(Exception):
    """It cannot be decided now, but soon; the text names the cause."""


def machine_attest(body: bytes, *, now: datetime) -> str:
    """Returns the ticket of the machine that sent this proof. Calls STS outside transactions. Raises BadProof if it is
    malformed. Raises ProofRefused if it is rejected, or its machine may not join. Raises NotYet if STS does not answer,
    or the machine's launch is not recorded yet."""
    proof = read_proof(body)
    check_proof(proof, servers=servers(), sts_host=sts_host(proof.region), now=now)
    regions = list(CloudRegion.objects.filter(aws_region=proof.region))
    if not regions:
        raise ProofRefused(f"no region of this fleet is in {proof.region}")
    caller = read_caller(run_outside_transaction(("sts", body), lambda: _sts_caller(proof)))
    roles = {row.region_id: role for row in regions if (role := _machine_role(row, caller)) is not None}
    if not roles:
        raise ProofRefused(
            f"role {caller.role} of account {caller.account} is not a role of this fleet in {proof.region}"
        )
    with transaction.atomic():
        rows = Machine.objects.select_for_update().filter(provider=caller.provider, provider_id=caller.instance)
        machine = rows.first()
        if machine is None:
            raise _unknown_machine(proof, caller)
        _check_may_join(machine, proof, roles.get(machine.region_id))
        return _ticket_issue(machine, proof, now)


def _sts_caller(proof: Proof) -> str:
    """Outside transactions: senders of proofs would hold database connections."""
    refuse_inside_transaction("a question to STS")
    if not _asking.acquire(timeout=WAIT_S):
        raise NotYet("too many attestations; try again")
    try:
        return caller_arn(proof, sts_url(proof.region))
    except StsUnavailable as silence:
        raise NotYet(str(silence)) from None
    finally:
        _asking.release()


def servers() -> frozenset[str]:
    """This control plane's names as machines know them, in lower case. Proofs for other names are rejected."""
    return frozenset(urlsplit(url).netloc.lower() for url in settings.AGENT_URLS)


def _machine_role(region: CloudRegion, caller: Caller) -> MachineRole | None:
    """The role of machines with this IAM role; None if the region's stack has another account or other roles."""
    try:
        base = region.stated_base()
    except msgspec.ValidationError:
        return None
    if base.account != caller.account:
        return None
    known = {base.node_role: MachineRole.NODE, base.ingress_role: MachineRole.INGRESS}
    return known.get(caller.role)


def _unknown_machine(proof: Proof, caller: Caller) -> Exception:
    """A machine may boot before its launch is recorded, or the answer was lost."""
    if LaunchAttempt.objects.filter(unit=proof.unit, ended_at=None).exists():
        return NotYet(f"the launch of {caller.instance} is not recorded yet")
    return ProofRefused(f"{caller.instance} was not launched by this fleet")


def _check_may_join(machine: Machine, proof: Proof, role: MachineRole | None) -> None:
    name = f"{machine.provider_id} ({machine.id})"
    if role is None or role != machine.role:
        raise ProofRefused(f"{name} is a {machine.role} in {machine.region_id}, which has another role")
    if machine.state == MachineState.GONE or machine.cloud_state in ENDED:
        raise ProofRefused(f"{name} has ended")
    if machine.revoked_at is not None or machine.leaving:
        raise ProofRefused(f"{name} was revoked or removed")
    if not machine.address:
        raise NotYet(f"the address of {name} is not known yet")
    if machine.address != proof.address:
        raise ProofRefused(f"{name} has the address {machine.address}, and the proof states {proof.address}")
    if machine.nonce_digest and machine.nonce_digest != proof.nonce_digest:
        raise ProofRefused(f"{name} has attested itself already, with another nonce")


def _ticket_issue(machine: Machine, proof: Proof, now: datetime) -> str:
    if not machine.nonce_digest:
        machine.nonce_digest = proof.nonce_digest
        machine.save(update_fields=["nonce_digest"])
        message = f"{machine.id} attested that it is {machine.provider_id} and joins {machine.region_id}"
        event_record(
            kind="machine.attested", message=message, tone=Tone.MOVING, now=now, region=machine.region_id,
            node=machine.runs if machine.role == MachineRole.NODE else "",
        )  # fmt: skip
    machine.tickets.all().delete()
    return secret_row_create(
        Invitation,
        region_id=machine.region_id,
        role=machine.role,
        instance_type_id=machine.instance_type_id,
        count=1,
        left=1,
        created_by=machine.provider_id,
        created_at=now,
        expires_at=now + TICKET_FOR,
        machine=machine,
        proof_digest=proof.nonce_digest,
    )[1]
