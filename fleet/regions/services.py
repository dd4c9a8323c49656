"""Sets and removes certificates of applications, opens incidents before they expire, and creates, changes and deletes
regions. No event contains a key. Machines follow later: the reconciler keeps the warm spares of a region."""

import hashlib
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from django.db import IntegrityError, connection, transaction
from django.db.models import ProtectedError

from engine_agent.protocol.identity import is_identity_id
from engine_agent.protocol.ports import region_of_same_ingress
from engine_agent.protocol.states import PlainHttp
from fleet.agents.models import ApplicationCertificate
from fleet.clouds.base import ProviderError, provider_named
from fleet.clouds.planning.alarms import parse_alarms
from fleet.clouds.services.regions import AWS, cloud_columns, cloud_region_add
from fleet.faults.models import Incident
from fleet.faults.services.incidents import incident_open, incidents_close
from fleet.machines.planner import CLOUDS, LOCAL, InvalidWarmSpares, parse_warm_spares
from fleet.reconcile.planning.states import IncidentState
from fleet.regions.models import Region
from fleet.regions.planner import ENDS_NOW, ENDS_SOON, BadCertificate, ReadCertificate, certificate_read, ending
from fleet.regions.selectors import certificates_of, is_sealed_now, key_box
from kernel import live, wake_ups
from kernel.constraints import InvalidField
from kernel.events import event_record
from kernel.refusals import Conflict, InvalidInput
from kernel.tones import Tone
from models_registry.instance_types.services import instance_type_named

NAME_LENGTH_MAX = 40
MOST = 32
"""Certificates of a fleet: every ingress loads those of its region one by one."""
_LOCK = 0x53595F544C53
"""Taken by every change of certificates ("SY_TLS"), because each is compared with all others."""


def application_certificate_set(
    *, name: str, certificate: str, private_key: str, actor: str, now: datetime, region: str = ""
) -> ApplicationCertificate:
    """Adds a certificate, or replaces the one with this name. `region` empty: all regions, or unchanged. Raises
    InvalidInput for a bad name, no such region, or an invalid certificate (`certificate_read`). Raises Conflict if it
    belongs to another region, another certificate has the same host, or there are `MOST`."""
    if len(name) > NAME_LENGTH_MAX or not is_identity_id(name):
        message = f"a certificate's name has 1 to {NAME_LENGTH_MAX} lower-case letters, digits, - and _, such as api"
        raise InvalidInput(field="name", rule="name", message=message)
    try:
        read = certificate_read(certificate, private_key, now)
    except BadCertificate as wrong:
        raise InvalidInput(field=wrong.field, rule=wrong.rule, message=str(wrong)) from None
    with transaction.atomic():
        application_certificates_lock()
        row = ApplicationCertificate.objects.filter(name=name).first()
        is_new = row is None
        row = row or ApplicationCertificate(name=name, region=_region(region), created_at=now)
        if region and row.region_id != region:
            raise Conflict(
                f"{row} is of {row.region_id or 'all regions'}: remove it there first, or choose another name"
            )
        _require_room(row, read)
        digest = hashlib.sha256(read.chain.encode()).hexdigest()
        if row.digest == digest and is_sealed_now(row.sealed_secret):
            return row
        _fill_certificate(row, read, digest, actor, now)
        row.save()
        where = row.region_id or "all regions"
        _record_certificate(
            "set" if is_new else "rotated",
            f"{row} of {where} set by {actor}: {', '.join(row.names[:5])}, until {row.not_after:%Y-%m-%d}",
            row,
            actor,
            now,
        )
        application_certificates_check(now=now)
    return row


def application_certificate_remove(*, name: str, actor: str, now: datetime) -> None:
    """Removes a certificate. Open connections continue. Raises Conflict if a region that refuses plain HTTP would have
    none left."""
    with transaction.atomic():
        application_certificates_lock()
        row = ApplicationCertificate.objects.get(name=name)
        regions = Region.objects.exclude(plain_http=PlainHttp.SERVE.value).order_by("name")
        for region in regions.filter(name=row.region_id) if row.region_id else regions:
            if not certificates_of(region.name).exclude(pk=row.pk).exists():
                raise Conflict(
                    f"{row} is the last one of {region.name}, which refuses plain HTTP and could serve no request."
                    " Set its plain_http to serve first"
                )
        row.delete()
        _record_certificate("removed", f"{row} of {row.region_id or 'all regions'} removed by {actor}", row, actor, now)
        application_certificates_check(now=now)


def application_certificates_check(*, now: datetime) -> None:
    """Opens an incident for each certificate that expires within 14 days and another within a day, and closes those
    that are over."""
    with transaction.atomic():
        due = {row.name: (ending(row.not_after, now), row) for row in ApplicationCertificate.objects.all()}
        for kind in (ENDS_SOON, ENDS_NOW):
            for name, (is_due, row) in due.items():
                if is_due == kind:
                    incident_open(
                        kind=kind,
                        subject=name,
                        summary=f"{row} ends at {row.not_after:%Y-%m-%d %H:%M} UTC: set its next one",
                        evidence={"names": row.names, "not_after": row.not_after.isoformat()},
                        now=now,
                        region=row.region_id or "",
                    )
            still = [name for name, (is_due, _) in due.items() if is_due == kind]
            for subject in _open_subjects(kind) - set(still):
                is_due = due[subject][0] if subject in due else None
                resolution = "less than a day is left" if is_due else "it was replaced or removed"
                incidents_close(resolution=resolution, now=now, kind=kind, subject=subject)


def _open_subjects(kind: str) -> set[str]:
    return set(Incident.objects.filter(kind=kind, state=IncidentState.OPEN.value).values_list("subject", flat=True))


def _region(name: str) -> Region | None:
    if not name:
        return None
    row = Region.objects.filter(name=name).first()
    if row is None:
        there = ", ".join(Region.objects.values_list("name", flat=True)) or "none"
        raise InvalidInput(field="region", rule="exists", message=f"there is no region {name!r}; there are: {there}")
    return row


def _require_room(row: ApplicationCertificate, read: ReadCertificate) -> None:
    others = ApplicationCertificate.objects.exclude(name=row.name)
    if row._state.adding and others.count() >= MOST:
        raise Conflict(f"there are {MOST} certificates, which is the limit: remove or replace one")
    for other in others:
        if row.region_id and other.region_id and row.region_id != other.region_id:
            continue
        if both := sorted(set(read.names) & set(other.names)):
            where = other.region_id or "all regions"
            raise Conflict(f"{other} of {where} has the host {both[0]} already: replace or remove it")


def _fill_certificate(
    row: ApplicationCertificate, read: ReadCertificate, digest: str, actor: str, now: datetime
) -> None:
    row.chain, row.digest, row.fingerprint = read.chain, digest, read.fingerprint
    row.sealed_secret = key_box().encrypt(read.private_key.encode()).decode()
    row.names, row.issuer, row.key_kind = list(read.names), read.issuer, read.key_kind
    row.not_before, row.not_after = read.not_before, read.not_after
    row.actor, row.changed_at = actor[:64], now


def _record_certificate(what: str, message: str, row: ApplicationCertificate, actor: str, now: datetime) -> None:
    event_record(
        kind=f"certificate.{what}",
        message=message,
        tone=Tone.OK,
        now=now,
        actor=actor[:64],
        region=row.region_id or "",
        detail={"certificate": row.name, "names": row.names[:20], "fingerprint": row.fingerprint},
    )
    live.push("traffic")
    live.push_table(row.region_id or "")


def application_certificates_lock() -> None:
    """Until the caller's transaction ends, no other process changes a certificate or relies on one."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(%s)", [_LOCK])


"""Its ingresses are called i-NAME or i-NAME-N, and their names stand in certificates (ID_LENGTH_MAX)."""
NAMED_MOST = 3
"""Names of each kind in the error of a deletion."""
CHANGEABLE = ("position", "ingress_url", "spares", "plain_http", "cheapest_first", "grpc", "alarms")


def region_create(*, name: str, columns: Mapping[str, Any], actor: str, now: datetime) -> Region:
    """Adds a region without machines. `columns`: of `CHANGEABLE`, `provider`, and for a cloud its `stack`, which is
    read later. Raises InvalidInput for a name that certificates cannot have, an unknown provider or instance type,
    invalid spares, or no stack for a cloud. Raises Conflict if the name is taken, or its ingresses' names would be."""
    if len(name) > NAME_LENGTH_MAX or not is_identity_id(name):
        message = f"a region's name has 1 to {NAME_LENGTH_MAX} lower-case letters, digits, - and _, such as eu-west-1"
        raise InvalidInput(field="name", rule="name", message=message)
    _check(columns)
    _check_pools(columns.get("provider", ""), columns)
    if columns.get("provider", LOCAL) == LOCAL:
        _check_ingress_names(name)
    plain = dict(columns)
    cloud = cloud_columns(name, plain)
    try:
        with transaction.atomic():
            _require_certificate(name, plain)
            region = Region.objects.create(name=name, **plain)
            if cloud:
                cloud_region_add(region, cloud, now)
            _region_event(region, "created", actor, now, columns)
    except IntegrityError:
        raise Conflict(f"region {name!r} exists already") from None
    return region


def _check_ingress_names(name: str) -> None:
    others = Region.objects.filter(provider=LOCAL).exclude(name=name).values_list("name", flat=True)
    if (other := region_of_same_ingress(name, others)) is not None:
        raise Conflict(
            f"region {name!r} and region {other!r} of this provider would each have an ingress called "
            f"i-{max(name, other, key=len)}: choose another name"
        )


def region_change(*, name: str, columns: Mapping[str, Any], actor: str, now: datetime) -> Region:
    """Changes the given columns of `CHANGEABLE`. Unchanged values have no effect. Raises InvalidInput for an unknown
    instance type, invalid spares, or a fixed column."""
    _check(columns)
    with transaction.atomic():
        _require_certificate(name, columns)
        region = Region.objects.select_for_update().get(name=name)
        _check_pools(region.provider, columns)
        changed = {column: value for column, value in columns.items() if getattr(region, column) != value}
        if fixed := sorted(set(changed) - set(CHANGEABLE)):
            message = f"{fixed[0]} of a region cannot change; changeable: {', '.join(CHANGEABLE)}"
            raise InvalidInput(field=fixed[0], rule="fixed", message=message)
        for column, value in changed.items():
            setattr(region, column, value)
        if changed:
            region.save(update_fields=list(changed))
            _region_event(region, f"changed ({', '.join(sorted(changed))})", actor, now, changed)
    return region


def region_delete(*, name: str, actor: str, now: datetime) -> None:
    """Deletes a region that was never used, with its routing tables, which every region has from its start. A region
    with a history stays, without cells and spares. Raises Conflict if it is or was used; the text names by what."""
    with transaction.atomic():
        region = Region.objects.select_for_update().get(name=name)
        try:
            with transaction.atomic():
                region.delete()
        except ProtectedError as error:
            kinds: dict[str, list[str]] = {}
            for row in error.protected_objects:
                kinds.setdefault(str(row._meta.verbose_name), []).append(str(row.pk))
            there = ", ".join(f"{len(keys)} x {kind} ({_named_keys(keys)})" for kind, keys in sorted(kinds.items()))
            message = f"region {name} cannot be deleted: it has or had {there}. Scale deployments there and spares to 0"
            raise Conflict(message) from None
        _region_event(Region(name=name), "deleted", actor, now, {})


def _named_keys(keys: list[str]) -> str:
    shown = ", ".join(sorted(keys)[:NAMED_MOST])
    return f"{shown}, …" if len(keys) > NAMED_MOST else shown


def _check(columns: Mapping[str, Any]) -> None:
    if "provider" in columns:
        try:
            provider_named(columns["provider"])
        except ProviderError as error:
            raise InvalidInput(field="provider", rule="exists", message=str(error)) from None
    try:
        parse_alarms(columns.get("alarms", []))
    except InvalidField as wrong:
        raise InvalidInput(field=wrong.field, rule="alarms", message=str(wrong)) from None
    spares = columns.get("spares", {})
    try:
        parse_warm_spares(spares)
    except InvalidWarmSpares as wrong:
        raise InvalidInput(field="spares", rule="spares", message=str(wrong)) from None
    for kind in spares:
        instance_type_named(kind, field=f"spares.{kind}")


def _check_pools(provider: str, columns: Mapping[str, Any]) -> None:
    if columns.get("alarms") and provider not in CLOUDS:
        message = f"only a region of provider {' or '.join(sorted(CLOUDS))} has alarms of CloudWatch"
        raise InvalidInput(field="alarms", rule="provider", message=message)
    if columns.get("cheapest_first") and provider != AWS:
        message = f"only a region of provider {AWS} has pools of capacity"
        raise InvalidInput(field="cheapest_first", rule="provider", message=message)


def _require_certificate(region: str, columns: Mapping[str, Any]) -> None:
    if columns.get("plain_http", PlainHttp.SERVE) == PlainHttp.SERVE:
        return
    application_certificates_lock()
    if not certificates_of(region).exists():
        message = f"{region} has no certificate for applications, so it could serve no request: add one first"
        raise InvalidInput(field="plain_http", rule="certificate", message=message)


def _region_event(region: Region, what: str, actor: str, now: datetime, columns: Mapping[str, Any]) -> None:
    event_record(
        kind=f"region.{what.partition(' ')[0]}",
        message=f"region {region.name} {what} by {actor}",
        tone=Tone.MOVING,
        now=now,
        actor=actor,
        region=region.name,
        detail=dict(columns),
    )
    live.push("nodes")
    if "plain_http" in columns:
        live.push_table(region.name)
    wake_ups.send("fleet.reconcile")
