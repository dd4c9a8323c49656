"""Stores calibrations of speculation, with what follows from them. It changes no version: what a version guesses is in
the version, and a calibration says what would be better."""

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
"""Kinds of machine that one calibration is for."""


def calibration_store(
    *, version_id: int, document: Any, step_costs: Sequence[Any], actor: str, now: datetime
) -> SpeculationCalibration:
    """Store a calibration; it replaces none, and counts from now on.

    Raises:
        InvalidInput: it cannot be read, or is not of what the version guesses with.
    """
    read, costs = _calibration(document), _costs(step_costs)
    figures = [task_figures(task) for task in read.tasks]
    with transaction.atomic():
        version = ModelVersion.objects.select_for_update().get(pk=version_id)
        guessing = _guessing(version, read)
        is_tree = _is_tree(next(iter(guessing.values())))
        row = SpeculationCalibration.objects.create(
            version=version,
            document=document,
            step_costs=list(step_costs),
            figures=[asdict(each) for each in figures],
            choices=[
                _choice(each, cost, is_tree=_is_tree(_on(version, guessing, cost)))
                for cost in costs
                for each in figures
            ],
            actor=actor[:64],
            created_at=now,
        )
        event_record(
            kind="version.calibrated",
            message=f"{version.reference} is calibrated by {actor}: {_sentence(figures, is_tree=is_tree)}",
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
        message = f"step_costs has {len(step_costs)}; at most {MOST_STEP_COSTS} kinds of machine may be"
        raise InvalidInput(field="step_costs", rule="count", message=message)
    try:
        return [read_step_cost(each) for each in step_costs]
    except BadStepCost as wrong:
        raise InvalidInput(field="step_costs", rule="readable", message=str(wrong)) from None


def _guessing(version: ModelVersion, read: Calibration) -> dict[str, VersionSpec]:
    """The version on the instance types where it guesses by these heads; under no name, as it is on all of them.

    Raises:
        InvalidInput: there is none; the text says why not on the first.
    """
    spec = version.spec()
    there = {kind: spec.on(kind) for kind in spec.instance_types} if spec.by_type else {"": spec}
    refused = {kind: _check_fits(each, read) for kind, each in there.items()}
    fitting = {kind: each for kind, each in there.items() if refused[kind] is None}
    if fitting:
        return fitting
    by_heads = [why for kind, why in refused.items() if there[kind].speculation.get("method") == Method.MEDUSA]
    raise next(why for why in (*by_heads, *refused.values()) if why is not None)


def _on(version: ModelVersion, guessing: Mapping[str, VersionSpec], cost: StepCost) -> VersionSpec:
    """The version on the machines that steps were measured on.

    Raises:
        InvalidInput: it does not guess by these heads there.
    """
    found = guessing.get("", guessing.get(cost.instance_type))
    if found is None:
        message = (
            f"step_costs has one of {cost.instance_type}; {version.reference} guesses by these heads on "
            f"{', '.join(guessing)}"
        )
        raise InvalidInput(field="step_costs", rule="instance_type", message=message)
    return found


def _is_tree(spec: VersionSpec) -> bool:
    return spec.engine == "neuron"


def _check_fits(spec: VersionSpec, read: Calibration) -> InvalidInput | None:
    """What can be told without the weights: the method, how many heads there are, and which model answered. None if it
    fits."""
    stated = spec.speculation
    if stated.get("method") != Method.MEDUSA:
        message = f"{spec.reference} guesses by {stated.get('method', 'nothing')}; a calibration is of medusa"
        return InvalidInput(field="calibration", rule="method", message=message)
    wanted = stated.get("tokens", stated.get("heads", 0))
    if isinstance(wanted, int) and wanted > read.heads:
        message = f"the calibration is of {read.heads} heads; {spec.reference} guesses with {wanted}"
        return InvalidInput(field="calibration", rule="heads", message=message)
    if spec.artifact_digest and read.model != spec.artifact_digest:
        message = (
            f"the calibration is of answers of {read.model}, and {spec.reference} serves {spec.artifact_digest}; "
            "train heads for this model"
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

    return ", ".join(f"{each.name} {most(each):.2f} tokens a step" for each in figures)
