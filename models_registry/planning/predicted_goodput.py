"""Predicts the goodput of configurations that nobody measured, from what points of others of their shape tell of a
step. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from models_registry.planning.configuration_search import Choice, shape_of
from models_registry.planning.step_model import LoadedStep, NoFit, StepModel, fit_loaded_steps
from models_registry.planning.varied_columns import budget_of, is_apart, places_of
from models_registry.planning.workload import Slo


@dataclass(frozen=True, slots=True)
class MeasuredShape:
    """Points of configurations of one shape. `prompt`, `output`: tokens of a request, on average. `cells_per_chip`:
    requests of a cell by it are those of a chip."""

    points: tuple[LoadedStep, ...]
    prompt: float
    output: float
    cells_per_chip: float


@dataclass(frozen=True, slots=True)
class Usual:
    """What the version that is searched around has where a choice does not say: requests at once, tokens of a step."""

    places: int
    step_tokens: int | None = None


def predict_goodput(
    choices: Iterable[Choice], shapes: Mapping[str, MeasuredShape], slo: Slo, usual: Usual
) -> dict[Choice, float]:
    """Goodput per chip of those whose shape was measured, as far as its points tell what a step costs. Of cells apart
    it tells nothing: what bounds them is now the one role, now the other."""
    models = {name: model for name, shape in shapes.items() if (model := _model(shape)) is not None}
    found: dict[Choice, float] = {}
    for choice in choices:
        shape, model = shapes.get(shape_of(choice)), models.get(shape_of(choice))
        if shape is None or model is None or is_apart(choice):
            continue
        tokens = budget_of(choice)
        a_cell = model.goodput(
            shape.prompt,
            shape.output,
            slo,
            places_of(choice, usual.places),
            usual.step_tokens if tokens is None else tokens,
        )
        found[choice] = a_cell * shape.cells_per_chip
    return found


def _model(shape: MeasuredShape) -> StepModel | None:
    try:
        return fit_loaded_steps(shape.points, shape.prompt)
    except NoFit:
        return None
