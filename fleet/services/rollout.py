"""Applies what is decided of a rollout, as compare-and-set on (id, state, revision) with its event.

The way to the end is the planner's; what operators request is in `fleet.services.rollout_actions`.
"""

from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
from django.db import transaction
from django.db.models import Q

from fleet.models import Deployment, Rollout, RolloutPoints
from fleet.planning.decisions import ChangeRollout
from fleet.planning.load.history import FINE_S, KEPT_S
from fleet.planning.rollout.points import MOST_POINTS, appended, length_of, merged
from fleet.planning.states import ROLLOUT_ACTIVE, ROLLOUT_ALLOWED, ROLLOUT_TONE, RolloutState
from fleet.planning.webhooks.delivery import WebhookEvent
from fleet.selectors.history import Span
from fleet.selectors.rollout_points import AFTER, BEFORE, measured_lines
from fleet.services.webhook_outbox import webhooks_notify
from kernel import live, wake_ups
from kernel.events import event_record
from kernel.transitions import StaleDecision


def rollout_change(decision: ChangeRollout, *, now: datetime) -> None:
    """Change a rollout as decided. Reaching its end makes the new version the deployment's own.

    Raises:
        StaleDecision: the rollout is no longer what the decision saw.
    """
    if decision.to not in ROLLOUT_ALLOWED[decision.seen]:
        raise ValueError(f"a rollout cannot go from {decision.seen} to {decision.to}")
    with transaction.atomic():
        rollout = rollout_locked(decision.rollout)
        if (rollout.state, rollout.revision) != (decision.seen, decision.revision):
            raise StaleDecision(f"rollout {rollout.pk}")
        moved = (rollout.state, rollout.stage) != (decision.to, decision.stage)
        rollout.stage = decision.stage
        rollout.failed += msgspec.to_builtins(decision.failed)
        if decision.counters is not None:
            counted = {cell: msgspec.structs.asdict(counters) for cell, counters in decision.counters.items()}
            rollout.counters = msgspec.to_builtins(counted, str_keys=True)
        if decision.verdict is not None:
            rollout.verdict = msgspec.to_builtins(decision.verdict)
        rollout_save(rollout, to=decision.to, reason=decision.reason, now=now, moved=moved)
        if moved or decision.failed:
            rollout_event(rollout, actor="switchyard", now=now, detail=_detail(decision))


def rollout_locked(rollout_id: int) -> Rollout:
    """A rollout, held until the commit together with its deployment: always in this order."""
    deployment = Rollout.objects.values_list("deployment_id", flat=True).get(pk=rollout_id)
    Deployment.objects.select_for_update().get(name=deployment)
    return Rollout.objects.select_for_update().get(pk=rollout_id)


def rollout_save(rollout: Rollout, *, to: RolloutState, reason: str, now: datetime, moved: bool = True) -> None:
    """Store a locked rollout in its next state. `moved`: a state or a stage begins."""
    rollout.state, rollout.reason = to.value, reason
    rollout.revision += 1
    if moved:
        rollout.state_since = now
    if to not in ROLLOUT_ACTIVE:
        rollout.ended_at = now
    if to is RolloutState.SUCCEEDED:
        Deployment.objects.filter(name=rollout.deployment_id).update(model_version=rollout.to_version_id)
        live.push("deployments", rollout.deployment_id)
    rollout.save()
    live.push("rollouts", str(rollout.pk))
    wake_ups.send("fleet.reconcile")


def rollout_event(rollout: Rollout, *, actor: str, now: datetime, detail: dict[str, Any] | None = None) -> None:
    """One line of the timeline, in the transaction of the change."""
    state = RolloutState(rollout.state)
    event_record(
        kind=f"rollout.{state}",
        message=f"rollout {rollout.pk} of {rollout.deployment_id} is {state}: {rollout.reason}",
        tone=ROLLOUT_TONE[state],
        now=now,
        actor=actor,
        deployment=rollout.deployment_id,
        detail={"rollout": rollout.pk, "stage": rollout.stage, **(detail or {})},
    )
    webhooks_notify(event=WebhookEvent.ROLLOUT_CHANGED, body=rollout_body(rollout, actor), now=now)


def rollout_body(rollout: Rollout, actor: str) -> dict[str, Any]:
    """The body of webhook messages about a rollout."""
    return {
        "id": rollout.pk,
        "deployment": rollout.deployment_id,
        "from_version": rollout.from_version.reference,
        "to_version": rollout.to_version.reference,
        "state": str(rollout.state),
        "reason": rollout.reason,
        "stage": rollout.stage,
        "verdict": rollout.verdict,
        "actor": actor,
        "state_since": rollout.state_since.isoformat(),
    }


def _detail(decision: ChangeRollout) -> dict[str, Any]:
    detail: dict[str, Any] = {"was": decision.seen}
    if decision.failed:
        detail["failed"] = msgspec.to_builtins(decision.failed)
    if decision.verdict is not None:
        detail["verdict"] = msgspec.to_builtins(decision.verdict)
    return detail


# Keeps the points of rollouts' charts with them, while load history still has them in fine steps.

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
