"""Explains the present: what the planners decide about an object now, and why they decide nothing: what a missing cell
waits for, why a cell stays, why a spare is not used. Sentences for operators, from the same snapshot and rules that the
next pass uses. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

from fleet.placement.planning.packing import is_idle
from fleet.reconcile.planning.planner import PLANNERS
from fleet.reconcile.planning.settings import FleetSettings, Ledger
from fleet.reconcile.planning.snapshot import WITHOUT_MACHINES, CellView, DeploymentView, FleetView, NodeView
from fleet.reconcile.planning.states import CellState, DisruptionCause, NodeState
from fleet.recorder.planning.explanations import Facts, is_told, reason_of
from fleet.recorder.planning.reasons import Subject, decision_words
from fleet.rollouts.planning.versions import VersionPlan, cells_to_move
from kernel.ages import age_text

NO_REASON = "no reason is recorded"
CELLS_MOST = 20
"""Waiting cells of a region that are explained one by one."""


@dataclass(frozen=True, slots=True)
class PausedPool:
    """A way to buy machines that is not used until a time."""

    region: str
    instance_type: str
    name: str
    reason: str
    until: datetime


class Present:
    """The explanations of one snapshot."""

    def __init__(
        self, view: FleetView, settings: FleetSettings, now: datetime, pauses: Sequence[PausedPool] = ()
    ) -> None:
        self._view = view
        self._now = now
        self._settings = settings
        self._pauses = pauses
        self._facts = Facts(view, settings, now)
        self._ledger = Ledger(view, settings.ledger, now)

    def of(self, kind: Subject, name: str) -> list[str]:
        """Sentences, the most important first; empty if the snapshot has no such object."""
        found: dict[Subject, Iterator[str]] = {
            Subject.CELL: self._of_cell(name),
            Subject.NODE: self._of_node(name),
            Subject.DEPLOYMENT: self._of_deployment(name),
            Subject.ROLLOUT: self._of_rollout(name),
        }
        sentences = list(found.get(kind, iter(())))
        return [*sentences, *self._next_steps(kind, name)] if sentences else []

    def _next_steps(self, kind: Subject, name: str) -> Iterator[str]:
        """What the next round decides about it."""
        for planner in PLANNERS:
            decided = planner(self._view, self._settings, self._now)
            for decision in filter(is_told, decided):
                reason = reason_of(decision, planner.__name__, self._facts)
                if kind.named(name) in reason.subjects:
                    yield f"The next pass decides: {decision_words(type(decision).__name__)}: {reason.reason}."
            if decided:
                return

    # --- cells -------------------------------------------------------------------------------------------------------

    def _of_cell(self, name: str) -> Iterator[str]:
        cell = self._view.cells.get(name)
        if cell is None:
            return
        yield f"It has been {cell.state} for {self._age(cell.state_since)}: {cell.reason or NO_REASON}."
        if cell.state in WITHOUT_MACHINES:
            yield from self._machines_of(cell)
        elif cell.state is CellState.READY:
            yield self._disruption(cell)
        elif cell.state is CellState.STARTING:
            timeout_s = self._view.deployments[cell.deployment].of_cell(cell).ready_timeout_s
            limit_s = timeout_s + self._settings.start_grace_s
            nodes = (self._view.nodes[member.node] for member in cell.members)
            late = [node.id for node in nodes if not (node.report.is_about(cell) and node.report.state == "ready")]
            waits_for = ", ".join(late) or "the next pass"
            yield f"It waits for {waits_for}. It fails if it is not ready within {limit_s:g} s."

    def _disruption(self, cell: CellView) -> str:
        """Whether it could be drained for a rollout, a repair or another role."""
        refused = self._ledger.refusal(cell, DisruptionCause.ROLLOUT)
        if refused is None:
            return "The disruption ledger allows to drain it."
        return f"It may not be drained on purpose: {refused}."

    def _machines_of(self, cell: CellView) -> Iterator[str]:
        lacking = self._view.machines_lacking(cell)
        spares = self._facts.spares[cell.region, cell.instance_type]
        if lacking:
            kept = self._view.regions[cell.region].repair_only.get(cell.instance_type, 0)
            reserved = f", {kept} of them reserved for repairs" if kept else ""
            yield f"It needs {lacking} {cell.instance_type}; {cell.region} has {_spares(spares)}{reserved}."
            yield from self._supply(cell.region, cell.instance_type)

    def _supply(self, region: str, instance_type: str) -> Iterator[str]:
        """Machines on their way, and pools that sell none."""
        coming = [
            node
            for node in self._view.nodes.values()
            if (node.region, node.instance_type) == (region, instance_type) and node.state is NodeState.JOINING
        ]
        if coming:
            yield f"{len(coming)} {instance_type} are on their way to {region}."
        if (free := self._view.regions[region].free) is not None and not free.get(instance_type, 0):
            yield f"{region} has a fixed pool of machines, and none of {instance_type} is free."
        for pool in self._pauses:
            if (pool.region, pool.instance_type) == (region, instance_type):
                yield f"Pool {pool.name} is not used until {pool.until:%H:%M:%S}: {pool.reason}."

    # --- deployments -------------------------------------------------------------------------------------------------

    def _of_deployment(self, name: str) -> Iterator[str]:
        spec = self._view.deployments.get(name)
        if spec is None:
            return
        if spec.problem:
            yield f"It is left unchanged, because its stored data are invalid: {spec.problem}."
        cells = self._facts.cells_of.get(name, [])
        for region in sorted({*spec.cells_wanted, *(cell.region for cell in cells)}):
            yield from self._of_place(spec, region, [cell for cell in cells if cell.region == region])

    def _of_place(self, spec: DeploymentView, region: str, cells: list[CellView]) -> Iterator[str]:
        wanted = spec.cells_wanted.get(region, 0)
        ready = sum(cell.state is CellState.READY for cell in cells)
        others = [cell for cell in cells if cell.state is not CellState.READY]
        lacks = "lacks nothing" if ready >= wanted else f"lacks {_cells(wanted - ready)}"
        yield f"{region} {lacks}: {_cells(wanted)} wanted, {ready} ready."
        claim = spec.claim(region)
        if claim.in_force < claim.asked:
            yield f"{region} gets {claim.in_force} of {claim.asked} cells: {claim.reason or claim.rule}."
        for cell in others[:CELLS_MOST]:
            yield f"{cell.id} has been {cell.state} for {self._age(cell.state_since)}: {cell.reason}."
        if len(others) > CELLS_MOST:
            yield f"{len(others) - CELLS_MOST} more cells of {region} are not ready."
        for kind in sorted({cell.instance_type for cell in others if cell.state in WITHOUT_MACHINES}):
            needs = sum(self._view.machines_lacking(cell) for cell in others if cell.instance_type == kind)
            if needs:
                yield f"{region} needs {needs} {kind}; {_spares(self._facts.spares[region, kind])}."
                yield from self._supply(region, kind)
        if len(cells) > wanted:
            for cell in cells:
                if cell.state is CellState.READY and (why := self._ledger.refusal(cell, DisruptionCause.SCALE)):
                    yield f"{cell.id} stays although {_cells(wanted)} are wanted: {why}."

    # --- nodes -------------------------------------------------------------------------------------------------------

    def _of_node(self, name: str) -> Iterator[str]:
        node = self._view.nodes.get(name)
        if node is None:
            return
        yield f"It has been {node.state} for {self._age(node.state_since)}."
        cell = self._view.cell_of(name)
        if cell is not None:
            yield f"It is in cell {cell.id}, which is {cell.state}."
        yield from self._health(node)
        for one in self._view.faults.replacements:
            if one.node == name:
                begun = "Its replacement has begun" if one.begun else "Its replacement waits until its cell is drained"
                yield f"{begun}: {one.reason}."
        if cell is None and node.state is NodeState.READY:
            yield from self._idle(node)

    def _health(self, node: NodeView) -> Iterator[str]:
        settings, silence_s = self._settings, self._view.silence_s(node, self._now)
        if node.state in {NodeState.READY, NodeState.SUSPECT} and silence_s > settings.doubt_after_s:
            yield f"Its agent has been silent for {age_text(silence_s)}; its provider reports: {node.provider}."
            yield (
                f"A silent node is suspect after {settings.suspect_after_s:g} s, and lost after "
                f"{settings.lost_after_s:g} s if a second witness agrees."
            )
        for signal in self._view.faults.signals:
            if signal.node == node.id and not signal.settled:
                yield f"Its agent reported {signal.signature} {signal.count} times: {signal.summary}."

    def _idle(self, node: NodeView) -> Iterator[str]:
        """Why a node is in no cell."""
        if node.cordoned:
            yield "It is cordoned, so no cell gets it."
        elif not is_idle(node):
            state = node.report.state if node.report.connected else "not connected"
            yield f"It cannot start in a cell: its agent is {state}."
        else:
            waits = [
                cell
                for cell in self._view.cells.values()
                if cell.state in WITHOUT_MACHINES
                and (cell.region, cell.instance_type) == (node.region, node.instance_type)
            ]
            warm = self._view.regions[node.region].spares.get(node.instance_type, 0)
            if not waits:
                yield f"It is spare: no cell of {node.region} waits for {node.instance_type}; {warm} are kept warm."
            for cell in waits[:CELLS_MOST]:
                yield f"{cell.id} waits: {cell.reason}."

    # --- rollouts ----------------------------------------------------------------------------------------------------

    def _of_rollout(self, name: str) -> Iterator[str]:
        rollout = next((one for one in self._view.rollouts.values() if str(one.id) == name), None)
        if rollout is None:
            return
        yield f"It has been {rollout.state} for {self._age(rollout.state_since)}: {rollout.reason or NO_REASON}."
        for failed in rollout.failed:
            yield f"{failed.cell} failed to start on the new version: {failed.reason}."
        versions = VersionPlan(self._view)
        progress = versions.progress(rollout.deployment)
        if progress is None:
            return
        for region in progress.regions:
            if versions.lacking(rollout.deployment, region) <= 0:
                continue
            for cell in cells_to_move(versions, progress, region, set()):
                if refused := self._ledger.refusal(cell, DisruptionCause.ROLLOUT):
                    yield f"{cell.id} must wait: {refused}."
                    break
                if missing := self._view.lacking_nodes(cell, progress.goal):
                    yield f"{cell.id} must wait: {', '.join(node.id for node in missing)} still fetch the version."

    def _age(self, since: datetime) -> str:
        return age_text((self._now - since).total_seconds())


def _cells(count: int) -> str:
    return "1 cell" if count == 1 else f"{count} cells"


def _spares(count: int) -> str:
    return "1 spare" if count == 1 else f"{count} spares"
