"""Applies what is decided of a rollout, as compare-and-set on (id, state, revision) with its event.

The way to the end is the planner's; what operators request is in `fleet.services.rollout_actions`.
"""

from datetime import datetime
from typing import Any

import msgspec
from django.db import transaction

from fleet.models import Deployment, Rollout
from fleet.planning.decisions import ChangeRollout
from fleet.planning.states import ROLLOUT_ACTIVE, ROLLOUT_ALLOWED, ROLLOUT_TONE, RolloutState
from fleet.planning.webhooks.delivery import WebhookEvent
from fleet.services.webhook_outbox import webhooks_notify
from kernel import hints, live
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
    hints.ring("fleet.reconcile")


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
