"""Describes regions. Machines follow: the reconciler keeps the warm spares that a region states."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from django.db import IntegrityError, transaction
from django.db.models import ProtectedError

from engine_agent.protocol.identity import is_identity_id
from engine_agent.protocol.states import PlainHttp
from fleet.models import InstanceType, Region
from fleet.planning.placement.warm_spares import InvalidWarmSpares, parse_warm_spares
from fleet.providers import provider_named
from fleet.providers.base import ProviderError
from fleet.selectors.application_certificate import certificates_of
from fleet.services.application_certificate import application_certificates_lock
from fleet.services.cloud_region import AWS, cloud_columns, cloud_region_add
from kernel import live, wake_ups
from kernel.events import event_record
from kernel.refusals import Conflict, InvalidInput
from kernel.tones import Tone

NAME_LENGTH_MAX = 40
"""Its ingresses are called i-NAME or i-NAME-N, and their names stand in certificates (ID_LENGTH_MAX)."""
NAMED_MOST = 3
"""Of what keeps a region from being deleted, of each kind."""
CHANGEABLE = ("position", "ingress_url", "spares", "plain_http", "cheapest_first")


def region_create(*, name: str, columns: Mapping[str, Any], actor: str, now: datetime) -> Region:
    """Add a region, without machines. `columns` are of `CHANGEABLE`, `provider`, and what a cloud needs: its `stack`
    is read later.

    Raises:
        InvalidInput: a name that its ingresses' certificates could not have, an unknown provider or instance type,
            invalid spares, or no stack for a cloud.
        Conflict: the name is taken.
    """
    if len(name) > NAME_LENGTH_MAX or not is_identity_id(name):
        message = f"a region's name has 1 to {NAME_LENGTH_MAX} lower-case letters, digits, - and _, such as eu-west-1"
        raise InvalidInput(field="name", rule="name", message=message)
    _check(columns)
    _check_pools(columns.get("provider", ""), columns)
    plain = dict(columns)
    cloud = cloud_columns(name, plain)
    try:
        with transaction.atomic():
            _require_certificate(name, plain)
            region = Region.objects.create(name=name, **plain)
            if cloud:
                cloud_region_add(region, cloud, now)
            _record(region, "created", actor, now, columns)
    except IntegrityError:
        raise Conflict(f"there is a region {name!r} already") from None
    return region


def region_change(*, name: str, columns: Mapping[str, Any], actor: str, now: datetime) -> Region:
    """Change what is given of `CHANGEABLE`; what is set to what it is already is no change.

    Raises:
        InvalidInput: an unknown instance type, invalid spares, or a column that does not change.
    """
    _check(columns)
    with transaction.atomic():
        _require_certificate(name, columns)
        region = Region.objects.select_for_update().get(name=name)
        _check_pools(region.provider, columns)
        changed = {column: value for column, value in columns.items() if getattr(region, column) != value}
        if fixed := sorted(set(changed) - set(CHANGEABLE)):
            message = f"{fixed[0]} of a region does not change; what does: {', '.join(CHANGEABLE)}"
            raise InvalidInput(field=fixed[0], rule="fixed", message=message)
        for column, value in changed.items():
            setattr(region, column, value)
        if changed:
            region.save(update_fields=list(changed))
            _record(region, f"changed ({', '.join(sorted(changed))})", actor, now, changed)
    return region


def region_delete(*, name: str, actor: str, now: datetime) -> None:
    """Remove a region that nothing was ever part of, with its routing tables: each region has one from its first
    second. What has a history stays, with no cells and no spares.

    Raises:
        Conflict: something is or was there; what it is, is named.
    """
    with transaction.atomic():
        region = Region.objects.select_for_update().get(name=name)
        try:
            with transaction.atomic():
                region.delete()
        except ProtectedError as error:
            kinds: dict[str, list[str]] = {}
            for row in error.protected_objects:
                kinds.setdefault(str(row._meta.verbose_name), []).append(str(row.pk))
            there = ", ".join(f"{len(keys)} x {kind} ({_some(keys)})" for kind, keys in sorted(kinds.items()))
            message = f"region {name} is not deleted: it has, or had, {there}. Scale deployments there and spares to 0"
            raise Conflict(message) from None
        _record(Region(name=name), "deleted", actor, now, {})


def _some(keys: list[str]) -> str:
    shown = ", ".join(sorted(keys)[:NAMED_MOST])
    return f"{shown}, …" if len(keys) > NAMED_MOST else shown


def _check(columns: Mapping[str, Any]) -> None:
    if "provider" in columns:
        try:
            provider_named(columns["provider"])
        except ProviderError as error:
            raise InvalidInput(field="provider", rule="exists", message=str(error)) from None
    spares = columns.get("spares", {})
    try:
        parse_warm_spares(spares)
    except InvalidWarmSpares as wrong:
        raise InvalidInput(field="spares", rule="spares", message=str(wrong)) from None
    there = set(InstanceType.objects.values_list("name", flat=True)) if spares else set()
    if unknown := sorted(set(spares) - there):
        message = f"there is no instance type {unknown[0]!r}; there are: {', '.join(sorted(there)) or 'none'}"
        raise InvalidInput(field=f"spares.{unknown[0]}", rule="exists", message=message)


def _check_pools(provider: str, columns: Mapping[str, Any]) -> None:
    if columns.get("cheapest_first") and provider != AWS:
        message = f"only a region of provider {AWS} has pools of capacity to choose from"
        raise InvalidInput(field="cheapest_first", rule="provider", message=message)


def _require_certificate(region: str, columns: Mapping[str, Any]) -> None:
    if columns.get("plain_http", PlainHttp.SERVE) == PlainHttp.SERVE:
        return
    application_certificates_lock()
    if not certificates_of(region).exists():
        message = f"{region} has no certificate for applications, so nobody would be served: set one first"
        raise InvalidInput(field="plain_http", rule="certificate", message=message)


def _record(region: Region, what: str, actor: str, now: datetime, columns: Mapping[str, Any]) -> None:
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
