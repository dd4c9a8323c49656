"""Decides each rollout's next state: stages, bakes, gates, failures and its end. A rollout advances only with recent
positive evidence (I6) and can roll back from every state (I7). Never touches a cell: `versions` decides from the state
which cells move."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime

from fleet.faults.planning.views import NO_USABLE_CELL, REGION_LOST
from fleet.reconcile.planning.decisions import ChangeRollout, Decision
from fleet.reconcile.planning.settings import FleetSettings
from fleet.reconcile.planning.snapshot import CellView, FailedStart, Finding, FleetView, Verdict
from fleet.reconcile.planning.states import CellState, DisruptionCause, RolloutState
from fleet.rollouts.planning.gates import bake_verdict, counters_now
from fleet.rollouts.planning.versions import VersionPlan
from fleet.rollouts.planning.waves import RolloutProgress, Stage
from kernel.ages import age_text

MOVING = frozenset({RolloutState.RUNNING, RolloutState.BAKING})
BAKE_STRETCH = 3.0
"""With too few samples, a bake may take this many times its length, because traffic may be low."""


BACKWARD = frozenset({RolloutState.PAUSED, RolloutState.ROLLING_BACK, RolloutState.FAILED})


def cause_after(cause: str, to: RolloutState, reason: str) -> str:
    """The cause of a rollout that enters state `to` for `reason`: why it no longer moves forward, or "". A rollback
    keeps the cause with which it began, also if an operator aborts it."""
    if to in BACKWARD:
        return reason if to is not RolloutState.FAILED or not cause else cause
    return cause if to is RolloutState.ROLLED_BACK else ""


def plan_rollout(fleet: FleetView, settings: FleetSettings, now: datetime) -> tuple[Decision, ...]:
    """Changes of rollouts, at most one each."""
    if not fleet.rollouts:
        return ()
    versions = VersionPlan(fleet)
    cases = (_RolloutCase(fleet, settings, now, versions, progress) for progress in versions.active())
    return tuple(
        change for case in cases if (change := _next_change(case)) is not None and _changes_anything(case, change)
    )


def _changes_anything(case: "_RolloutCase", change: ChangeRollout) -> bool:
    """Prevents a pass from repeating the same change forever."""
    rollout = case.progress.rollout
    return (change.to, change.stage, change.reason) != (rollout.state, rollout.stage, rollout.reason)


@dataclass(frozen=True, slots=True)
class _RolloutCase:
    fleet: FleetView
    settings: FleetSettings
    now: datetime
    versions: VersionPlan
    progress: RolloutProgress

    def change(self, to: RolloutState, reason: str, stage: int | None = None) -> ChangeRollout:
        rollout = self.progress.rollout
        chosen = rollout.stage if stage is None else stage
        return ChangeRollout(rollout.id, rollout.state, rollout.revision, to, chosen, reason)

    def cells(self, region: str | None = None) -> Iterator[CellView]:
        """The deployment's cells that stay, in one region or in all."""
        name = self.progress.deployment.name
        for place, cells in self.versions.live.items():
            if place[0] == name and region in {None, place[1]}:
                yield from cells

    @property
    def behind(self) -> str:
        """Another region that was scaled after its stages and has cells to move again, or ""."""
        name, here = self.progress.deployment.name, self.progress.stage.region
        others = (region for region in self.progress.regions if region != here)
        return next((region for region in others if self.versions.lacking(name, region) > 0), "")

    def listened_s(self, since: datetime) -> float:
        return self.fleet.listening_for_s(since, self.now)

    def is_fresh(self, cell: CellView) -> bool:
        """Whether its leader has just reported this generation."""
        if not cell.members:
            return False
        leader = self.fleet.nodes[cell.members[0].node]
        report, heard_at = leader.report, self.fleet.heard_at(leader, self.now)
        if not report.is_about(cell) or heard_at is None or report.unhealthy_since is not None:
            return False
        return (self.now - heard_at).total_seconds() <= self.settings.fresh_for_s

    def is_proven(self, cell: CellView) -> bool:
        """Whether it runs the new version and was healthy for as long as the policy requires."""
        rollout = self.progress.rollout
        return (
            cell.version == rollout.to_version
            and cell.state is CellState.READY
            and self.listened_s(cell.state_since) >= rollout.policy.min_healthy_s
            and self.is_fresh(cell)
        )


def _next_change(case: _RolloutCase) -> ChangeRollout | None:
    state = case.progress.rollout.state
    if problem := case.progress.deployment.problem:
        return case.change(RolloutState.PAUSED, f"{problem}; fix it and resume, or abort") if state in MOVING else None
    if state is RolloutState.ROLLING_BACK:
        return _next_in_rollback(case)
    if failed := _new_failures(case):
        return _after_failures(case, failed)
    if (unserved := _unserved(case)) and state in MOVING:
        return case.change(RolloutState.PAUSED, f"{unserved}; resume once it serves, or roll back")
    if state is RolloutState.RUNNING:
        return _next_in_wave(case)
    return _next_in_bake(case) if state is RolloutState.BAKING else None


def _unserved(case: _RolloutCase) -> str:
    """A region in which no cell can serve, or "". It pauses the rollout but does not roll it back, because the new
    version may not be the cause."""
    incidents, name = case.fleet.faults.incidents, case.progress.deployment.name
    regions = {cell.region for cell in case.cells()}
    mine = (
        one.summary
        for one in incidents
        if (one.kind == NO_USABLE_CELL and one.subject.rpartition("@")[0] == name)
        or (one.kind == REGION_LOST and one.subject in regions)
    )
    return next(mine, "")


def _new_failures(case: _RolloutCase) -> tuple[FailedStart, ...]:
    """Updated cells that failed. A cell that lost its node is `lost`, which is not the version's fault."""
    known = {(start.cell, start.generation) for start in case.progress.rollout.failed}
    return tuple(
        FailedStart(cell.id, cell.generation, cell.reason)
        for cell in case.cells()
        if cell.state is CellState.FAILED
        and cell.disruption is not DisruptionCause.OPERATOR
        and cell.version == case.progress.rollout.to_version
        and (cell.id, cell.generation) not in known
    )


def _after_failures(case: _RolloutCase, failed: tuple[FailedStart, ...]) -> ChangeRollout:
    """Records the failures. Too many of them end the rollout."""
    rollout = case.progress.rollout
    count = len(rollout.failed) + len(failed)
    last = f"{failed[-1].cell} failed at {rollout.to_version}: {failed[-1].reason}"
    most = rollout.policy.most_failures(sum(_is_updated(case, cell) for cell in case.cells()))
    if count < most:
        change = case.change(rollout.state, f"held after {count} of {most} failures: {last}")
    else:
        change = _roll_back_or_pause(case, f"{count} failures of updated cells; {last}")
    return replace(change, failed=failed)


def _roll_back_or_pause(case: _RolloutCase, reason: str) -> ChangeRollout:
    """Rolls back, or pauses if the policy has no automatic rollback."""
    rollout = case.progress.rollout
    if rollout.policy.auto_rollback:
        return case.change(RolloutState.ROLLING_BACK, reason)
    return case.change(RolloutState.PAUSED, f"{reason}; roll back or resume, automatic rollback is off")


def _next_in_wave(case: _RolloutCase) -> ChangeRollout | None:
    stage, rollout = case.progress.stage, case.progress.rollout
    target = case.progress.target(stage)
    proven = sum(case.is_proven(cell) for cell in case.cells(stage.region))
    unproven = [cell for cell in case.cells(stage.region) if _is_updated(case, cell) and not case.is_proven(cell)]
    if proven >= target and not unproven and not case.behind:
        return _begin_bake(case, stage, target)
    stuck_s = case.listened_s(_last_progress(case))
    if stuck_s > rollout.policy.progress_deadline_s:
        why = f"no progress for {age_text(stuck_s)}; {_wait_reason(case, stage, proven, target, unproven)}"
        return case.change(RolloutState.PAUSED, why)
    reason = _wait_reason(case, stage, proven, target, unproven)
    held = any(cell.state is not CellState.READY and _has_failed(case, cell) for cell in case.cells())
    return None if held or reason == rollout.reason else case.change(RolloutState.RUNNING, reason)


def _begin_bake(case: _RolloutCase, stage: Stage, target: int) -> ChangeRollout:
    bake_s = _bake_s(case)
    if target == 0 or bake_s == 0:
        return _advance_stage(case, f"{stage.label}: {target} updated, no bake configured")
    change = case.change(RolloutState.BAKING, f"{stage.label}: {target} updated, watched for {bake_s:.0f} s")
    return replace(change, counters=counters_now(case.progress, case.versions))


def _next_in_bake(case: _RolloutCase) -> ChangeRollout | None:
    rollout, stage = case.progress.rollout, case.progress.stage
    not_ready = [
        cell for cell in case.cells(stage.region) if _is_updated(case, cell) and cell.state is not CellState.READY
    ]
    if not_ready:
        reason = f"{stage.label}: {not_ready[0].id} is {not_ready[0].state}, the bake starts over once it is ready"
        return case.change(RolloutState.RUNNING, reason)
    watched_s, bake_s = case.listened_s(rollout.state_since), _bake_s(case)
    if watched_s < bake_s:
        return None
    verdict = bake_verdict(case.progress, case.versions, case.is_fresh)
    if verdict.finding is Finding.INCONCLUSIVE and watched_s < BAKE_STRETCH * bake_s:
        limit_s = BAKE_STRETCH * bake_s
        why = "too few samples yet" if verdict.numbers else verdict.reason  # the numbers change with every pass
        return case.change(rollout.state, f"{stage.label}: {why}, watched for up to {limit_s:.0f} s")
    return replace(_after_verdict(case, verdict), verdict=verdict)


def _after_verdict(case: _RolloutCase, verdict: Verdict) -> ChangeRollout:
    label = case.progress.stage.label
    match verdict.finding:
        case Finding.PASSED:
            return _advance_stage(case, f"{label} passed: {verdict.reason}")
        case Finding.WORSE:
            return _roll_back_or_pause(case, f"{label}: {verdict.reason}")
        case Finding.INCONCLUSIVE:
            reason = f"{label}: inconclusive: {verdict.reason}; resume, skip the bake or roll back"
            return case.change(RolloutState.PAUSED, reason)


def _advance_stage(case: _RolloutCase, reason: str) -> ChangeRollout:
    """To the next stage that moves any cell, or to the end once every region has its cells on the new version."""
    following = case.progress.next_stage()
    if following is not None:
        return case.change(RolloutState.RUNNING, reason, following)
    for region in case.progress.regions:  # surplus cells of one region do not count for another
        updated, wanted = sum(_is_updated(case, cell) for cell in case.cells(region)), case.progress.wanted(region)
        if updated < wanted:
            return case.change(RolloutState.RUNNING, f"{region}: {updated} of {wanted} cells are updated")
    return case.change(RolloutState.SUCCEEDED, reason)


def _next_in_rollback(case: _RolloutCase) -> ChangeRollout | None:
    rollout = case.progress.rollout
    not_returned = [cell for cell in case.cells() if cell.version != rollout.from_version]
    disrupted = [cell for cell in case.cells() if cell.disruption is DisruptionCause.ROLLOUT]
    if not not_returned and not disrupted:
        return case.change(RolloutState.ROLLED_BACK, f"every cell is at {rollout.from_version} again")
    return None


def _is_updated(case: _RolloutCase, cell: CellView) -> bool:
    return cell.version == case.progress.rollout.to_version and cell.state is not CellState.DRAINING


def _has_failed(case: _RolloutCase, cell: CellView) -> bool:
    return any(start.cell == cell.id for start in case.progress.rollout.failed)


def _bake_s(case: _RolloutCase) -> float:
    policy = case.progress.rollout.policy
    return policy.canary_bake_s if case.progress.stage.percent is None else policy.bake_s


def _last_progress(case: _RolloutCase) -> datetime:
    """When a cell of the stage's region or of a region behind last changed, or the stage began."""
    regions = {case.progress.stage.region, case.behind}
    moments = [
        cell.state_since for cell in case.cells() if cell.region in regions and cell.state is not CellState.PENDING
    ]
    return max([case.progress.rollout.state_since, *moments])


def _prefetch_reason(case: _RolloutCase, stage: Stage) -> str:
    """Returns the node that still fetches the version before its cell is drained, or ""."""
    progress = case.progress
    if progress.is_surging or case.versions.lacking(progress.deployment.name, stage.region) <= 0:
        return ""
    goal = progress.goal
    old = (cell for cell in case.cells(stage.region) if cell.state is CellState.READY and cell.version != goal)
    missing = next(((cell, nodes[0]) for cell in old if (nodes := case.fleet.lacking_nodes(cell, goal))), None)
    if missing is None:
        return ""
    cell, node = missing
    needs = progress.deployment.of(goal, cell.instance_type).needs
    troubles = node.report.holdings.troubles if node.report.holdings else {}
    why = next((f": {troubles[digest]}" for digest in sorted(needs) if digest in troubles), "")
    return f"; {cell.id} is not drained before {node.id} has fetched {goal}{why}"


def _wait_reason(case: _RolloutCase, stage: Stage, proven: int, target: int, unproven: list[CellView]) -> str:
    """The reason a wave waits, worded so that it does not change every second."""
    text = f"{stage.label}: {proven} of {target} updated and healthy"
    if case.behind:
        text += f"; {case.behind} was scaled and has cells to update"
    text += _prefetch_reason(case, stage)
    other = [cell for cell in case.cells(stage.region) if cell.returns or cell.state is CellState.PENDING]
    if not (waits := unproven + other):
        return text
    first = waits[0]
    state = "not healthy for long enough" if first.state is CellState.READY else str(first.state)
    why = f" ({first.reason})" if first.state in {CellState.PENDING, CellState.FAILED} else ""
    return f"{text}; {first.id} is {state}{why}"
