"""Plans the runs of schedules and begins those that wait. A run and its batch are created in one transaction, so a time
or an object has one batch, however often a pass is repeated. Any number of passes may run at the same time.

Prefixes are listed outside of transactions. A listing may be lost or repeated: objects that have a run are ignored."""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Any

from django.db import transaction

from fleet.clouds.aws import calls
from fleet.clouds.aws.calls import CallFailed
from kernel import live
from kernel.events import event_record
from kernel.tones import Tone
from traffic.batch_schedules.models import BatchRun, BatchSchedule
from traffic.batch_schedules.planner import (
    ListedObject,
    MissedRuns,
    Overlap,
    RunState,
    ScheduleSettings,
    expand,
    marker_of,
    object_name,
    plan_objects,
    plan_run,
    plan_times,
)
from traffic.batch_schedules.services.schedules import batch_payload
from traffic.batches.models import OPEN_STATES, Batch
from traffic.batches.planning.batch import parse_new_batch
from traffic.batches.services.batch import batch_create, batch_settings
from traffic.files.services.store import store_error_text
from traffic.tenants.models import GrantUse
from traffic.tenants.planner import SCHEME, ApplicationRefused, ObjectUri, parse_object_uri
from traffic.tenants.selectors import application_with, place_grant_for, place_refusal

SETTINGS = ScheduleSettings()
AT_ONCE = 200
"""Schedules per pass."""
BEGUN_AT_ONCE = 100
"""Runs of a schedule per pass."""
OF_THE_RUN = frozenset({400, 404})
"""Statuses of refusals that concern the run itself. With others, such as a revoked key or a limit, it waits."""

log = logging.getLogger(__name__)


def schedules_run(*, now: datetime, settings: ScheduleSettings = SETTINGS) -> int:
    """Makes one pass over all schedules. Returns the number of batches created. An error of one schedule does not stop
    the others."""
    for name in _due(now).exclude(cron="").values_list("name", flat=True)[:AT_ONCE]:
        _guarded(name, partial(_plan_times, name, now, settings))
    for name in _due(now).exclude(prefix="").values_list("name", flat=True)[:AT_ONCE]:
        _guarded(name, partial(_plan_objects, name, now, settings))
    waiting = BatchRun.objects.filter(state=RunState.WAITING.value, schedule__paused=False)
    names = list(waiting.order_by("schedule").values_list("schedule", flat=True).distinct()[:AT_ONCE])
    return sum(_guarded(name, partial(_begin_waiting, name, now, settings)) for name in names)


def _guarded(name: str, step: Callable[[], int | None]) -> int:
    try:
        return int(step() or 0)
    except Exception:
        log.exception("the pass over schedule %s failed; the next one repeats it", name)
        return 0


def _due(now: datetime) -> Any:
    return BatchSchedule.objects.filter(next_at__lte=now, paused=False).order_by("next_at")


def _locked(name: str) -> BatchSchedule | None:
    """Returns the schedule, unless another pass works on it or it was paused."""
    rows = BatchSchedule.objects.select_for_update(skip_locked=True, of=("self",)).select_related("key")
    return rows.filter(name=name, paused=False).first()


@transaction.atomic
def _plan_times(name: str, now: datetime, settings: ScheduleSettings) -> None:
    row = _locked(name)
    if row is None or not row.cron:
        return
    plan = plan_times(row.cron, row.time_zone, MissedRuns(row.missed), row.checked_until, now, settings)
    room = settings.waiting_most - row.runs.filter(state=RunState.WAITING.value).count()
    runs = [BatchRun(schedule=row, due_at=at) for at in plan.due[: max(0, room)]]
    full = f"{settings.waiting_most} runs wait already"
    runs += [_ended_run(row, at, RunState.SKIPPED, full) for at in plan.due[max(0, room) :]]
    late = "no control plane made this run in time"
    runs += [_ended_run(row, at, RunState.MISSED, late) for at in plan.missed]
    BatchRun.objects.bulk_create(runs, ignore_conflicts=True)
    if plan.missed:
        _record(
            row,
            "missed",
            f"{len(plan.missed)} times were missed, the last at {plan.missed[-1]:%Y-%m-%d %H:%M} UTC",
            now,
        )
    row.checked_until, row.next_at = now, plan.next_at
    row.save(update_fields=["checked_until", "next_at"])
    kept = row.runs.values_list("pk", flat=True)[settings.runs_kept : settings.runs_kept + BEGUN_AT_ONCE]
    row.runs.filter(pk__in=list(kept)).exclude(state=RunState.WAITING.value).delete()
    live.push("batches")


def _ended_run(row: BatchSchedule, at: datetime, state: RunState, reason: str) -> BatchRun:
    return BatchRun(schedule=row, due_at=at, state=state.value, reason=reason)


@dataclass(frozen=True, slots=True)
class Listing:
    """Objects of a part of a prefix, after the key `start`; it ends with `cursor`, "" for the end of the prefix."""

    objects: tuple[ListedObject, ...]
    start: str
    cursor: str

    @property
    def is_whole(self) -> bool:
        return not self.start and not self.cursor


def _plan_objects(name: str, now: datetime, settings: ScheduleSettings) -> None:
    """Lists a prefix that is due. The first statement takes this listing from other passes."""
    later = now + timedelta(seconds=settings.list_every_s)
    if not _due(now).filter(name=name).update(next_at=later):
        return
    row = BatchSchedule.objects.select_related("key").get(name=name)
    place = parse_object_uri(row.prefix)
    grant = place_grant_for(row.key.tenant, place, GrantUse.READ)
    if grant is None:
        _note_problem(row, place_refusal(row.key.tenant, place, GrantUse.READ))
        return
    try:
        listing = prefix_list(grant.region, place, row.cursor, settings)
        present = {each.key for each in listing.objects}
        if row.marker and not listing.is_whole:
            present |= _markers(grant.region, place, listing, row.marker, present, settings)
    except CallFailed as failed:
        _note_problem(row, f"{row.prefix}: {store_error_text(failed)}")
        return
    ready = plan_objects(listing.objects, present, row.marker, row.quiet_s, now)
    _store_objects(row, place, ready, listing.cursor, now)


def prefix_list(region: str, place: ObjectUri, start: str, settings: ScheduleSettings) -> Listing:
    """Lists the objects below a prefix after the key `start`, in a limited number of pages. Raises CallFailed."""
    arguments: dict[str, Any] = {"Bucket": place.bucket, "Prefix": f"{place.key}/" if place.key else ""}
    arguments["MaxKeys"] = settings.page_objects
    arguments |= {"StartAfter": start} if start else {}
    objects: list[ListedObject] = []
    for _ in range(settings.list_pages):
        page = calls.call("s3", "ListObjectsV2", region, **arguments)
        objects += (
            ListedObject(each["Key"], each["ETag"].strip('"'), each["LastModified"])
            for each in page.get("Contents", ())
        )
        if not page.get("IsTruncated"):
            return Listing(tuple(objects), start, "")
        arguments["ContinuationToken"] = page["NextContinuationToken"]
    return Listing(tuple(objects), start, objects[-1].key if objects else "")


def _markers(
    region: str, place: ObjectUri, listing: Listing, marker: str, present: set[str], settings: ScheduleSettings
) -> set[str]:
    """Looks up markers that another part of the listing may have."""
    wanted = dict.fromkeys(marker_of(each.key, marker) for each in listing.objects if each.key.endswith(".jsonl"))
    found: set[str] = set()
    for key in [each for each in wanted if each not in present][: settings.markers_most]:
        first = calls.call("s3", "ListObjectsV2", region, Bucket=place.bucket, Prefix=key, MaxKeys=1)
        found.update(each["Key"] for each in first.get("Contents", ()))
    return found


@transaction.atomic
def _store_objects(
    row: BatchSchedule, place: ObjectUri, ready: Iterable[ListedObject], cursor: str, now: datetime
) -> None:
    """Adds a run for each object that has none in this version."""
    found = [(f"{SCHEME}{place.bucket}/{each.key}", each.etag) for each in ready]
    known = set(row.runs.filter(uri__in=[uri for uri, _ in found]).values_list("uri", "etag"))
    runs = [BatchRun(schedule=row, due_at=now, uri=uri, etag=etag) for uri, etag in found if (uri, etag) not in known]
    BatchRun.objects.bulk_create(runs, ignore_conflicts=True)
    BatchSchedule.objects.filter(name=row.name, prefix=row.prefix).update(cursor=cursor, checked_until=now, problem="")
    if runs:
        live.push("batches")


@transaction.atomic
def _begin_waiting(name: str, now: datetime, settings: ScheduleSettings) -> int:
    """Creates batches of waiting runs, oldest first. Returns their number."""
    row = _locked(name)
    if row is None:
        return 0
    begun, open_batches = 0, Batch.objects.filter(run__schedule=row, state__in=OPEN_STATES).count()
    for run in row.runs.filter(state=RunState.WAITING.value).order_by("due_at", "uri", "id")[:BEGUN_AT_ONCE]:
        order = plan_run(Overlap(row.overlap), open_batches, settings)
        if order.is_skipped:
            _end_run(run, RunState.SKIPPED, order.reason)
        elif not order.begins:
            break
        elif _begin_run(row, run, now):
            begun, open_batches = begun + 1, open_batches + 1
        elif run.state == RunState.WAITING.value:
            break
    return begun


def _begin_run(row: BatchSchedule, run: BatchRun, now: datetime) -> bool:
    """Creates the batch of a run. A refusal that concerns the run ends it; with others it waits."""
    try:
        with transaction.atomic():
            batch = batch_create(
                application=application_with(row.key, now),
                asked=parse_new_batch(_payload(row, run)),
                region=row.region,
                now=now,
                settings=batch_settings(),
            )
            if run.etag:
                Batch.objects.filter(id=batch.id).update(input_etag=run.etag)
    except ApplicationRefused as refusal:
        reason = str(refusal)
        if refusal.status in OF_THE_RUN:
            _end_run(run, RunState.FAILED, reason)
            _record(row, "failed", f"the run of {run.due_at:%Y-%m-%d %H:%M} UTC could not begin: {reason}", now)
        _note_problem(row, reason)
        return False
    run.state, run.batch, run.started_at, run.reason = RunState.STARTED.value, batch, now, ""
    run.save(update_fields=["state", "batch", "started_at", "reason"])
    BatchSchedule.objects.filter(name=row.name).exclude(problem="").update(problem="")
    return True


def _payload(row: BatchSchedule, run: BatchRun) -> dict[str, Any]:
    source = run.uri or expand(row.input, run.due_at, row.time_zone)
    name = object_name(run.uri)
    members: dict[str, Any] = {"metadata": {"schedule": row.name, "due_at": run.due_at.isoformat()}}
    members |= {"ours_input_uri": source} if source.startswith(SCHEME) else {"input_file_id": source}
    if row.output_uri:
        members["ours_output_uri"] = expand(row.output_uri, run.due_at, row.time_zone, name)
    return batch_payload(row, **members)


def _end_run(run: BatchRun, state: RunState, reason: str) -> None:
    run.state, run.reason = state.value, reason
    run.save(update_fields=["state", "reason"])
    live.push("batches")


def _note_problem(row: BatchSchedule, problem: str) -> None:
    if BatchSchedule.objects.filter(name=row.name).exclude(problem=problem).update(problem=problem):
        live.push("batches")


def _record(row: BatchSchedule, what: str, text: str, now: datetime) -> None:
    detail = {"schedule": row.name, "tenant": row.key.tenant}
    message = f"schedule {row.name} of {row.key.tenant}: {text}"
    event_record(kind=f"batch_schedule.{what}", message=message, tone=Tone.WARN, now=now, detail=detail)
