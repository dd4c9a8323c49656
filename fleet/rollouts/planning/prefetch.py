"""Decides which versions each node fetches in advance, so that no cell is down while its build and weights arrive: the
nodes of cells that a rollout moves next, and spares, which get what the deployments of their instance type need. Never
touches a cell: `versions` drains none whose nodes lack the version."""

from collections import defaultdict
from collections.abc import Iterator
from datetime import datetime

from fleet.reconcile.planning.decisions import OrderPrefetch
from fleet.reconcile.planning.settings import FleetSettings
from fleet.reconcile.planning.snapshot import DeploymentView, FleetView, NodeView
from fleet.reconcile.planning.states import DEAD, NodeState, RolloutState
from fleet.rollouts.planning.versions import VersionPlan, cells_to_move
from fleet.rollouts.planning.waves import RolloutProgress, Stage

MOST_ON_A_SPARE = 4
"""Versions that a spare fetches, those of the largest deployments first: its disk is limited."""
Wanted = dict[str, dict[str, str]]
"""Node -> version -> reason."""


def plan_prefetch(fleet: FleetView, settings: FleetSettings, now: datetime) -> tuple[OrderPrefetch, ...]:
    """Changes of what nodes fetch in advance."""
    del settings, now
    fetched = {name: spec for name, spec in fleet.deployments.items() if _is_fetched(spec)}
    if not fetched and not any(node.prefetch for node in fleet.nodes.values()):
        return ()
    wanted: Wanted = defaultdict(dict)
    versions = VersionPlan(fleet)
    for name in sorted(fleet.rollouts):
        if name in fetched and (progress := versions.progress(name)) is not None:
            _want_for_rollout(wanted, fleet, versions, progress)
    for node in fleet.nodes.values():
        if _is_spare(fleet, node):
            wanted[node.id] = dict(_on_spare(fleet, fetched, versions, node))
    return tuple(_changes(fleet, wanted))


def _is_fetched(spec: DeploymentView) -> bool:
    """Whether nodes fetch anything for a deployment."""
    views = [spec.of(spec.version), *spec.others.values()]
    views += [view for by_version in spec.further.values() for view in by_version.values()]
    return not spec.problem and any(view.needs for view in views)


def _want_for_rollout(wanted: Wanted, fleet: FleetView, versions: VersionPlan, progress: RolloutProgress) -> None:
    """The cells that the current stage moves next, or during a bake those of the next stage."""
    stage = _stage_ahead(progress)
    if stage is None or progress.is_surging or progress.is_returning:
        return
    place = (progress.deployment.name, stage.region)
    moved = sum(cell.version == progress.goal or cell.returns for cell in versions.live.get(place, ()))
    left = progress.target(stage) - moved
    for cell in cells_to_move(versions, progress, stage.region, set()):
        if left <= 0:
            return
        left -= 1
        if progress.deployment.of(progress.goal, cell.instance_type).needs:
            for member in cell.members:
                wanted[member.node][progress.goal] = f"rollout {progress.rollout.id} moves {cell.id} to it"


def _stage_ahead(progress: RolloutProgress) -> Stage | None:
    if progress.rollout.state is RolloutState.RUNNING:
        return progress.stage
    following = progress.next_stage() if progress.rollout.state is RolloutState.BAKING else None
    return progress.stages[following] if following is not None else None


def _is_spare(fleet: FleetView, node: NodeView) -> bool:
    return node.state is NodeState.READY and not node.cordoned and fleet.cell_of(node.id) is None


def _on_spare(
    fleet: FleetView, fetched: dict[str, DeploymentView], versions: VersionPlan, node: NodeView
) -> Iterator[tuple[str, str]]:
    """Versions of the deployments that may use a spare, the goal of a rollout first."""
    here = [
        spec
        for spec in fetched.values()
        if node.instance_type in spec.instance_types and spec.cells_wanted.get(node.region, 0) > 0
    ]
    found: dict[str, str] = {}
    for spec in sorted(here, key=lambda one: (-one.cells_wanted[node.region], one.name)):
        progress = versions.progress(spec.name)
        goal = progress.goal if progress is not None else spec.version
        for version in dict.fromkeys((goal, spec.version)):
            if spec.of(version, node.instance_type).needs:
                found.setdefault(version, f"{spec.name} may need this spare")
    return iter([*found.items()][:MOST_ON_A_SPARE])


def _changes(fleet: FleetView, wanted: Wanted) -> Iterator[OrderPrefetch]:
    for node in fleet.nodes.values():
        stated = wanted.get(node.id, {})
        if node.state not in DEAD and tuple(stated) != node.prefetch:
            reason = "; ".join(dict.fromkeys(stated.values())) or "nothing is needed any more"
            yield OrderPrefetch(node.id, node.prefetch, tuple(stated), reason)
