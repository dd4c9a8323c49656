"""Changes rollouts. Planned changes are compare-and-set on (id, state, revision); operators start, pause, resume, skip
a bake, roll back and abort, with actor, reason and approval where a rule requires it. Each change and its event share a
transaction. Never changes a cell: the reconciler's next pass acts on the new state."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
from django.db import transaction
from django.db.models import Q

from accounts.models import Approval
from accounts.services.approval import ApprovalRequest, FleetAction, approval_request, requires_approval
from fleet.autoscaling.planning.role_split import RoleSplit
from fleet.cells.models import Cell
from fleet.deployments.models import Deployment, DeploymentRegion
from fleet.deployments.planner import InvalidPolicy, UpdatePolicy, parse_policy, policy_as_json
from fleet.deployments.selectors import check_names_free, roles_objection, shapes_of, version_fit
from fleet.load.planner import FINE_S, KEPT_S
from fleet.reconcile.planning.decisions import ChangeRollout
from fleet.reconcile.planning.states import ROLLOUT_ACTIVE, ROLLOUT_ALLOWED, ROLLOUT_TONE, CellState, RolloutState
from fleet.reconcile.selectors.snapshot import deployment_view
from fleet.regions.models import Region
from fleet.rollouts.models import Rollout, RolloutPoints
from fleet.rollouts.planning.gates import MAX_POINTS, appended, length_of, merged
from fleet.rollouts.planning.planner import cause_after
from fleet.rollouts.planning.waves import objection, order_of_regions, progress_of
from fleet.rollouts.selectors import ACTIVE, AFTER, BEFORE, measured_lines, rollout_view
from fleet.webhooks.planner import WebhookEvent
from fleet.webhooks.services import webhooks_notify
from kernel import live, wake_ups
from kernel.events import event_record
from kernel.refusals import Conflict, InvalidInput
from kernel.time_ranges import TimeRange
from kernel.transitions import StaleDecision
from models_registry.versions.models import ModelVersion
from models_registry.versions.services.drafts import version_lock


def rollout_change(decision: ChangeRollout, *, now: datetime) -> None:
    """Applies a planned change. On success, the new version becomes the deployment's own. Raises StaleDecision if the
    rollout has changed since the decision."""
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
            rollout_event(rollout, actor="switchyard", now=now, detail=_event_detail(decision))
        if decision.to is RolloutState.PAUSED and decision.seen is not RolloutState.PAUSED:
            _notify_waiting(rollout, now)


def rollout_locked(rollout_id: int) -> Rollout:
    """A rollout, locked until the commit. Always locks its deployment first."""
    deployment = Rollout.objects.values_list("deployment_id", flat=True).get(pk=rollout_id)
    Deployment.objects.select_for_update().get(name=deployment)
    return Rollout.objects.select_for_update().get(pk=rollout_id)


def rollout_save(rollout: Rollout, *, to: RolloutState, reason: str, now: datetime, moved: bool = True) -> None:
    """Stores a locked rollout in its next state. `moved`: a state or stage begins."""
    rollout.state, rollout.reason, rollout.cause = to.value, reason, cause_after(rollout.cause, to, reason)
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
    """Records the event and sends webhooks. Call it in the transaction of the change."""
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


def _notify_waiting(rollout: Rollout, now: datetime) -> None:
    """Announces once that a paused rollout waits for a person. A pause by an operator is not announced."""
    body = {
        "waiting": "rollout",
        "id": rollout.pk,
        "summary": f"{rollout.deployment_id} to {rollout.to_version.reference} is paused",
        "reason": rollout.reason,
        "deployment": rollout.deployment_id,
        "region": "",
        "actor": "switchyard",
        "since": rollout.state_since.isoformat(),
        "until": None,
    }
    webhooks_notify(event=WebhookEvent.DECISION_NEEDED, body=body, now=now)


def rollout_body(rollout: Rollout, actor: str) -> dict[str, Any]:
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


def _event_detail(decision: ChangeRollout) -> dict[str, Any]:
    detail: dict[str, Any] = {"was": decision.seen}
    if decision.failed:
        detail["failed"] = msgspec.to_builtins(decision.failed)
    if decision.verdict is not None:
        detail["verdict"] = msgspec.to_builtins(decision.verdict)
    return detail


KEPT_AFTER_END = timedelta(minutes=10)
"""After a rollout's end, in case housekeeping was not running."""


def rollout_points_keep(*, now: datetime) -> None:
    """Appends the new samples to the points of each active or recently ended rollout. Runs while load history still has
    them in fine steps."""
    recent = Q(ended_at__isnull=True) | Q(ended_at__gt=now - AFTER - KEPT_AFTER_END)
    for rollout in Rollout.objects.filter(recent).select_related("points"):
        _append_points(rollout, now)


def _append_points(rollout: Rollout, now: datetime) -> None:
    kept = getattr(rollout, "points", None) or RolloutPoints(
        rollout=rollout, start=_rounded_down(rollout.created_at - BEFORE, FINE_S), step_s=FINE_S, lines={}
    )
    end = kept.start + timedelta(seconds=length_of(kept.lines) * kept.step_s)
    until = min(now, rollout.ended_at + AFTER) if rollout.ended_at else now
    steps = int((until - end).total_seconds() // kept.step_s)
    # Samples that load history no longer has in fine steps become a gap.
    reach_s = min(steps * kept.step_s, KEPT_S[FINE_S] // kept.step_s * kept.step_s)
    if reach_s <= 0:
        return
    until = end + timedelta(seconds=steps * kept.step_s)
    measured = measured_lines(rollout, TimeRange("", until - timedelta(seconds=reach_s), until), FINE_S)
    if measured is None:
        return
    gap = steps - reach_s // kept.step_s
    more = merged(measured.lines, kept.step_s // FINE_S)
    holes = {measure: {version: [None] * gap for version in versions} for measure, versions in more.items()}
    kept.lines = appended(appended(kept.lines, holes), more)
    if length_of(kept.lines) > MAX_POINTS:
        kept.lines, kept.step_s = merged(kept.lines, 2), 2 * kept.step_s
        odd = length_of(kept.lines) * kept.step_s > (until - kept.start).total_seconds()
        if odd:  # the last step is incomplete and is measured again
            kept.lines = {m: {v: values[:-1] for v, values in versions.items()} for m, versions in kept.lines.items()}
    kept.save()


def _rounded_down(moment: datetime, step_s: int) -> datetime:
    return datetime.fromtimestamp(moment.timestamp() // step_s * step_s, UTC)


@dataclass(frozen=True, slots=True)
class Proposal:
    """A checked rollout that can be started."""

    deployment: Deployment
    version: ModelVersion
    allow_unreleased: bool
    policy: UpdatePolicy
    wanted: Mapping[str, int]
    regions: tuple[str, ...]
    splits: Mapping[str, RoleSplit]


def rollout_propose(
    *, deployment: str, version: str, policy: Mapping[str, Any], allow_unreleased: bool = False
) -> Proposal:
    """Checks a rollout to this version (`model@version`). Changes nothing. Raises InvalidInput if the deployment or
    version is unknown, the version cannot run there, the name of one of its adapters is taken, or the policy is
    invalid."""
    row = Deployment.objects.select_related("model_version").filter(name=deployment).first()
    if row is None:
        raise InvalidInput(field="deployment", rule="exists", message=f"there is no deployment {deployment!r}")
    chosen = version_fit(
        version,
        shapes_of(row),
        allow_unreleased=allow_unreleased,
        field="version",
        model=row.model_version.reference,
    )
    check_names_free(row.name, chosen, field="version")
    try:
        whole = parse_policy(policy, row.policy())
    except InvalidPolicy as wrong:
        raise InvalidInput(field=f"policy.{wrong.field}", rule="policy", message=str(wrong)) from None
    places = list(DeploymentRegion.objects.filter(deployment=row))
    wanted = {place.region_id: place.cells_in_force for place in places}
    splits = {place.region_id: place.split for place in places}
    _check_roles(chosen, row, splits)
    if objection_text := objection(whole, wanted, splits):
        raise InvalidInput(field="policy.strategy", rule="policy", message=objection_text)
    regions = order_of_regions(wanted, list(Region.objects.order_by("position", "name").values_list("name", flat=True)))
    return Proposal(row, chosen, allow_unreleased, whole, wanted, regions, splits)


def _check_roles(chosen: ModelVersion, row: Deployment, splits: Mapping[str, RoleSplit]) -> None:
    """A deployment with separate prefill and decode cells needs a version that supports them."""
    if not any(split.is_apart for split in splits.values()):
        return
    if objection_text := roles_objection(chosen, shapes_of(row)):
        message = f"{objection_text}; or give every region of {row.name} a plain number of cells first"
        raise InvalidInput(field="version", rule="roles", message=message)


def rollout_start(*, proposal: Proposal, actor: str, now: datetime, why: str = "") -> Rollout:
    """Starts the proposed rollout. Supersedes an active rollout of the deployment. Raises Conflict if every cell runs
    this version already, or the version was retired since the proposal."""
    with transaction.atomic():
        deployment = Deployment.objects.select_for_update().get(name=proposal.deployment.name)
        version_lock(version_id=proposal.version.pk, allow_unreleased=proposal.allow_unreleased)
        before = Rollout.objects.select_for_update().filter(deployment=deployment, state__in=ACTIVE).first()
        if already_serves(deployment, proposal.version):
            raise Conflict(f"every cell of {deployment.name} runs {proposal.version.reference} already")
        if before is not None:
            rollout_save(before, to=RolloutState.FAILED, reason="superseded", now=now)
        rollout = Rollout.objects.create(
            deployment=deployment,
            from_version_id=deployment.model_version_id,
            to_version=proposal.version,
            reason=f"started by {actor}" + (f": {why}" if why else ""),
            why=why,
            region_order=list(proposal.regions),
            policy=policy_as_json(proposal.policy),
            actor=actor,
            created_at=now,
            state_since=now,
        )
        if before is not None:
            before.reason = before.cause = f"superseded by rollout {rollout.pk}"
            before.save(update_fields=["reason", "cause"])
            rollout_event(before, actor=actor, now=now)
        rollout_event(rollout, actor=actor, now=now, detail={"to": proposal.version.reference})
        live.push("rollouts", str(rollout.pk))
        wake_ups.send("fleet.reconcile")
    return rollout


def already_serves(deployment: Deployment, version: ModelVersion) -> bool:
    """Whether every cell runs this version and no rollout is active."""
    if Rollout.objects.filter(deployment=deployment, state__in=ACTIVE).exists():
        return False
    others = Cell.objects.filter(deployment=deployment).exclude(state=CellState.STOPPED.value)
    return deployment.model_version_id == version.pk and not others.exclude(model_version=version).exists()


def rollout_pause(*, rollout_id: int, actor: str, now: datetime, why: str = "") -> None:
    """Stops moving cells. Those being updated finish. Raises Conflict if the rollout is neither running nor baking."""
    _change_by_operator(
        rollout_id, "pause", {RolloutState.RUNNING, RolloutState.BAKING}, RolloutState.PAUSED, actor, why, now
    )


def rollout_resume(*, rollout_id: int, actor: str, now: datetime, why: str = "") -> None:
    """Resumes the current stage; a bake starts over. Raises Conflict if the rollout is not paused."""
    _change_by_operator(rollout_id, "resume", {RolloutState.PAUSED}, RolloutState.RUNNING, actor, why, now)


def rollout_roll_back(*, rollout_id: int, actor: str, now: datetime, why: str = "") -> None:
    """Moves every cell back to the previous version. Raises Conflict if the rollout has ended or is rolling back
    already."""
    forward = {RolloutState.RUNNING, RolloutState.PAUSED, RolloutState.BAKING}
    _change_by_operator(rollout_id, "roll back", forward, RolloutState.ROLLING_BACK, actor, why, now)


def rollout_abort(*, rollout_id: int, actor: str, now: datetime, why: str = "") -> None:
    """Ends the rollout. Cells keep their version; cells that fail later start the previous one. Raises Conflict if the
    rollout has ended."""
    active = {RolloutState(state) for state in ACTIVE}
    _change_by_operator(rollout_id, "abort", active, RolloutState.FAILED, actor, why, now)


def rollout_skip_bake(*, rollout_id: int, actor: str, now: datetime, why: str) -> None:
    """Promotes to the next stage or the end without the gate's verdict. Raises InvalidInput if no reason is given.
    Raises Conflict if the rollout is neither baking nor paused."""
    if not why.strip():
        raise InvalidInput(field="why", rule="required", message="Give a reason for skipping the bake.")

    def promote(rollout: Rollout) -> RolloutState:
        progress = progress_of(deployment_view(rollout.deployment_id), rollout_view(rollout))
        following = progress.next_stage() if progress else None
        if following is None:
            return RolloutState.SUCCEEDED
        rollout.stage = following
        return RolloutState.RUNNING

    _change_by_operator(rollout_id, "skip bake", {RolloutState.BAKING, RolloutState.PAUSED}, promote, actor, why, now)


def _change_by_operator(
    rollout_id: int,
    action: str,
    from_states: set[RolloutState],
    to: RolloutState | Callable[[Rollout], RolloutState],
    actor: str,
    why: str,
    now: datetime,
) -> None:
    with transaction.atomic():
        rollout = rollout_locked(rollout_id)
        seen = RolloutState(rollout.state)
        if seen not in from_states:
            allowed = " or ".join(sorted(from_states))
            raise Conflict(f"rollout {rollout.pk} is {seen}; {action} needs one that is {allowed}")
        reason = f"{action} requested by {actor}" + (f": {why}" if why else "")
        rollout_save(rollout, to=to if isinstance(to, RolloutState) else to(rollout), reason=reason, now=now)
        rollout_event(rollout, actor=actor, now=now, detail={"action": action, "was": seen})


def rollout_start_or_request(*, proposal: Proposal, actor: str, now: datetime, why: str = "") -> Rollout | Approval:
    """Starts a rollout, or requests approval if a rule requires it. A rollout in a single region never needs approval.
    Raises Conflict as `rollout_start` does."""
    if len(proposal.regions) < 2 or not requires_approval(ROLL_OUT.name):
        return rollout_start(proposal=proposal, actor=actor, now=now, why=why)
    name, version = proposal.deployment.name, proposal.version.reference
    arguments = {
        "deployment": name,
        "version": version,
        "policy": policy_as_json(proposal.policy),
        "allow_unreleased": proposal.allow_unreleased,
        "why": why,
    }
    summary = f"roll {name} out to {version} in {', '.join(proposal.regions)}"
    return approval_request(ROLL_OUT.name, ApprovalRequest(summary, arguments, actor, now, why, name))


def _start_approved(arguments: Mapping[str, Any], actor: str, now: datetime) -> str:
    options = dict(arguments)
    why = str(options.pop("why"))
    rollout = rollout_start(proposal=rollout_propose(**options), actor=actor, now=now, why=why)
    return f"rollout {rollout.pk} started"


ROLL_OUT = FleetAction("roll-out-everywhere", "Roll a deployment out in all of its regions", _start_approved)
