"""Stores calibrations and their figures. It never changes a version: a calibration only recommends."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Any

from django.db import transaction

from kernel import live
from kernel.events import event_record
from kernel.refusals import InvalidInput
from models_registry.speculation.planner import (
    BadCalibration,
    BadStepCost,
    Calibration,
    StepCost,
    TaskFigures,
    choose,
    read_calibration,
    read_step_cost,
    task_figures,
)
from models_registry.versions.models import ModelVersion, SpeculationCalibration
from models_registry.versions.planning.spec import VersionSpec
from models_registry.versions.planning.speculation import Method

MOST_STEP_COSTS = 8
"""Instance types in one calibration."""


def calibration_store(
    *, version_id: int, document: Any, step_costs: Sequence[Any], actor: str, now: datetime
) -> SpeculationCalibration:
    """Store a calibration; earlier ones are kept, and the newest counts. Raises InvalidInput if it cannot be read, or
    does not fit the version's heads."""
    read, costs = _calibration(document), _costs(step_costs)
    figures = [task_figures(task) for task in read.tasks]
    with transaction.atomic():
        version = ModelVersion.objects.select_for_update().get(pk=version_id)
        guessing = _specs_with_heads(version, read)
        is_tree = _is_tree(next(iter(guessing.values())))
        row = SpeculationCalibration.objects.create(
            version=version,
            document=document,
            step_costs=list(step_costs),
            figures=[asdict(each) for each in figures],
            choices=[
                _choice(each, cost, is_tree=_is_tree(_spec_on_machine(version, guessing, cost)))
                for cost in costs
                for each in figures
            ],
            actor=actor[:64],
            created_at=now,
        )
        event_record(
            kind="version.calibrated",
            message=f"{version.reference} calibrated by {actor}: {_sentence(figures, is_tree=is_tree)}",
            now=now,
            actor=actor[:64],
            detail={"version": version.reference, "calibration": row.pk},
        )
    live.push("models", version.reference)
    return row


def _calibration(document: Any) -> Calibration:
    try:
        return read_calibration(document)
    except BadCalibration as wrong:
        raise InvalidInput(field="calibration", rule="readable", message=str(wrong)) from None


def _costs(step_costs: Sequence[Any]) -> list[StepCost]:
    if len(step_costs) > MOST_STEP_COSTS:
        message = f"step_costs has {len(step_costs)} entries; at most {MOST_STEP_COSTS} are allowed"
        raise InvalidInput(field="step_costs", rule="count", message=message)
    try:
        return [read_step_cost(each) for each in step_costs]
    except BadStepCost as wrong:
        raise InvalidInput(field="step_costs", rule="readable", message=str(wrong)) from None


def _specs_with_heads(version: ModelVersion, read: Calibration) -> dict[str, VersionSpec]:
    """The version on the instance types where it uses these heads; one entry with an empty name if it is the same on
    all. Raises InvalidInput if there is none; the text explains the first."""
    spec = version.spec()
    there = {kind: spec.on(kind) for kind in spec.instance_types} if spec.by_type else {"": spec}
    refused = {kind: _check_fits(each, read) for kind, each in there.items()}
    fitting = {kind: each for kind, each in there.items() if refused[kind] is None}
    if fitting:
        return fitting
    by_heads = [why for kind, why in refused.items() if there[kind].speculation.get("method") == Method.MEDUSA]
    raise next(why for why in (*by_heads, *refused.values()) if why is not None)


def _spec_on_machine(version: ModelVersion, guessing: Mapping[str, VersionSpec], cost: StepCost) -> VersionSpec:
    """The version on the instance type of a step cost. Raises InvalidInput if it does not use these heads there."""
    found = guessing.get("", guessing.get(cost.instance_type))
    if found is None:
        message = f"step_costs has {cost.instance_type}; {version.reference} uses these heads on {', '.join(guessing)}"
        raise InvalidInput(field="step_costs", rule="instance_type", message=message)
    return found


def _is_tree(spec: VersionSpec) -> bool:
    return spec.engine == "neuron"


def _check_fits(spec: VersionSpec, read: Calibration) -> InvalidInput | None:
    """Checks without the weights: method, number of heads, and model. None if it fits."""
    stated = spec.speculation
    if stated.get("method") != Method.MEDUSA:
        message = (
            f"{spec.reference} uses speculation method {stated.get('method', 'none')}; a calibration is for medusa"
        )
        return InvalidInput(field="calibration", rule="method", message=message)
    wanted = stated.get("tokens", stated.get("heads", 0))
    if isinstance(wanted, int) and wanted > read.heads:
        message = f"the calibration has {read.heads} heads; {spec.reference} uses {wanted}"
        return InvalidInput(field="calibration", rule="heads", message=message)
    if spec.artifact_digest and read.model != spec.artifact_digest:
        message = (
            f"the calibration has answers of {read.model}, but {spec.reference} serves "
            f"{spec.artifact_digest}; train heads for this model"
        )
        return InvalidInput(field="calibration", rule="model", message=message)
    return None


def _choice(figures: TaskFigures, cost: StepCost, *, is_tree: bool) -> dict[str, Any]:
    chosen = asdict(choose(figures, cost, is_tree=is_tree))
    chosen["gains"] = {str(batch): round(gain, 4) for batch, gain in chosen["gains"].items()}
    return {"instance_type": cost.instance_type, "source": cost.source, "hardware": cost.hardware, **chosen}


def _sentence(figures: Sequence[TaskFigures], *, is_tree: bool) -> str:
    def most(each: TaskFigures) -> float:
        return (each.tree if is_tree else each.chain)[-1]

    return ", ".join(f"{each.name} {most(each):.2f} tokens per step" for each in figures)
