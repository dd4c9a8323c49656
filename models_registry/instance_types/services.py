"""Keeps instance types: stores the shipped table, makes the row of a shipped type that is named for the first time or
of a machine whose type is unknown, and creates, changes and deletes types. Each change has its event in the same
transaction. A type in use keeps its hardware, because the arguments of running engines follow from it."""

import logging
from dataclasses import asdict, replace
from datetime import datetime
from typing import Any

from django.db import DatabaseError, IntegrityError, transaction
from django.db.models import ProtectedError

from kernel import live
from kernel.columns import check_columns
from kernel.events import event_record
from kernel.refusals import Conflict, InvalidInput
from kernel.tones import Tone
from models_registry.instance_types.models import SETTABLE, InstanceType, Origin
from models_registry.instance_types.planner import (
    INSTANCE_TYPES,
    OF_HARDWARE,
    InstanceShape,
    completed,
    shape_problems,
    unknown_type_text,
)
from models_registry.instance_types.selectors import instance_type_names, type_uses, uses_text

log = logging.getLogger(__name__)


def instance_types_ship() -> int:
    """Stores the shipped types, and updates rows of an earlier release that no operator has changed. Returns how many
    rows it wrote. Runs when a controller starts; errors are logged, because the fleet works with the earlier rows."""
    try:
        with transaction.atomic():
            rows = InstanceType.objects.in_bulk(INSTANCE_TYPES)
            new = [_shipped_row(name) for name in INSTANCE_TYPES if name not in rows]
            InstanceType.objects.bulk_create(new, ignore_conflicts=True)
            shipped = [row for row in rows.values() if row.origin == Origin.SHIPPED]
            outdated = [row.name for row in shipped if row.shape() != INSTANCE_TYPES[row.name]]
            InstanceType.objects.bulk_update([_shipped_row(name) for name in outdated], SETTABLE)
    except DatabaseError as error:
        log.error("the shipped instance types cannot be stored: %s", error)
        return 0
    return len(new) + len(outdated)


def _shipped_row(name: str) -> InstanceType:
    return InstanceType(**asdict(INSTANCE_TYPES[name]), origin=Origin.SHIPPED)


def instance_type_ensure(name: str) -> InstanceType | None:
    """The row of a type; a shipped type gets one when it is first named. None if there is no such type."""
    if name not in INSTANCE_TYPES:
        return InstanceType.objects.filter(name=name).first()
    values = {**asdict(INSTANCE_TYPES[name]), "origin": Origin.SHIPPED}
    return InstanceType.objects.get_or_create(name=name, defaults=values)[0]


def instance_type_named(name: str, *, field: str = "instance_type") -> InstanceType:
    """The instance type that a request names in this field. Raises InvalidInput if it is unknown; the text names a
    similar one."""
    kind = instance_type_ensure(name)
    if kind is None:
        raise InvalidInput(field=field, rule="exists", message=unknown_type_text(name[:64], instance_type_names()))
    return kind


def instance_type_found(shape: InstanceShape, *, machine: str, now: datetime) -> InstanceType:
    """The type of a machine that is of no known type: a row with the hardware that its agent found. Machines with the
    same hardware share it."""
    row, is_new = InstanceType.objects.get_or_create(
        name=shape.name,
        defaults={**asdict(shape), "origin": Origin.FOUND, "changed_by": machine, "changed_at": now},
    )
    if is_new:
        _type_event(row.name, "found", f"on machine {machine}, which is of no known instance type", machine, now)
    return row


def instance_type_create(*, name: str, actor: str, now: datetime, why: str = "", **columns: Any) -> InstanceType:
    """Adds a type. Fields that are left out are those of shipped types with the same accelerator (`completed`). Raises
    InvalidInput for an invalid value, or values that contradict each other. Raises Conflict if the name is taken."""
    check_columns(InstanceType, name=name, **columns)
    if name in INSTANCE_TYPES:
        raise Conflict(f"{name} is a shipped instance type; change it, or choose another name")
    shape = completed(InstanceShape(name=name, **columns), columns)
    _require_sound(shape)
    try:
        with transaction.atomic():
            row = InstanceType.objects.create(
                **asdict(shape), origin=Origin.OPERATOR, changed_by=actor[:64], changed_at=now
            )
            _type_event(name, "created", f"by {actor}", actor, now, why=why)
    except IntegrityError:
        raise Conflict(f"instance type {name} exists already; change it, or choose another name") from None
    return row


@transaction.atomic
def instance_type_change(*, name: str, actor: str, now: datetime, why: str = "", **columns: Any) -> InstanceType:
    """Changes the given fields; does nothing if they are so already. Raises InvalidInput as `instance_type_create`.
    Raises Conflict if the hardware of a type in use would change; the text names the users."""
    check_columns(InstanceType, **columns)
    row = _locked_type(name)
    before = row.shape()
    after = replace(before, **columns)
    if after == before:
        return row
    _require_sound(after)
    _require_unused_for(before, after)
    changes = {column: value for column, value in asdict(after).items() if value != getattr(before, column)}
    _store(row, after, Origin.OPERATOR, actor, now)
    what = ", ".join(f"{column} {getattr(before, column)} → {value}" for column, value in changes.items())
    _type_event(name, "changed", f"by {actor}: {what}", actor, now, why=why)
    return row


@transaction.atomic
def instance_type_delete(*, name: str, actor: str, now: datetime, why: str = "") -> None:
    """Deletes a type that an operator or an agent added. A shipped type that was changed gets its shipped values back.
    Raises Conflict if it is in use or was used, or if it is a shipped type without changes."""
    row = _locked_type(name)
    shipped = INSTANCE_TYPES.get(name)
    if shipped is not None:
        if row.origin == Origin.SHIPPED:
            raise Conflict(f"{name} is shipped with the product and has its shipped values; it cannot be deleted")
        _require_unused_for(row.shape(), shipped)
        _store(row, shipped, Origin.SHIPPED, actor, now)
        _type_event(name, "restored", f"to its shipped values by {actor}", actor, now, why=why)
        return
    if uses := type_uses(name):
        raise Conflict(f"instance type {name} cannot be deleted: it is used by {uses_text(uses)}")
    try:
        with transaction.atomic():
            row.delete()
    except ProtectedError as error:
        kinds = sorted({str(one._meta.verbose_name) for one in error.protected_objects})
        message = f"instance type {name} cannot be deleted: the history of {', '.join(kinds)}s names it"
        raise Conflict(message) from None
    _type_event(name, "deleted", f"by {actor}", actor, now, why=why)


def _locked_type(name: str) -> InstanceType:
    instance_type_named(name, field="name")
    return InstanceType.objects.select_for_update().get(name=name)


def _require_sound(shape: InstanceShape) -> None:
    for problem in shape_problems(shape):
        message = f"{shape.name}: {problem.field.replace('_', ' ')}: {problem.text}"
        raise InvalidInput(field=problem.field, rule="hardware", message=message)


def _require_unused_for(before: InstanceShape, after: InstanceShape) -> None:
    """Engines' arguments follow from the hardware."""
    changed = [name for name in OF_HARDWARE if getattr(before, name) != getattr(after, name)]
    if changed and (uses := type_uses(before.name)):
        message = f"{before.name} is used by {uses_text(uses)}, so {', '.join(changed)} cannot change; add another type"
        raise Conflict(message)


def _store(row: InstanceType, shape: InstanceShape, origin: Origin, actor: str, now: datetime) -> None:
    for column, value in asdict(shape).items():
        setattr(row, column, value)
    row.origin, row.changed_by, row.changed_at = origin, actor[:64], now
    row.save()


def _type_event(name: str, what: str, how: str, actor: str, now: datetime, why: str = "") -> None:
    message = f"instance type {name} was {what} {how}" + (f": {why}" if why else "")
    event_record(kind=f"instance_type.{what}", message=message, tone=Tone.IDLE, now=now, actor=actor[:64])
    live.push("instance-types")
