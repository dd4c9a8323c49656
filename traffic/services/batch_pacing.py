"""Watches the pace of open batches: each that falls behind is sent as near-real-time, has the plan of the day asked for
cells, and has its tenant told, step by step as far as the policy of its deployment goes. Each step is noted with an
event, in one transaction that names what it saw. Any process may do it, and any number at once."""

from collections.abc import Mapping
from datetime import datetime

from django.db import transaction

from kernel import live
from kernel.events import event_record
from kernel.tones import Tone
from traffic.models import Batch, BatchTimeline
from traffic.planning.batch import BatchState
from traffic.planning.batch_event import BatchEvent
from traffic.planning.batch_pacing import Pace, PaceStep, plan_paces
from traffic.planning.batch_timeline import add_sample
from traffic.selectors.batch import STEP_FIELDS, batches_paced, tallies
from traffic.services.tenant_webhook import tenant_webhooks_notify

DONE = {
    PaceStep.RAISE: "they are sent as near-real-time from now on",
    PaceStep.ASK: "the plan of the day is asked for cells",
    PaceStep.TELL: "its owner is told",
}


def batches_pace(*, now: datetime, rates: Mapping[str, float]) -> int:
    """Take the next step for each batch that will miss its deadline. `rates`: lines a second as of late, by
    `region model`. Returns for how many."""
    return sum(_apply(pace, now) for pace in plan_paces(batches_paced(now, rates), now))


@transaction.atomic
def _apply(pace: Pace, now: datetime) -> bool:
    """Steps that another process has taken meanwhile are left out."""
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
        message=f"the deadline of batch {batch.id} of {batch.tenant or 'nobody'} is at risk: {pace.reason}; "
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


# Keeps how far open batches are over time: one row each, written once in a step, of bounded length. Any process may
# do it, and any number at once: whoever is later adds nothing.


def batches_sample(*, now: datetime) -> int:
    """Take a sample of each batch in progress that has none in this step. Returns how many; in three queries."""
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
