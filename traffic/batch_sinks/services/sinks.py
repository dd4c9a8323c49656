"""Creates, changes and deletes sinks of batches, and encrypts their passwords. Each change and its event are one
transaction."""

import json
import ssl
from collections.abc import Mapping
from datetime import datetime
from ipaddress import ip_address
from typing import Any

from cryptography.fernet import InvalidToken
from django.conf import settings as django_settings
from django.db import IntegrityError, transaction

from kernel import live
from kernel.columns import check_columns
from kernel.events import event_record
from kernel.outbound import RefusedUrl, choose_address, parse_networks
from kernel.refusals import Conflict, InvalidInput
from kernel.secrets import secret_box
from kernel.tones import Tone
from traffic.batch_schedules.planner import check_template
from traffic.batch_sinks.models import SETTABLE, BatchDelivery, BatchSink
from traffic.batch_sinks.planner import (
    KEY_NAMES,
    OBJECT_NAMES,
    BadSinkUrl,
    DeliveryState,
    SinkKind,
    parse_valkey_url,
)
from traffic.tenants.models import GrantUse
from traffic.tenants.planner import BadObjectUri, ObjectUri, parse_object_uri
from traffic.tenants.selectors import place_refusal

LONGEST_TTL_S = 366 * 86_400
LEAST_PART_MIB, MOST_PART_MIB = 8, 4096
_PURPOSE = "traffic.batch_sinks"


def batch_sink_create(*, name: str, tenant: str, actor: str, now: datetime, **columns: Any) -> BatchSink:
    """Creates a sink of a tenant. Raises InvalidInput for a field that breaks a rule. Raises Conflict if the name is
    taken."""
    check_columns(BatchSink, name=name, tenant=tenant)
    row = BatchSink(name=name, tenant=tenant, actor=actor[:64], created_at=now, changed_at=now)
    password = columns.pop("password", "")
    _set_columns(row, columns)
    row.sealed_password = _sealed(row, password)
    try:
        with transaction.atomic():
            row.save(force_insert=True)
            _record(row, "created", actor, now)
    except IntegrityError as error:
        raise Conflict(f"there is a sink {name!r} already") from error
    return row


@transaction.atomic
def batch_sink_change(*, name: str, actor: str, now: datetime, **stated: Any) -> BatchSink:
    """Changes stated fields. Another address or user needs the password again. Deliveries that are pending use the new
    ones. Raises InvalidInput for a field that breaks a rule."""
    row = _locked(name)
    if "tenant" in stated and stated.pop("tenant") != row.tenant:
        raise InvalidInput(field="tenant", rule="fixed", message="a sink keeps its tenant: create another one")
    password = stated.pop("password", None)
    before = (row.url, row.username)
    _set_columns(row, stated)
    if password is not None:
        row.sealed_password = _sealed(row, password)
    elif (row.url, row.username) != before:
        row.sealed_password = ""
    row.actor, row.changed_at = actor[:64], now
    row.save()
    _record(row, "changed", actor, now)
    return row


@transaction.atomic
def batch_sink_delete(*, name: str, actor: str, now: datetime) -> None:
    """Deletes a sink with its deliveries. Delivered results stay. Raises Conflict while deliveries are pending."""
    row = _locked(name)
    pending = row.deliveries.filter(state=DeliveryState.PENDING.value).count()
    if pending:
        raise Conflict(f"{pending} deliveries to {name} are pending; wait for them, or cancel their batches")
    if row.requests.filter(delivery=None).exists():
        raise Conflict(f"near-real-time requests name {name}; wait until they are delivered, or cancel them")
    _record(row, "deleted", actor, now)
    row.delete()


@transaction.atomic
def batch_delivery_retry(*, delivery_id: int, actor: str, now: datetime) -> BatchDelivery:
    """Continues a failed delivery where it ended. Raises Conflict if it has not failed."""
    row = BatchDelivery.objects.select_for_update(of=("self",)).select_related("sink", "batch").get(pk=delivery_id)
    if row.state != DeliveryState.FAILED.value:
        raise Conflict(f"the delivery is {row.state}; only a failed one is continued")
    row.state, row.attempts, row.due_at, row.ended_at, row.reason = DeliveryState.PENDING.value, 0, now, None, ""
    row.dead, row.dead_letters = 0, []
    row.save()
    _record(row.sink, "continued", actor, now, f"the delivery of {row.what} is continued by {actor}")
    return row


def _locked(name: str) -> BatchSink:
    row = BatchSink.objects.select_for_update().filter(name=name).first()
    if row is None:
        raise InvalidInput(field="name", rule="exists", message=f"there is no sink {name[:64]!r}")
    return row


def _set_columns(row: BatchSink, columns: Mapping[str, Any]) -> None:
    if unknown := sorted(columns.keys() - set(SETTABLE)):
        raise InvalidInput(field=unknown[0], rule="known", message=f"unknown field {unknown[0]}")
    for column, value in columns.items():
        setattr(row, column, value)
    check_columns(BatchSink, **{column: getattr(row, column) for column in ("kind", "url", "value")})
    if row.kind == SinkKind.S3.value:
        _check_s3(row)
    else:
        _check_valkey(row)
    if not 0 <= row.ttl_s <= LONGEST_TTL_S:
        raise _invalid("ttl_s", f"ttl_s is {row.ttl_s}; it must be 0 to {LONGEST_TTL_S}")
    if not LEAST_PART_MIB <= row.part_mib <= MOST_PART_MIB:
        raise _invalid("part_mib", f"part_mib is {row.part_mib}; it must be {LEAST_PART_MIB} to {MOST_PART_MIB}")


def _check_s3(row: BatchSink) -> None:
    try:
        check_template(row.url, OBJECT_NAMES)
        place = parse_object_uri(_with_names(row.url, dict.fromkeys(OBJECT_NAMES, "x")))
    except (BadObjectUri, ValueError) as error:
        raise _invalid("url", f"url: {error}") from error
    if "{batch}" not in row.url:
        raise _invalid("url", "url needs {batch}, because no object is replaced")
    if refusal := place_refusal(row.tenant, place, GrantUse.WRITE):
        raise _invalid("url", f"url: {refusal}")
    if row.username or row.key_template:
        raise _invalid("key_template", "key_template and username are for Valkey")


def _check_valkey(row: BatchSink) -> None:
    try:
        address = parse_valkey_url(row.url)
        check_template(row.key_template, KEY_NAMES)
    except BadSinkUrl as bad:
        raise _invalid("url", f"url {bad}") from bad
    except ValueError as error:
        raise _invalid("key_template", f"key_template: {error}") from error
    if "{custom_id}" not in row.key_template:
        raise _invalid("key_template", "key_template needs {custom_id}, because each line has its own key")
    try:
        if _is_address(address.host):  # names are checked at each connection
            choose_address(address.target, [address.host], parse_networks(django_settings.WEBHOOK_NETWORKS))
    except RefusedUrl as refused:
        raise _invalid("url", f"url: {str(refused).replace('https', 'TLS (valkeys://)')}") from refused
    if row.ca_pem and not address.tls:
        raise _invalid("ca_pem", "ca_pem needs valkeys://")
    try:
        if row.ca_pem:
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=row.ca_pem)
    except (ssl.SSLError, ValueError) as error:
        raise _invalid("ca_pem", "ca_pem must be certificates in PEM") from error


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def _with_names(text: str, names: Mapping[str, str]) -> str:
    for name, value in names.items():
        text = text.replace(f"{{{name}}}", value)
    return text


def sink_place(row: BatchSink, batch_id: str, created_at: datetime) -> ObjectUri:
    """Returns the prefix of a batch's objects. Its date is that of the batch's creation, in UTC."""
    names = {"batch": batch_id, "tenant": row.tenant, "date": f"{created_at:%Y-%m-%d}"}
    return parse_object_uri(_with_names(row.url, names))


def _sealed(row: BatchSink, password: str) -> str:
    text = json.dumps([row.url, row.username, password])
    return secret_box(_PURPOSE).encrypt(text.encode()).decode() if password else ""


def sink_password(row: BatchSink) -> str:
    """Returns the password, or "" if there is none, or it was encrypted for another address or user, or with another
    SECRET_KEY."""
    try:
        url, username, password = json.loads(secret_box(_PURPOSE).decrypt(row.sealed_password.encode()))
    except (InvalidToken, ValueError, TypeError):
        return ""
    return str(password) if (url, username) == (row.url, row.username) else ""


def _invalid(field: str, message: str) -> InvalidInput:
    return InvalidInput(field=field, rule="valid", message=message)


def _record(row: BatchSink, what: str, actor: str, now: datetime, text: str = "") -> None:
    message = f"sink {row.name} of {row.tenant}: {text or f'{what} by {actor}'}"
    detail = {"sink": row.name, "tenant": row.tenant, "kind": row.kind}
    event_record(kind=f"batch_sink.{what}", message=message, tone=Tone.IDLE, now=now, actor=actor[:64], detail=detail)
    live.push("batches")
