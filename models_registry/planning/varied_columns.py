"""What a search may vary, and the columns of the draft that follow from one choice. Pure.

Of a version: `engine_options.NAME`, `parallelism.DEGREE` (of the instance type that is searched on), `max_concurrency`,
and the whole of `speculation`, `quantization` and `roles`. Whether an engine takes the values is judged where drafts
are written. Of its deployment: `cells`, a number of mixed ones or an object with `prefill`, `decode` and `mixed`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from models_registry.planning.parallelism import NAMES as DEGREES
from models_registry.planning.version_spec import VersionSpec

MOST_VALUES = 32
OBJECTS = ("speculation", "quantization", "roles")
CELLS = "cells"
"""How many cells its deployment has of each role: no column of a version."""
Cells = int | Mapping[str, int]
"""As the API of deployments takes them."""
_POOLS = ("prefill", "decode", "mixed")
WHOLE = ("max_concurrency", *OBJECTS, CELLS)
PLACES, BUDGET = ("engine_options.max_num_seqs", "max_concurrency"), "engine_options.max_num_batched_tokens"
"""How many requests an engine runs at once: the first that is stated. How many tokens a step has at most."""
LIMITS = frozenset({*PLACES, BUDGET})
"""Bound what a step has, and do not change what it costs."""


class InvalidVaried(ValueError):
    """What may not be varied so; the text names it and says what would be right."""


def parse_varied(stated: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """What is varied, by name, each with its values.

    Raises:
        InvalidVaried: nothing, an unknown name, no list of values, or a value twice.
    """
    if not stated:
        raise InvalidVaried("nothing is varied; name something, such as engine_options.max_num_seqs: [32, 64]")
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
            f"{CELLS} has {value!r}; each value must be a whole number of mixed cells, or an object with prefill and "
            "decode from 1, and mixed where there are such cells"
        )


def varied_columns(base: VersionSpec, choice: Iterable[tuple[str, Any]], instance_type: str) -> dict[str, Any]:
    """The columns in which the choice's draft differs from its base. Of an option null takes it away. Where the version
    serves on other instance types too, it stays there as it is: what differs is then stated in `by_type`.

    Raises:
        InvalidVersion: the base is not served on this instance type.
    """
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
            if not _same(there.engine_options.get(spelt), value):
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


def _same(one: Any, other: Any) -> bool:
    """As engines see it: `True` is not 1."""
    return bool(one == other) and isinstance(one, bool) == isinstance(other, bool)


def cells_of(choice: Iterable[tuple[str, Any]]) -> Cells | None:
    """The cells that its deployment has, as its API takes them; None: the choice does not say."""
    stated = dict(choice).get(CELLS)
    return dict(stated) if isinstance(stated, Mapping) else stated


def cells_count(cells: Cells) -> int:
    return cells if isinstance(cells, int) else sum(cells.values())


def is_apart(choice: Iterable[tuple[str, Any]]) -> bool:
    """Whether some of its cells read prompts for others."""
    return isinstance(dict(choice).get(CELLS), Mapping)


def places_of(choice: Iterable[tuple[str, Any]], usual: int) -> int:
    """Requests that an engine of this choice runs at once; `usual`: as its base does."""
    stated = dict(choice)
    return next((int(stated[name]) for name in PLACES if isinstance(stated.get(name), int)), usual)


def budget_of(choice: Iterable[tuple[str, Any]]) -> int | None:
    """Tokens of a step at most; None: the choice does not say."""
    stated = dict(choice).get(BUDGET)
    return stated if isinstance(stated, int) and not isinstance(stated, bool) else None


def choice_text(choice: Iterable[tuple[str, Any]]) -> str:
    """In a line: `max_num_seqs=32, tp=2`."""
    return ", ".join(f"{name.rpartition('.')[2]}={_value_text(value)}" for name, value in choice) or "as it is"


def _value_text(value: Any) -> str:
    if isinstance(value, Mapping) and value.keys() & {"prefill"} and isinstance(value["prefill"], int):
        return split_text(value["prefill"], value.get("decode", 0), value.get("mixed", 0))
    if isinstance(value, Mapping):
        return str(value.get("method") or value.get("kind") or dict(value)) if value else "none"
    return "left out" if value is None else str(value)


def split_text(prefill: int, decode: int, mixed: int = 0) -> str:
    """As people write it: `1p+3d`, `1p+3d+2m`."""
    return f"{prefill}p+{decode}d" + (f"+{mixed}m" if mixed else "")


class FrozenObject(Mapping[str, Any]):
    """An object of JSON that can be part of a key, and is never changed."""

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
    """A choice as it is stored, in a form that can be a key."""
    return tuple((name, FrozenObject(value) if isinstance(value, Mapping) else value) for name, value in pairs)
