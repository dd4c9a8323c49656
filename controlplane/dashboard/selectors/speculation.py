"""What a version guesses and what its newest calibration says of that, for its page."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from models_registry.models import ModelVersion
from models_registry.selectors.calibration import latest_calibration

TREE_SIZES = (7, 15, 31, 63)


@dataclass(frozen=True, slots=True)
class TaskRow:
    """`heads`: of each, the share at which its first guess was right, and one of its first ten. `chain` and `tree`:
    size and tokens of a step."""

    name: str
    positions: int
    heads: tuple[tuple[float, float], ...]
    chain: tuple[tuple[int, float], ...]
    tree: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class ChoiceRow:
    """`ranges`: first batch size, and how many tokens are guessed from it on."""

    task: str
    instance_type: str
    source: str
    tokens: int
    gain: float
    ranges: tuple[tuple[int, int], ...]
    reason: str


@dataclass(frozen=True, slots=True)
class SpeculationView:
    """`method` empty: it guesses nothing. `calibrated_at` None: nobody has calibrated it."""

    reference: str
    method: str
    is_medusa: bool
    calibrated_at: datetime | None
    actor: str
    tasks: tuple[TaskRow, ...]
    choices: tuple[ChoiceRow, ...]


def version_speculation(version: ModelVersion) -> SpeculationView:
    """The newest calibration, in one query."""
    method = str(version.speculation.get("method", ""))
    found = latest_calibration(version) if method else None
    return SpeculationView(
        reference=version.reference,
        method=method,
        is_medusa=method == "medusa",
        calibrated_at=found.created_at if found else None,
        actor=found.actor if found else "",
        tasks=tuple(map(_task, found.figures)) if found else (),
        choices=tuple(map(_choice, found.choices)) if found else (),
    )


def _task(figures: dict[str, Any]) -> TaskRow:
    tree = figures["tree"]
    return TaskRow(
        figures["name"],
        figures["positions"],
        tuple((ranks[0], sum(ranks)) for ranks in figures["accuracies"]),
        tuple(enumerate(figures["chain"]))[1:],
        tuple((size, tree[size]) for size in TREE_SIZES if size < len(tree)),
    )


def _choice(chosen: dict[str, Any]) -> ChoiceRow:
    ranges = tuple((first, tokens) for first, _, tokens in chosen["ranges"])
    return ChoiceRow(
        chosen["task"],
        chosen["instance_type"],
        chosen["source"],
        chosen["tokens"],
        chosen["gain"],
        ranges,
        chosen["reason"],
    )
