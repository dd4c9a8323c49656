"""Keeps the points of rollouts' charts with them, while load history still has them in fine steps."""

from datetime import UTC, datetime, timedelta

from django.db.models import Q

from fleet.models import Rollout, RolloutPoints
from fleet.planning.load.history import FINE_S, KEPT_S
from fleet.planning.rollout.points import MOST_POINTS, appended, length_of, merged
from fleet.selectors.history import Span
from fleet.selectors.rollout_points import AFTER, BEFORE, measured_lines

LATE = timedelta(minutes=10)
"""After its end: housekeeping may have been away."""


def rollout_points_keep(*, now: datetime) -> None:
    """Add what was sampled since the last time, to each rollout that goes on or has just ended."""
    recent = Q(ended_at__isnull=True) | Q(ended_at__gt=now - AFTER - LATE)
    for rollout in Rollout.objects.filter(recent).select_related("points"):
        _keep(rollout, now)


def _keep(rollout: Rollout, now: datetime) -> None:
    kept = getattr(rollout, "points", None) or RolloutPoints(
        rollout=rollout, start=_floor(rollout.created_at - BEFORE, FINE_S), step_s=FINE_S, lines={}
    )
    end = kept.start + timedelta(seconds=length_of(kept.lines) * kept.step_s)
    until = min(now, rollout.ended_at + AFTER) if rollout.ended_at else now
    steps = int((until - end).total_seconds() // kept.step_s)
    # What load history has no longer in fine steps is a gap.
    reach_s = min(steps * kept.step_s, KEPT_S[FINE_S] // kept.step_s * kept.step_s)
    if reach_s <= 0:
        return
    until = end + timedelta(seconds=steps * kept.step_s)
    measured = measured_lines(rollout, Span("kept", reach_s, FINE_S), until)
    if measured is None:
        return
    gap = steps - reach_s // kept.step_s
    more = merged(measured.lines, kept.step_s // FINE_S)
    holes = {measure: {version: [None] * gap for version in versions} for measure, versions in more.items()}
    kept.lines = appended(appended(kept.lines, holes), more)
    if length_of(kept.lines) > MOST_POINTS:
        kept.lines, kept.step_s = merged(kept.lines, 2), 2 * kept.step_s
        odd = length_of(kept.lines) * kept.step_s > (until - kept.start).total_seconds()
        if odd:  # its second half is still to come: it is measured again, whole
            kept.lines = {m: {v: values[:-1] for v, values in versions.items()} for m, versions in kept.lines.items()}
    kept.save()


def _floor(moment: datetime, step_s: int) -> datetime:
    return datetime.fromtimestamp(moment.timestamp() // step_s * step_s, UTC)
