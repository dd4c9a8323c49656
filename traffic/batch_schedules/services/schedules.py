"""Creates, changes, pauses and deletes schedules of batches. Each change and its event are one transaction. Runs are
planned and begun by `runs`."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from django.db import IntegrityError, transaction

from kernel import live
from kernel.columns import check_columns
from kernel.cron import check_cron, time_after, time_zone
from kernel.events import event_record
from kernel.refusals import Conflict, InvalidInput
from kernel.tones import Tone
from traffic.batch_schedules.models import SETTABLE, BatchRun, BatchSchedule
from traffic.batch_schedules.planner import OBJECT_NAMES, TIME_NAMES, Overlap, check_template, expand
from traffic.batch_sinks.selectors import unknown_sinks
from traffic.batches.planning.batch import USUAL_WINDOW, parse_new_batch
from traffic.files.planner import FILE_ID
from traffic.keys.models import ApplicationKey
from traffic.keys.planner import KeyState
from traffic.tenants.models import GrantUse
from traffic.tenants.planner import SCHEME, ApplicationRefused, BadObjectUri, ObjectUri, parse_object_uri
from traffic.tenants.selectors import place_refusal

LONGEST_QUIET_S = 7 * 86_400


def batch_schedule_create(*, name: str, key: str, actor: str, now: datetime, **columns: Any) -> BatchSchedule:
    """Creates a schedule for a key. Raises InvalidInput for a field that breaks a rule. Raises Conflict if the name is
    taken."""
    row = BatchSchedule(
        name=name, key=_active_key(key, now), actor=actor[:64], created_at=now, changed_at=now, checked_until=now
    )
    check_columns(BatchSchedule, name=name)
    _set_columns(row, columns)
    row.next_at = _next_at(row, now)
    try:
        with transaction.atomic():
            row.save(force_insert=True)
            _record(row, "created", f"runs {row.when}, by {actor}", actor, now)
    except IntegrityError as error:
        raise Conflict(f"there is a schedule {name!r} already") from error
    return row


@transaction.atomic
def batch_schedule_change(*, name: str, actor: str, now: datetime, **stated: Any) -> BatchSchedule:
    """Changes stated fields. Times that passed during a pause, or under the former times, have no run. Raises
    InvalidInput for a field that breaks a rule."""
    row = _locked(name)
    key = stated.pop("key", row.key_id)
    before = {column: getattr(row, column) for column in ("key_id", *SETTABLE)}
    if key != row.key_id:
        row.key = _active_key(key, now)
    _set_columns(row, stated)
    changed = sorted(column for column, value in before.items() if getattr(row, column) != value)
    if not changed:
        return row
    if {"cron", "time_zone", "prefix", "paused"} & set(changed):
        row.checked_until, row.next_at = now, _next_at(row, now)
    if "prefix" in changed:
        row.cursor = ""
    row.actor, row.changed_at, row.problem = actor[:64], now, ""
    row.save()
    what = "paused" if changed == ["paused"] and row.paused else "changed"
    what = "resumed" if changed == ["paused"] and not row.paused else what
    named = ", ".join(column.removesuffix("_id") for column in changed)
    _record(row, what, f"{named} changed by {actor}" if what == "changed" else f"{what} by {actor}", actor, now)
    return row


@transaction.atomic
def batch_schedule_delete(*, name: str, actor: str, now: datetime) -> None:
    """Deletes a schedule with its runs. Its batches continue. Raises InvalidInput if there is none."""
    row = _locked(name)
    _record(row, "deleted", f"deleted by {actor}; its batches continue", actor, now)
    row.delete()


@transaction.atomic
def batch_schedule_run(*, name: str, actor: str, now: datetime) -> BatchSchedule:
    """Adds a run for now or, for a prefix, lists it in the next pass. Raises Conflict if it is paused."""
    row = _locked(name)
    if row.paused:
        raise Conflict(f"{name} is paused; resume it first")
    if row.cron:
        BatchRun.objects.get_or_create(schedule=row, due_at=now, uri="")
    else:
        row.next_at = now
        row.save(update_fields=["next_at"])
    _record(row, "requested", f"a run was requested by {actor}", actor, now)
    return row


def _locked(name: str) -> BatchSchedule:
    row = BatchSchedule.objects.select_for_update(of=("self",)).select_related("key").filter(name=name).first()
    if row is None:
        raise InvalidInput(field="name", rule="exists", message=f"there is no schedule {name[:64]!r}")
    return row


def _active_key(prefix: str, now: datetime) -> ApplicationKey:
    key = ApplicationKey.objects.filter(prefix=prefix.removeprefix("sw_")[:16]).first()
    if key is None:
        message = f"there is no key {prefix[:40]!r}; state the prefix that the page of keys shows, such as 0a1b2c3d"
        raise InvalidInput(field="key", rule="exists", message=message)
    if key.state_at(now) is not KeyState.ACTIVE:
        raise InvalidInput(field="key", rule="valid", message=f"the key {prefix[:40]} is {key.state_at(now)}")
    return key


def _next_at(row: BatchSchedule, now: datetime) -> datetime | None:
    if row.paused:
        return None
    return time_after(row.cron, row.time_zone, now) if row.cron else now


def _set_columns(row: BatchSchedule, columns: Mapping[str, Any]) -> None:
    if unknown := sorted(columns.keys() - set(SETTABLE)):
        raise InvalidInput(field=unknown[0], rule="known", message=f"unknown field {unknown[0]}")
    for column, value in columns.items():
        setattr(row, column, value)
    _check_times(row)
    _check_addresses(row)
    check_columns(BatchSchedule, **{column: value for column, value in columns.items() if value not in ("", [])})
    _check_batch(row)
    if unknown := unknown_sinks(row.key.tenant, row.sinks):
        raise _invalid("sinks", f"tenant {row.key.tenant} has no sink {unknown[0]!r}")


def _check_times(row: BatchSchedule) -> None:
    if bool(row.cron) == bool(row.prefix):
        what = "cron and prefix exclude each other" if row.cron else "state cron or prefix"
        raise _invalid("cron", f"{what}: a schedule has times, or a prefix of objects")
    try:
        time_zone(row.time_zone)
    except ValueError as error:
        raise _invalid("time_zone", f"time_zone is {error}") from error
    if row.cron:
        try:
            check_cron(row.cron)
        except ValueError as error:
            raise _invalid("cron", f"cron is {error}") from error
    if row.prefix and row.overlap == Overlap.SKIP.value:
        raise _invalid("overlap", "overlap is skip; an object of a prefix is never skipped, so use wait or allow")
    if row.marker and ("/" in row.marker or not row.marker.isprintable()):
        raise _invalid("marker", "marker is the name of an object in the same folder, or an ending that begins with .")
    if not 0 <= row.quiet_s <= LONGEST_QUIET_S:
        raise _invalid("quiet_s", f"quiet_s is {row.quiet_s}; it must be 0 to {LONGEST_QUIET_S}")


def _check_addresses(row: BatchSchedule) -> None:
    """Every run must be able to use these addresses, so they are checked as those of a run at its change."""
    tenant = row.key.tenant
    if row.prefix and row.input:
        raise _invalid("input", "with a prefix, its objects are the inputs: leave input empty")
    if row.cron and not row.input:
        raise _invalid("input", "input is missing: s3://bucket/in/{date}.jsonl, or the ID of a file")
    watched = _place("prefix", row, tenant, GrantUse.READ, ()) if row.prefix else None
    if row.input.startswith(SCHEME):
        _place("input", row, tenant, GrantUse.READ, TIME_NAMES, is_object=True)
    elif row.input and not FILE_ID.fullmatch(row.input):
        raise _invalid("input", "input must be s3://bucket/key, or the ID of a file, file-…")
    if row.output_uri:
        output = _place("output_uri", row, tenant, GrantUse.WRITE, OBJECT_NAMES if watched else TIME_NAMES)
        if watched and watched.overlaps(output):
            message = "output_uri and prefix overlap: results would become inputs"
            raise _invalid("output_uri", message)


def _place(
    column: str, row: BatchSchedule, tenant: str, use: GrantUse, names: tuple[str, ...], *, is_object: bool = False
) -> ObjectUri:
    try:
        text = getattr(row, column)
        check_template(text, names)
        place = parse_object_uri(expand(text, row.changed_at, row.time_zone, "name"), is_object=is_object)
    except (BadObjectUri, ValueError) as error:
        raise _invalid(column, f"{column}: {error}") from error
    if refusal := place_refusal(tenant, place, use):
        raise _invalid(column, f"{column}: {refusal}")
    return place


def _check_batch(row: BatchSchedule) -> None:
    try:
        parse_new_batch(batch_payload(row, input_file_id=f"file-{'0' * 32}"))
    except ApplicationRefused as refusal:
        field = (refusal.param or "").removeprefix("switchyard.").replace("completion_window", "window")
        raise _invalid(field, str(refusal)) from refusal


def batch_payload(row: BatchSchedule, **members: Any) -> dict[str, Any]:
    """Returns the create request of a batch of this schedule. Members of `switchyard` begin with `ours_`."""
    ours = {"completion_window": row.window, "priority": row.priority, "sinks": row.sinks}
    ours |= {name.removeprefix("ours_"): value for name, value in members.items() if name.startswith("ours_")}
    stated = {name: value for name, value in members.items() if not name.startswith("ours_")}
    return {"endpoint": row.endpoint, "completion_window": USUAL_WINDOW, "switchyard": ours, **stated}


def _invalid(field: str, message: str) -> InvalidInput:
    return InvalidInput(field=field, rule="valid", message=message)


def _record(row: BatchSchedule, what: str, text: str, actor: str, now: datetime) -> None:
    detail = {"schedule": row.name, "tenant": row.key.tenant, "key": row.key_id}
    message = f"schedule {row.name} of {row.key.tenant}: {text}"
    event_record(
        kind=f"batch_schedule.{what}", message=message, tone=Tone.IDLE, now=now, actor=actor[:64], detail=detail
    )
    live.push("batches")
