"""What operators do with rollouts: start, pause, resume, skip a bake, roll back, abort. Each records actor and reason.

Nothing here touches a cell. The next pass of the reconciler finds the rollout in its new state and acts on it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.db import transaction

from fleet.models import Cell, Deployment, DeploymentRegion, Region, Rollout
from fleet.planning.policy import InvalidPolicy, UpdatePolicy, parse_policy, policy_as_json
from fleet.planning.role_split import RoleSplit
from fleet.planning.rollout.preview import objection, order_of_regions
from fleet.planning.rollout.waves import progress_of
from fleet.planning.states import CellState, RolloutState
from fleet.selectors.model_version import roles_objection, shapes_of, version_fit
from fleet.selectors.rollout import ACTIVE, rollout_view
from fleet.selectors.served_names import check_names_free
from fleet.selectors.snapshot import deployment_view
from fleet.services.rollout import rollout_event, rollout_locked, rollout_save
from kernel import live, wake_ups
from kernel.refusals import Conflict, InvalidInput
from models_registry.models import ModelVersion
from models_registry.services.lifecycle import version_hold


@dataclass(frozen=True, slots=True)
class Proposal:
    """A rollout that could be started: everything about it was checked."""

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
    """Check what a rollout to this version (`model@version`) would need. Changes nothing.

    Raises:
        InvalidInput: an unknown deployment or version, one that cannot run there or has an adapter whose name is
            taken, or a policy that breaks a rule.
    """
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
    if against := objection(whole, wanted, splits):
        raise InvalidInput(field="policy.strategy", rule="policy", message=against)
    regions = order_of_regions(wanted, list(Region.objects.order_by("position", "name").values_list("name", flat=True)))
    return Proposal(row, chosen, allow_unreleased, whole, wanted, regions, splits)


def _check_roles(chosen: ModelVersion, row: Deployment, splits: Mapping[str, RoleSplit]) -> None:
    """Cells that are told apart stay so."""
    if not any(split.is_apart for split in splits.values()):
        return
    if against := roles_objection(chosen, shapes_of(row)):
        message = f"{against}; or give every region of {row.name} a plain number of cells first"
        raise InvalidInput(field="version", rule="roles", message=message)


def rollout_start(*, proposal: Proposal, actor: str, now: datetime, why: str = "") -> Rollout:
    """Begin to move a deployment to the proposed version. A rollout that is active there ends in favour of this one.

    Raises:
        Conflict: every cell runs this version already, or it was retired since it was proposed.
    """
    with transaction.atomic():
        deployment = Deployment.objects.select_for_update().get(name=proposal.deployment.name)
        version_hold(version_id=proposal.version.pk, allow_unreleased=proposal.allow_unreleased)
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
            before.reason = f"superseded by rollout {rollout.pk}"
            before.save(update_fields=["reason"])
            rollout_event(before, actor=actor, now=now)
        rollout_event(rollout, actor=actor, now=now, detail={"to": proposal.version.reference})
        live.push("rollouts", str(rollout.pk))
        wake_ups.send("fleet.reconcile")
    return rollout


def already_serves(deployment: Deployment, version: ModelVersion) -> bool:
    """Whether every cell runs this version, and no rollout changes that."""
    if Rollout.objects.filter(deployment=deployment, state__in=ACTIVE).exists():
        return False
    others = Cell.objects.filter(deployment=deployment).exclude(state=CellState.STOPPED.value)
    return deployment.model_version_id == version.pk and not others.exclude(model_version=version).exists()


def rollout_pause(*, rollout_id: int, actor: str, now: datetime, why: str = "") -> None:
    """Take no further cell down. What is on its way finishes.

    Raises:
        Conflict: the rollout neither runs nor bakes.
    """
    _act(rollout_id, "pause", {RolloutState.RUNNING, RolloutState.BAKING}, RolloutState.PAUSED, actor, why, now)


def rollout_resume(*, rollout_id: int, actor: str, now: datetime, why: str = "") -> None:
    """Go on with the stage; a bake begins anew.

    Raises:
        Conflict: the rollout is not paused.
    """
    _act(rollout_id, "resume", {RolloutState.PAUSED}, RolloutState.RUNNING, actor, why, now)


def rollout_roll_back(*, rollout_id: int, actor: str, now: datetime, why: str = "") -> None:
    """Move every cell back to the version that the rollout came from.

    Raises:
        Conflict: the rollout has ended, or rolls back already.
    """
    forward = {RolloutState.RUNNING, RolloutState.PAUSED, RolloutState.BAKING}
    _act(rollout_id, "roll back", forward, RolloutState.ROLLING_BACK, actor, why, now)


def rollout_abort(*, rollout_id: int, actor: str, now: datetime, why: str = "") -> None:
    """End the rollout where it stands. Cells keep the version that they run; ones that break start the old one.

    Raises:
        Conflict: the rollout has ended.
    """
    active = {RolloutState(state) for state in ACTIVE}
    _act(rollout_id, "abort", active, RolloutState.FAILED, actor, why, now)


def rollout_skip_bake(*, rollout_id: int, actor: str, now: datetime, why: str) -> None:
    """Promote without the gate's verdict: to the next stage, or to the end.

    Raises:
        InvalidInput: no reason is given.
        Conflict: nothing bakes, and no gate has paused the rollout.
    """
    if not why.strip():
        raise InvalidInput(field="why", rule="required", message="Give a reason for skipping the bake.")

    def promote(rollout: Rollout) -> RolloutState:
        progress = progress_of(deployment_view(rollout.deployment_id), rollout_view(rollout))
        following = progress.next_stage() if progress else None
        if following is None:
            return RolloutState.SUCCEEDED
        rollout.stage = following
        return RolloutState.RUNNING

    _act(rollout_id, "skip bake", {RolloutState.BAKING, RolloutState.PAUSED}, promote, actor, why, now)


def _act(
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
