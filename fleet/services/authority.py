"""The fleet's certificate authorities: made at the first start, opened to sign, rotated, and their revocation lists
signed anew. A private key is plain text only in a process that signs.
"""

import base64
import logging
import secrets
from dataclasses import dataclass
from datetime import datetime, timedelta

from cryptography.fernet import Fernet, InvalidToken
from django.db import IntegrityError, connection, transaction
from django.utils.crypto import salted_hmac

from fleet.models import FleetAuthority, IssuedCertificate
from fleet.planning.authority import AuthorityState, Drop, Promote, plan_rotation
from fleet.selectors.trust import Trust, authority_views, revoked_serials, trust_now, unaware_holders
from kernel import live
from kernel.authority import Authority, authority_load, authority_make, revocations_sign
from kernel.events import event_record
from kernel.refusals import Conflict
from kernel.tones import Tone

_LOCK = 0x53595F4341
"""Of everything that changes authorities or revocation lists ("SY_CA"), so that no host overwrites another's list."""


CERTIFICATES_KEPT = timedelta(days=7)
"""After they ended, so that who had one can still be seen."""

log = logging.getLogger(__name__)


class SealedAway(Exception):
    """An authority's key cannot be opened with this SECRET_KEY."""


_opened: dict[str, Authority] = {}


def authority_ensure(now: datetime) -> Trust:
    """What the fleet believes; its first authority is made if there is none. Any number of hosts may call it."""
    trust = trust_now()
    if trust is None:
        with transaction.atomic():
            _lock()
            if not FleetAuthority.objects.exists():
                _create(f"f-{secrets.token_hex(4)}", AuthorityState.CURRENT, now)
        trust = trust_now()
    if trust is None:
        raise IntegrityError("the fleet's authority was made and is not there")
    return trust


def authority_open(row: FleetAuthority) -> Authority:
    """The authority of a row, with its key.

    Raises:
        SealedAway: it was sealed under another SECRET_KEY.
    """
    if row.identifier not in _opened:
        try:
            key_pem = _box().decrypt(row.sealed_secret.encode())
        except InvalidToken:
            raise SealedAway(
                f"the key of {row} was sealed under another SWITCHYARD_SECRET_KEY: set that one again, or make a new"
                " authority with `manage.py ca_rotate`"
            ) from None
        _opened[row.identifier] = authority_load(row.certificate, key_pem)
    return _opened[row.identifier]


def authority_rotate(*, actor: str, now: datetime) -> FleetAuthority:
    """Make the next authority. Everybody is told of it at once; it signs nothing until all believe it.

    Raises:
        Conflict: there is one already.
    """
    with transaction.atomic():
        _lock()
        there = FleetAuthority.objects.filter(state=AuthorityState.NEXT).first()
        if there is not None:
            raise Conflict(f"{there} is on its way already, since {there.state_since:%Y-%m-%d %H:%M:%S} UTC")
        current = FleetAuthority.objects.get(state=AuthorityState.CURRENT)
        row = _create(current.fleet, AuthorityState.NEXT, now)
        event_record(
            kind="authority.made", message=f"{row} was made by {actor}; agents hear of it", now=now, tone=Tone.MOVING
        )
        live.push_trust()
    return row


@dataclass(frozen=True, slots=True)
class RotationStep:
    """What an advance did: each step as a sentence; and who does not believe the next authority yet."""

    done: tuple[str, ...]
    unaware: tuple[str, ...]


def authority_advance(*, now: datetime, force: bool = False) -> RotationStep:
    """Take the steps of a rotation that are due. `force`: the next authority signs though not all believe it; who does
    not must join anew."""
    with transaction.atomic():
        _lock()
        trust = trust_now()
        if trust is None:
            return RotationStep((), ())
        unaware = tuple(unaware_holders(trust.bundle_digest, now))
        steps = plan_rotation(authority_views(now), () if force else unaware, now)
        for step in steps:
            _apply(step, now)
        done = tuple(f"authority {step.id}: {step.reason}" for step in steps)
    return RotationStep(done, unaware)


def rotation_states() -> list[AuthorityState]:
    """The states of the authorities that there are."""
    return [AuthorityState(state) for state in FleetAuthority.objects.values_list("state", flat=True)]


def _apply(step: Promote | Drop, now: datetime) -> None:
    row = FleetAuthority.objects.get(pk=step.id)
    if isinstance(step, Promote):
        FleetAuthority.objects.filter(state=AuthorityState.CURRENT).update(
            state=AuthorityState.PREVIOUS, state_since=now
        )
        FleetAuthority.objects.filter(pk=step.id).update(state=AuthorityState.CURRENT, state_since=now)
        message = f"{row} signs from now on: {step.reason}"
    else:
        row.delete()
        message = f"{row} is believed no longer: {step.reason}"
    event_record(kind="authority.rotated", message=message, now=now, tone=Tone.OK)
    live.push_trust()


def revocation_lists_sign(now: datetime) -> None:
    """Sign the revocation list of every authority anew, in the transaction that changed what they must name. One whose
    key is sealed away keeps its list, and that is logged: what else the transaction does must not wait for it."""
    _lock()
    for row in FleetAuthority.objects.all():
        try:
            authority = authority_open(row)
        except SealedAway as error:
            log.error("a revocation is in no list: %s", error)
            continue
        row.revoked_number += 1
        row.revoked = revocations_sign(authority, revoked_serials(row.pk, now), row.revoked_number)
        row.save(update_fields=["revoked", "revoked_number"])
    live.push_trust()


def certificates_trim(*, now: datetime) -> int:
    """Forget certificates that ended long ago. Returns how many."""
    return IssuedCertificate.objects.filter(not_after__lt=now - CERTIFICATES_KEPT).delete()[0]


def _create(fleet: str, state: AuthorityState, now: datetime) -> FleetAuthority:
    made = authority_make(fleet, now)
    return FleetAuthority.objects.create(
        fleet=fleet,
        state=state,
        identifier=made.identifier,
        certificate=made.certificate_pem,
        sealed_secret=_box().encrypt(made.key_pem).decode(),
        revoked=revocations_sign(made, (), 1),
        created_at=now,
        state_since=now,
    )


def _lock() -> None:
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(%s)", [_LOCK])


def _box() -> Fernet:
    return Fernet(base64.urlsafe_b64encode(salted_hmac("fleet.authority", "", algorithm="sha256").digest()))
