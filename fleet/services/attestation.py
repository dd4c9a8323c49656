"""Lets machines join that a cloud launched for us, by a proof of which machine they are and without a secret: a proof
buys a ticket, an invitation for that one machine and that one nonce, with which it joins as any host does.

A machine proves itself with one nonce for as long as it is there: whatever else runs on it later can sign as well, and
gets nothing for it.
"""

import threading
from datetime import datetime, timedelta
from urllib.parse import urlsplit

import msgspec
from django.conf import settings
from django.db import transaction

from fleet.models import CloudRegion, Invitation, LaunchAttempt, Machine
from fleet.planning.attestation import Caller, Proof, ProofRefused, check_proof, read_caller, read_proof
from fleet.planning.presence import ENDED
from fleet.planning.states import MachineRole, MachineState
from fleet.providers.aws.caller_identity import StsSilent, caller_arn, sts_host, sts_url
from kernel.events import event_record
from kernel.outside_transaction import refuse_inside_transaction, run_outside_transaction
from kernel.secrets import secret_issue
from kernel.tones import Tone

PROVIDER = "aws"
TICKET_FOR = timedelta(minutes=15)
RETRY_AFTER_S = 10
AT_ONCE = 16
"""Of one web process, each of which waits for STS."""
WAIT_S = 3.0

_asking = threading.BoundedSemaphore(AT_ONCE)


class NotYet(Exception):
    """It cannot be judged now, and soon can; the text says what is missing."""


def machine_attest(body: bytes, *, now: datetime) -> str:
    """The ticket of the machine that sent this proof. Asks STS; no transaction is open meanwhile.

    Raises:
        BadProof: it is no proof.
        ProofRefused: it proves nothing to us, or that of a machine that may not join.
        NotYet: STS does not answer, or the launch of the machine is not noted yet.
    """
    proof = read_proof(body)
    check_proof(proof, servers=servers(), sts_host=sts_host(proof.region), now=now)
    regions = list(CloudRegion.objects.filter(aws_region=proof.region))
    if not regions:
        raise ProofRefused(f"no region of this fleet is in {proof.region}")
    caller = read_caller(run_outside_transaction(("sts", body), lambda: _asked_sts(proof)))
    roles = {row.region_id: role for row in regions if (role := _role(row, caller)) is not None}
    if not roles:
        raise ProofRefused(f"role {caller.role} of account {caller.account} is none of this fleet's in {proof.region}")
    with transaction.atomic():
        rows = Machine.objects.select_for_update().filter(provider=PROVIDER, provider_id=caller.instance)
        machine = rows.first()
        if machine is None:
            raise _unknown(proof, caller)
        _check_may_join(machine, proof, roles.get(machine.region_id))
        return _ticket(machine, proof, now)


def _asked_sts(proof: Proof) -> str:
    """Whose keys signed. Not inside a transaction: whoever sends proofs would hold connections to the database."""
    refuse_inside_transaction("a question to STS")
    if not _asking.acquire(timeout=WAIT_S):
        raise NotYet("many machines prove themselves at this moment; try again")
    try:
        return caller_arn(proof, sts_url(proof.region))
    except StsSilent as silence:
        raise NotYet(str(silence)) from None
    finally:
        _asking.release()


def servers() -> frozenset[str]:
    """What machines know us by, in lower case: a proof for anybody else is none for us."""
    return frozenset(urlsplit(url).netloc.lower() for url in settings.AGENT_URLS)


def _role(region: CloudRegion, caller: Caller) -> MachineRole | None:
    """What machines of this role are in a region; None: its stack has another account, or other roles."""
    try:
        base = region.stated_base()
    except msgspec.ValidationError:
        return None
    if base.account != caller.account:
        return None
    known = {base.node_role: MachineRole.NODE, base.ingress_role: MachineRole.INGRESS}
    return known.get(caller.role)


def _unknown(proof: Proof, caller: Caller) -> Exception:
    """A machine may be up before the answer of its launch is noted, or that answer was lost."""
    if LaunchAttempt.objects.filter(unit=proof.unit, ended_at=None).exists():
        return NotYet(f"the launch of {caller.instance} is not noted yet")
    return ProofRefused(f"{caller.instance} is no machine that this fleet launched")


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
        raise ProofRefused(f"{name} has the address {machine.address}, and says {proof.address}")
    if machine.nonce_digest and machine.nonce_digest != proof.nonce_digest:
        raise ProofRefused(f"{name} has proved itself already, with another nonce")


def _ticket(machine: Machine, proof: Proof, now: datetime) -> str:
    if not machine.nonce_digest:
        machine.nonce_digest = proof.nonce_digest
        machine.save(update_fields=["nonce_digest"])
        message = f"{machine.id} proved that it is {machine.provider_id}, and joins {machine.region_id}"
        event_record(
            kind="machine.attested", message=message, tone=Tone.MOVING, now=now, region=machine.region_id,
            node=machine.runs if machine.role == MachineRole.NODE else "",
        )  # fmt: skip
    machine.tickets.all().delete()
    issued = secret_issue()
    Invitation.objects.create(
        prefix=issued.prefix,
        digest=issued.digest,
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
    )
    return issued.text
