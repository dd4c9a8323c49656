"""Creates, cancels, moves and trims batches, samples their progress, and takes steps for those behind their deadline.
Each move is one statement that names the initial state, so of concurrent moves only one applies. Each step and its
event are written in one transaction. Any number of processes may run these services. It never reads the file store."""

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from django.conf import settings as django_settings
from django.db import transaction
from django.db.models import Exists, OuterRef, QuerySet

from fleet.webhooks.services import webhooks_notify
from kernel import live
from kernel.events import event_record
from kernel.tones import Tone
from traffic.async_requests.selectors import serving_region
from traffic.batch_sinks.models import BatchDelivery
from traffic.batch_sinks.selectors import unknown_sinks
from traffic.batches.models import OPEN_STATES, Batch, BatchRange, BatchTimeline, StoredFile
from traffic.batches.planning.batch import (
    ALLOWED,
    ENDED,
    STAMPS,
    USUAL_WINDOW,
    BatchSettings,
    BatchState,
    LineError,
    NewBatch,
    batch_not_found,
    cancel_refusal,
    deadline_refusal,
)
from traffic.batches.planning.pacing import Pace, PaceStep, add_sample, plan_paces
from traffic.batches.selectors import (
    STEP_FIELDS,
    batch_budgets,
    batch_of,
    batches_paced,
    lines_ahead,
    measured_rate,
    open_batches,
    stored_file_of,
    tallies,
)
from traffic.files.planner import FilePurpose
from traffic.tenants.models import GrantUse
from traffic.tenants.planner import QUOTA_USED_UP, ApplicationRefused, BatchEvent
from traffic.tenants.selectors import Application, s3_grant_check
from traffic.tenants.services import tenant_webhooks_notify

BATCHES = "batches"
FORGOTTEN_AT_ONCE = 500


def batch_settings() -> BatchSettings:
    return BatchSettings(max_lines=django_settings.BATCH_LINES)


@transaction.atomic
def batch_create(
    *, application: Application, asked: NewBatch, region: str, now: datetime, settings: BatchSettings
) -> Batch:
    """Creates a batch. Its lines are validated later, and errors are shown with it. Raises ApplicationRefused if the
    tenant has no such file, has reached a limit, or may not use an S3 address."""
    if application.over_quota:
        why = "You exceeded your current quota: the budget of this month is used up"
        raise ApplicationRefused(429, QUOTA_USED_UP, why, kind=QUOTA_USED_UP)
    if open_batches(application.tenant) >= settings.max_open_per_tenant:
        most = settings.max_open_per_tenant
        raise ApplicationRefused(429, "too_many_open", f"{most} batches are open already; retry after one has ended")
    if unknown := unknown_sinks(application.tenant, asked.sinks):
        message = f"there is no sink `{unknown[0]}`; an admin can create one for the tenant"
        raise ApplicationRefused(400, "sink_not_found", message, "switchyard.sinks")
    file = _input_file(application, asked, now)
    place = serving_region(region)
    if place is None:
        raise ApplicationRefused(503, "no_routing_table", "no region serves yet; retry shortly")
    if file is not None:
        _check_deadline(file, place, asked, now)
    live.push("batches")
    batch = Batch.objects.create(
        tenant=application.tenant,
        key=application.key,
        region_id=place,
        lines_by_model={file.model: file.lines} if file and file.model else {},
        lines=file.lines if file else 0,
        endpoint=asked.endpoint,
        input_file_id=file.id if file else "",
        input_uri=str(asked.input_uri or ""),
        output_uri=str(asked.output_uri or ""),
        output_kept_s=asked.output_kept_s,
        window=asked.window or USUAL_WINDOW,
        priority=asked.priority,
        metadata=asked.metadata,
        created_at=now,
        expires_at=asked.expires_at(now),
    )
    BatchDelivery.objects.bulk_create(BatchDelivery(batch=batch, sink_id=name, due_at=now) for name in asked.sinks)
    return batch


def _input_file(application: Application, asked: NewBatch, now: datetime) -> StoredFile | None:
    """Returns the input file; None for an object, which validation reads."""
    if asked.output_uri is not None:
        s3_grant_check(application.tenant, asked.output_uri, GrantUse.WRITE, "output_uri")
    if asked.input_uri is not None:
        s3_grant_check(application.tenant, asked.input_uri, GrantUse.READ, "input_uri")
        return None
    file = stored_file_of(application.tenant, asked.input_file_id, now)
    if file is None or file.purpose != FilePurpose.BATCH.value:
        what = "has the purpose batch_output" if file else "does not exist"
        message = f"the file `{asked.input_file_id}` {what}: upload one with the purpose batch"
        raise ApplicationRefused(400, "invalid_value", message, "input_file_id")
    return file


def _check_deadline(file: StoredFile, region: str, asked: NewBatch, now: datetime) -> None:
    ahead = lines_ahead(region, file.model)
    refusal = deadline_refusal(
        asked_s=asked.window_s,
        lines=file.lines,
        ahead=ahead,
        rate=measured_rate(region, file.model, now),
        planned_s=batch_budgets(now).time_s(region, file.model, file.lines + ahead),
        is_usual=asked.window == USUAL_WINDOW,
    )
    if refusal:
        raise ApplicationRefused(400, "deadline_infeasible", refusal, "switchyard.completion_window")


def batch_cancel(*, application: Application, batch_id: str, now: datetime) -> Batch:
    """Cancels a batch; completed lines can be read. Idempotent. Raises ApplicationRefused if the tenant has no such
    batch, or it has ended."""
    batch = batch_of(application.tenant, batch_id)
    if batch is None:
        raise batch_not_found(batch_id)
    return batch_end_early(batch=batch, now=now)


def batch_end_early(*, batch: Batch, now: datetime) -> Batch:
    """Cancels a batch of any tenant. Raises ApplicationRefused if it has ended."""
    for state in (BatchState.VALIDATING, BatchState.IN_PROGRESS):
        batch_move(Batch.objects.filter(id=batch.id), start=state, to=BatchState.CANCELLING, now=now)
    batch.refresh_from_db()
    if refusal := cancel_refusal(BatchState(batch.state)):
        raise refusal
    return batch


def batch_move(rows: "QuerySet[Batch]", *, start: BatchState, to: BatchState, now: datetime, **columns: Any) -> int:
    """Moves those rows that are in `start` and returns their number. The end of a batch notifies webhooks in the same
    transaction."""
    if to not in ALLOWED[start]:
        raise ValueError(f"a batch does not go from {start} to {to}")
    columns |= {"state": to.value, STAMPS[to]: now, "leased_until": None}
    live.push("batches")
    if to not in ENDED:
        return rows.filter(state=start.value).update(**columns)
    with transaction.atomic():
        ids = list(rows.filter(state=start.value).select_for_update().values_list("id", flat=True))
        moved = Batch.objects.filter(id__in=ids).update(**columns)
        for batch in Batch.objects.filter(id__in=ids):
            webhooks_notify(event=f"batch.{to}", body=_webhook_data(batch), now=now)
            tenant_webhooks_notify(tenant=batch.tenant, event=BatchEvent(f"batch.{to}"), batch_id=batch.id, now=now)
    return moved


def _webhook_data(batch: Batch) -> dict[str, Any]:
    return {
        "id": batch.id,
        "tenant": batch.tenant,
        "model": batch.model,
        "models": batch.lines_by_model,
        "lines": batch.lines,
        "completed": batch.completed,
        "failed": batch.failed,
    }


def batch_fail_lost(*, batch: Batch, now: datetime) -> int:
    """Fails a batch whose files in the store are lost. Returns the number of failed batches."""
    error = LineError("files_lost", "The files of this batch are lost from the file store.").shown()
    rows = Batch.objects.filter(id=batch.id)
    return batch_move(rows, start=BatchState(batch.state), to=BatchState.FAILED, now=now, errors=[error])


def batches_advance(*, now: datetime) -> int:
    """Finalizes batches that have no open lines or no time left. Returns their number."""
    running = Batch.objects.filter(state=BatchState.IN_PROGRESS.value)
    lacking = BatchRange.objects.filter(batch=OuterRef("pk"), done=False)
    to = {"start": BatchState.IN_PROGRESS, "to": BatchState.FINALIZING, "now": now}
    done = batch_move(running.filter(~Exists(lacking)), **to)  # type: ignore[arg-type]
    return done + batch_move(running.filter(expires_at__lte=now), **to, expired=True)  # type: ignore[arg-type]


def batches_open() -> bool:
    """Whether any batch is open, from an index."""
    return Batch.objects.filter(state__in=OPEN_STATES).exists()


def batches_trim(*, now: datetime) -> int:
    """Deletes batches that ended long ago. Returns their number."""
    old = now - timedelta(seconds=BatchSettings().kept_s)
    ended = Batch.objects.filter(state__in=[state.value for state in ENDED], expires_at__lt=old)
    ids = list(ended.values_list("id", flat=True)[:FORGOTTEN_AT_ONCE])
    with transaction.atomic():
        Batch.objects.filter(id__in=ids).delete()
    return len(ids)


DONE = {
    PaceStep.RAISE: "its lines are now sent as near-real-time",
    PaceStep.ASK: "the plan of the day was asked for cells",
    PaceStep.TELL: "its owner was notified",
}


def batches_pace(*, now: datetime, rates: Mapping[str, float]) -> int:
    """Takes the next step for each batch that will miss its deadline. `rates` has recent lines per second by `region
    model`. Returns the number of batches."""
    return sum(_apply_pace(pace, now) for pace in plan_paces(batches_paced(now, rates), now))


@transaction.atomic
def _apply_pace(pace: Pace, now: datetime) -> bool:
    """Skips steps that another process has taken meanwhile."""
    batch = Batch.objects.filter(id=pace.batch, state=BatchState.IN_PROGRESS.value).select_for_update().first()
    steps = [step for step in pace.steps if batch is not None and getattr(batch, STEP_FIELDS[step]) is None]
    if batch is None or not steps:
        return False
    for step in steps:
        setattr(batch, STEP_FIELDS[step], now)
    batch.paced_at, batch.paced_done = now, pace.done
    batch.save(update_fields=["paced_at", "paced_done", *(STEP_FIELDS[step] for step in steps)])
    event_record(
        kind="batch.deadline_at_risk",
        message=f"the deadline of batch {batch.id} of {batch.tenant or 'no tenant'} is at risk: {pace.reason}; "
        + ", ".join(DONE[step] for step in steps),
        tone=Tone.WARN,
        now=now,
        detail={
            "batch": batch.id,
            "tenant": batch.tenant,
            "region": batch.region_id,
            "steps": [step.value for step in steps],
        },
    )
    if PaceStep.TELL in steps:
        tenant_webhooks_notify(tenant=batch.tenant, event=BatchEvent.AT_RISK, batch_id=batch.id, now=now)
    live.push("batches")
    return True


# Samples of progress: one row per batch, of bounded length. A concurrent process adds nothing to a step that has a
# sample.


def batches_sample(*, now: datetime) -> int:
    """Samples each batch in progress that lacks one in this step, in three queries. Returns their number."""
    running = Batch.objects.filter(state=BatchState.IN_PROGRESS.value).exclude(in_progress_at=None)
    batches = list(running)
    if not batches:
        return 0
    before = {row.batch_id: row.timeline() for row in BatchTimeline.objects.filter(batch__in=batches)}
    done, rows = tallies(batches), []
    for batch in batches:
        began_at = batch.in_progress_at or now
        known = before.get(batch.id, BatchTimeline().timeline())
        tally = done[batch.id]
        after = add_sample(known, (now - began_at).total_seconds(), tally.completed, tally.failed)
        if after is not None:
            rows.append(
                BatchTimeline(
                    batch=batch, step_s=after.step_s, completed=list(after.completed), failed=list(after.failed)
                )
            )
    BatchTimeline.objects.bulk_create(
        rows, update_conflicts=True, unique_fields=["batch"], update_fields=["step_s", "completed", "failed"]
    )
    return len(rows)
