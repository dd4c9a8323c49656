"""Decides which configuration of a version to measure next, for the best goodput per chip. Candidates are the product
of the varied values. The first of each shape (all that determines the cost of a step) is measured; a step model
predicts the rest of its shape, and those predicted far below the best are pruned. Successive halving (Jamieson and
Talwalkar 2016) measures the others with points of 25 % of their length, the better half with 50 %, and the better half
of these in full. Pure: it never measures and never checks whether an engine accepts the values."""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import product
from typing import Any

from models_registry.versions.planning.diff import equal_for_engines
from models_registry.versions.planning.machines import NAMES as DEGREES
from models_registry.versions.planning.spec import VersionSpec

MOST_VALUES = 32
OBJECTS = ("speculation", "quantization", "roles")
CELLS = "cells"
"""Number of cells per role: a field of the deployment, not of a version."""
Cells = int | Mapping[str, int]
"""As in the API of deployments."""
_POOLS = ("prefill", "decode", "mixed")
WHOLE = ("max_concurrency", *OBJECTS, CELLS)
PLACES, BUDGET = ("engine_options.max_num_seqs", "max_concurrency"), "engine_options.max_num_batched_tokens"
"""Options for concurrent requests of an engine (the first stated one counts), and for tokens per step."""
LIMITS = frozenset({*PLACES, BUDGET})
"""They limit a step and do not change its cost."""


class InvalidVaried(ValueError):
    """The varied parameters cannot be read; the text names the error and the expected form."""


def parse_varied(stated: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """Varied parameters by name, each with its values. Raises InvalidVaried if it is empty, or has an unknown name, a
    value that is not a list, or a duplicate."""
    if not stated:
        raise InvalidVaried("nothing is varied; name a parameter, such as engine_options.max_num_seqs: [32, 64]")
    return {_name(name): _values(name, values) for name, values in stated.items()}


def _name(name: str) -> str:
    column, dot, inner = name.partition(".")
    if name in WHOLE or (column == "engine_options" and inner):
        return f"{column}{dot}{inner.replace('-', '_')}" if dot else name
    if column == "parallelism" and inner in DEGREES:
        return name
    degrees = ", ".join(f"parallelism.{degree}" for degree in DEGREES)
    raise InvalidVaried(
        f"{name[:60]!r} cannot be varied; it must be engine_options.NAME, {degrees}, {', '.join(WHOLE)}"
    )


def _values(name: str, values: Any) -> tuple[Any, ...]:
    if not isinstance(values, Sequence) or isinstance(values, str) or not 1 <= len(values) <= MOST_VALUES:
        raise InvalidVaried(f"{name} must have a list of 1 to {MOST_VALUES} values")
    for value in values:
        _check(name, value)
    if any(value in values[:place] for place, value in enumerate(values)):
        raise InvalidVaried(f"{name} has a value twice")
    return tuple(values)


def _check(name: str, value: Any) -> None:
    if name == CELLS and isinstance(value, Mapping):
        _check_pools(value)
    elif name in OBJECTS:
        if not isinstance(value, Mapping):
            raise InvalidVaried(f"{name} has {value!r}; each value must be an object, {{}} for none")
    elif name.startswith("parallelism") or name in ("max_concurrency", CELLS):
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 100_000:
            raise InvalidVaried(f"{name} has {value!r}; each value must be a whole number from 1")
    elif not isinstance(value, str | int | float | bool) and value is not None:
        raise InvalidVaried(
            f"{name} has {value!r}; each value must be a number, a text, true, false or null (left out)"
        )


def _check_pools(value: Mapping[str, Any]) -> None:
    counts = [value.get(name, 0) for name in _POOLS]
    is_whole = all(isinstance(count, int) and not isinstance(count, bool) and 0 <= count <= 100_000 for count in counts)
    if value.keys() - set(_POOLS) or not is_whole or not all(counts[:2]):
        raise InvalidVaried(
            f"{CELLS} has {value!r}; each value must be a number of mixed cells, or an object with prefill "
            "and decode from 1, and optionally mixed"
        )


def varied_columns(base: VersionSpec, choice: Iterable[tuple[str, Any]], instance_type: str) -> dict[str, Any]:
    """The columns in which the choice's draft differs from its base. A null option removes it. If the version names
    other instance types, the differences go to `by_type`, so that those stay unchanged. Raises InvalidVersion if the
    base does not name this instance type."""
    there = base.on(instance_type)
    degrees: dict[str, Any] = {}
    options: dict[str, Any] = {}
    whole: dict[str, Any] = {}
    for name, value in choice:
        column, _, inner = name.partition(".")
        if name == CELLS:
            continue
        if column == "parallelism":
            degrees[inner] = value
        elif inner:
            spelt = next((known for known in there.engine_options if known.replace("-", "_") == inner), inner)
            if not equal_for_engines(there.engine_options.get(spelt), value):
                options[spelt] = value
        elif getattr(there, name) != value:
            whole[name] = dict(value) if isinstance(value, Mapping) else value
    columns: dict[str, Any] = {}
    if not degrees.items() <= there.parallelism[instance_type].items():
        columns["parallelism"] = {
            **base.parallelism, instance_type: {**base.parallelism[instance_type], **degrees}
        }  # fmt: skip
    if base.instance_types == (instance_type,) and not base.by_type:
        return columns | whole | ({"engine_options": _laid_over(base.engine_options, options)} if options else {})
    if options or whole:
        columns["by_type"] = {**base.by_type, instance_type: _stated(base, instance_type, options, whole)}
    return columns


def _stated(
    base: VersionSpec, instance_type: str, options: Mapping[str, Any], whole: Mapping[str, Any]
) -> dict[str, Any]:
    before = base.by_type.get(instance_type, {})
    laid = {"engine_options": {**before.get("engine_options", {}), **options}} if options else {}
    return {**before, **whole, **laid}


def _laid_over(before: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in {**before, **options}.items() if value is not None}


def cells_of(choice: Iterable[tuple[str, Any]]) -> Cells | None:
    """The cells of this choice, as in the API of deployments; None if it does not vary them."""
    stated = dict(choice).get(CELLS)
    return dict(stated) if isinstance(stated, Mapping) else stated


def cells_count(cells: Cells) -> int:
    return cells if isinstance(cells, int) else sum(cells.values())


def is_apart(choice: Iterable[tuple[str, Any]]) -> bool:
    """Whether the configuration has prefill cells."""
    return isinstance(dict(choice).get(CELLS), Mapping)


def places_of(choice: Iterable[tuple[str, Any]], usual: int) -> int:
    """Concurrent requests of an engine with this choice; `usual`: those of its base."""
    stated = dict(choice)
    return next((int(stated[name]) for name in PLACES if isinstance(stated.get(name), int)), usual)


def budget_of(choice: Iterable[tuple[str, Any]]) -> int | None:
    """Maximum tokens of a step; None if the choice does not set it."""
    stated = dict(choice).get(BUDGET)
    return stated if isinstance(stated, int) and not isinstance(stated, bool) else None


def choice_text(choice: Iterable[tuple[str, Any]]) -> str:
    """One line: `max_num_seqs=32, tp=2`."""
    return ", ".join(f"{name.rpartition('.')[2]}={_value_text(value)}" for name, value in choice) or "unchanged"


def _value_text(value: Any) -> str:
    if isinstance(value, Mapping) and value.keys() & {"prefill"} and isinstance(value["prefill"], int):
        return split_text(value["prefill"], value.get("decode", 0), value.get("mixed", 0))
    if isinstance(value, Mapping):
        return str(value.get("method") or value.get("kind") or dict(value)) if value else "none"
    return "left out" if value is None else str(value)


def split_text(prefill: int, decode: int, mixed: int = 0) -> str:
    """Cells by role as displayed: `1p+3d`, `1p+3d+2m`."""
    return f"{prefill}p+{decode}d" + (f"+{mixed}m" if mixed else "")


class FrozenObject(Mapping[str, Any]):
    """An immutable JSON object, which can be part of a key."""

    def __init__(self, stated: Mapping[str, Any]) -> None:
        self._stated = dict(stated)

    def __getitem__(self, name: str) -> Any:
        return self._stated[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._stated)

    def __len__(self) -> int:
        return len(self._stated)

    def __hash__(self) -> int:
        return hash(repr(sorted(self._stated.items())))

    def __repr__(self) -> str:
        return repr(self._stated)


def frozen_choice(pairs: Iterable[Sequence[Any]]) -> tuple[tuple[str, Any], ...]:
    return tuple((name, FrozenObject(value) if isinstance(value, Mapping) else value) for name, value in pairs)


FIDELITIES = (0.25, 0.5, 1.0)
HOPEFUL_SHARE = 0.7
"""Share of the best goodput below which candidates are pruned; a fitted model errs by less than the rest."""
MOST_CANDIDATES = 512

Choice = tuple[tuple[str, Any], ...]
"""Differences from the base version by name, in the order in which they were stated."""
Measured = Mapping[tuple[Choice, float], float]
"""Goodput per chip by choice and fidelity, 0 if no rate held."""


class TooMany(ValueError):
    """There are more configurations than a search accepts."""


class Standing(StrEnum):
    WAITING = "waiting"
    UNMEASURED = "unmeasured"
    """The search ended before it was measured."""
    PRUNED = "pruned"
    DROPPED = "dropped"
    REFUSED = "refused"
    LEFT = "left"


@dataclass(frozen=True, slots=True)
class SearchLimits:
    most_trials: int = 40
    most_s: float = 12 * 3600.0


@dataclass(frozen=True, slots=True)
class Spent:
    trials: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Trial:
    """Measure this choice with points of this share of their length."""

    choice: Choice
    fidelity: float
    reason: str


@dataclass(frozen=True, slots=True)
class Searched:
    """The search is over. `choice` is None if no rate held. `is_whole`: it ended within its limits."""

    choice: Choice | None
    reason: str
    is_whole: bool = True


def choices_of(varied: Mapping[str, Sequence[Any]]) -> tuple[Choice, ...]:
    """Every combination, in a fixed order. Raises TooMany if there are more than a search accepts."""
    count = math.prod(len(values) for values in varied.values())
    if count > MOST_CANDIDATES:
        raise TooMany(f"{count} combinations; a search accepts {MOST_CANDIDATES}: vary fewer options")
    return tuple(tuple(zip(varied, values, strict=True)) for values in product(*varied.values()))


def shape_of(choice: Choice) -> str:
    """Equal for configurations whose steps cost the same and that differ only in limits."""
    return repr([(name, value) for name, value in choice if name not in LIMITS])


def plan_search(
    choices: Sequence[Choice],
    predicted: Mapping[Choice, float],
    measured: Measured,
    limits: SearchLimits = SearchLimits(),
    spent: Spent = Spent(),
) -> Trial | Searched:
    """The next trial, or the end. `choices`: those that can be measured. `predicted`: goodput per chip of unmeasured
    choices that a step model covers."""
    for fidelity, left in _halving_rounds(choices, predicted, measured):
        waiting = [choice for choice in left if (choice, fidelity) not in measured]
        if not waiting:
            continue
        if told := _exceeded(limits, spent):
            return _cut_short(choices, measured, told)
        pruned = len(choices) - len(hopeful(choices, predicted, measured))
        words = f"{len(left)} configurations at {fidelity:.0%} of the length, {len(waiting)} to go"
        choice = (
            min(waiting, key=lambda one: _measuring_order(one, predicted, measured))
            if fidelity == FIDELITIES[0]
            else waiting[0]
        )
        return Trial(choice, fidelity, words + (f"; {pruned} pruned by prediction" if pruned else ""))
    return _searched(choices, predicted, measured)


def hopeful(choices: Sequence[Choice], predicted: Mapping[Choice, float], measured: Measured) -> tuple[Choice, ...]:
    """Candidates that are measured or worth measuring, best first. Those without a prediction are kept."""
    known = {
        choice: value for choice in choices if (value := _best_known_score(choice, predicted, measured)) is not None
    }
    best = max(known.values(), default=0.0)
    kept = [
        choice
        for choice in choices
        if (choice, FIDELITIES[0]) in measured or known.get(choice, best) >= HOPEFUL_SHARE * best
    ]
    return tuple(sorted(kept, key=lambda choice: -known.get(choice, best)))


def standings(
    choices: Sequence[Choice],
    predicted: Mapping[Choice, float],
    measured: Measured,
    refused: Mapping[Choice, str],
    *,
    is_over: bool = False,
) -> dict[Choice, tuple[Standing, str]]:
    """State of each configuration, with the reason. `refused`: why a choice cannot be measured. `is_over`: no further
    one will be measured."""
    found: dict[Choice, tuple[Standing, str]] = {choice: (Standing.REFUSED, why) for choice, why in refused.items()}
    there = [choice for choice in choices if choice not in refused]
    kept = hopeful(there, predicted, measured)
    best = max(
        (value for one in there if (value := _best_known_score(one, predicted, measured)) is not None), default=0.0
    )
    for choice in set(there) - set(kept):
        told = f"predicted {predicted[choice]:.4g}/s per chip, below {HOPEFUL_SHARE:.0%} of the best, {best:.4g}"
        found[choice] = (Standing.PRUNED, told)
    before: tuple[Choice, ...] = ()
    for fidelity, left in _halving_rounds(there, predicted, measured):
        for choice in set(before) - set(left):
            shorter = FIDELITIES[FIDELITIES.index(fidelity) - 1]
            value = measured[choice, shorter]
            told = f"{value:.4g}/s per chip at {shorter:.0%} of the length, not in the better half"
            found[choice] = (Standing.DROPPED, told)
        for choice in left:
            found[choice] = _standing(choice, fidelity, predicted, measured, is_over=is_over)
        before = left
    return found


def _standing(
    choice: Choice, fidelity: float, predicted: Mapping[Choice, float], measured: Measured, *, is_over: bool
) -> tuple[Standing, str]:
    if (choice, fidelity) in measured:
        return Standing.LEFT, f"{measured[choice, fidelity]:.4g}/s per chip at {fidelity:.0%} of the length"
    told = f", {predicted[choice]:.4g}/s per chip predicted" if choice in predicted else ""
    if is_over:
        return Standing.UNMEASURED, f"the search ended before it was measured at {fidelity:.0%} of the length{told}"
    return Standing.WAITING, f"to be measured at {fidelity:.0%} of the length{told}"


def _halving_rounds(
    choices: Sequence[Choice], predicted: Mapping[Choice, float], measured: Measured
) -> Iterator[tuple[float, tuple[Choice, ...]]]:
    """Each round that has begun: its fidelity and its choices."""
    left = hopeful(choices, predicted, measured)
    for fidelity in FIDELITIES:
        yield fidelity, left
        if any((choice, fidelity) not in measured for choice in left):
            return
        ranked = sorted(left, key=lambda choice, f=fidelity: -measured[choice, f])  # type: ignore[misc]
        left = tuple(ranked[: math.ceil(len(ranked) / 2)])


def _measuring_order(choice: Choice, predicted: Mapping[Choice, float], measured: Measured) -> tuple[bool, bool, float]:
    """First one of each shape, with the widest limits because it sees most loads; then those without a prediction."""
    shapes = {shape_of(other) for other, _ in measured}
    widest = math.prod(value for name, value in choice if name in LIMITS and isinstance(value, int) and value > 0)
    return shape_of(choice) in shapes, choice in predicted, -float(widest)


def _best_known_score(choice: Choice, predicted: Mapping[Choice, float], measured: Measured) -> float | None:
    """The score of the longest measurement, else the prediction."""
    for fidelity in reversed(FIDELITIES):
        if (choice, fidelity) in measured:
            return measured[choice, fidelity]
    return predicted.get(choice)


def _searched(choices: Sequence[Choice], predicted: Mapping[Choice, float], measured: Measured) -> Searched:
    last: tuple[Choice, ...] = ()
    for _, left in _halving_rounds(choices, predicted, measured):
        last = left
    ranked = sorted(last, key=lambda choice: -measured[choice, FIDELITIES[-1]])
    if not ranked or measured[ranked[0], FIDELITIES[-1]] <= 0:
        return Searched(None, "no configuration met the objective at any rate")
    second = f", {measured[ranked[1], FIDELITIES[-1]]:.4g} for the next best" if len(ranked) > 1 else ""
    found = measured[ranked[0], FIDELITIES[-1]]
    return Searched(ranked[0], f"{found:.4g} requests per second and chip{second}")


def _exceeded(limits: SearchLimits, spent: Spent) -> str:
    if spent.trials >= limits.most_trials:
        return f"after {spent.trials} trials, the limit of this search"
    if spent.seconds >= limits.most_s:
        return f"after {spent.seconds / 3600:.1f} hours, the limit of this search"
    return ""


def _cut_short(choices: Sequence[Choice], measured: Measured, told: str) -> Searched:
    """The best of the longest measurements."""
    for fidelity in reversed(FIDELITIES):
        of_round = {choice: measured[choice, fidelity] for choice in choices if measured.get((choice, fidelity), 0) > 0}
        if of_round:
            best = max(of_round, key=lambda choice: of_round[choice])
            reason = f"{of_round[best]:.4g} requests per second and chip at {fidelity:.0%} of the length, {told}"
            return Searched(best, reason, is_whole=False)
    return Searched(None, f"no configuration met the objective {told}", is_whole=False)


def without(choices: Sequence[Choice], refused: Collection[Choice]) -> tuple[Choice, ...]:
    return tuple(choice for choice in choices if choice not in refused)
