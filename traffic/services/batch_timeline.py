"""Keeps how far open batches are over time: one row each, written once in a step, of bounded length. Any process may
do it, and any number at once: whoever is later adds nothing."""

from datetime import datetime

from traffic.models import Batch, BatchTimeline
from traffic.planning.batch import BatchState
from traffic.planning.batch_timeline import add_sample
from traffic.selectors.batch import tallies


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
