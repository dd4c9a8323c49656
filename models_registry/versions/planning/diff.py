"""Compares two versions of a model: their fields, and a cell of each on every instance type. Objects are compared key
by key, so that one changed number in a long option is visible. Also hides values of the engine's variables from
viewers, because they may be secrets (`HF_TOKEN`). Pure: it never rates a difference."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

from models_registry.instance_types.planner import InstanceShape
from models_registry.versions.planning.engine_arguments import Rendering, render_version
from models_registry.versions.planning.spec import InvalidVersion, VersionSpec

LEFT_OUT = ("model", "version", "allowances", "differs_on")
SHOWN_APART = ("parallelism", "heads")
"""`parallelism` is shown with the rendered cells; `heads` under its names in the API."""


NOT_NAMED = "it does not name this instance type"


class Change(StrEnum):
    SAME = "same"
    CHANGED = "changed"
    ADDED = "added"
    REMOVED = "removed"


@dataclass(frozen=True, slots=True)
class Line:
    """One name with its value on both sides, None if a side has none."""

    name: str
    before: Any
    after: Any
    change: Change


@dataclass(frozen=True, slots=True)
class InstanceTypeDiff:
    """An instance type that at least one version names. `problem_…`: why no cell of a version is possible there; then
    it has no degrees and no arguments."""

    instance_type: str
    problem_before: str
    problem_after: str
    degrees: tuple[Line, ...]
    arguments: tuple[Line, ...]

    @property
    def change(self) -> Change:
        changed = any(line.change is not Change.SAME for line in (*self.degrees, *self.arguments))
        return Change.CHANGED if changed or self.problem_before != self.problem_after else Change.SAME


@dataclass(frozen=True, slots=True)
class VersionDiff:
    """`before` is the version that `after` is compared with."""

    before: str
    after: str
    fields: tuple[Line, ...]
    instance_types: tuple[InstanceTypeDiff, ...]

    @property
    def same(self) -> bool:
        """Whether cells of both are equal in every stated field."""
        changes = [line.change for line in self.fields] + [kind.change for kind in self.instance_types]
        return all(change is Change.SAME for change in changes)


def diff_versions(before: VersionSpec, after: VersionSpec, machines: Mapping[str, InstanceShape]) -> VersionDiff:
    """Compare two versions, on the machines that there are."""
    kinds = sorted({*before.parallelism, *after.parallelism})
    return VersionDiff(
        before=before.reference,
        after=after.reference,
        fields=_lines(stated_fields(before), stated_fields(after)),
        instance_types=tuple(_instance_type(before, after, kind, machines) for kind in kinds),
    )


def stated_fields(spec: VersionSpec) -> dict[str, Any]:
    """A version's engine, artifacts and prompts by dotted name, without empty fields."""
    stated = {name: value for name, value in asdict(spec).items() if name not in (*LEFT_OUT, *SHOWN_APART)}
    stated |= {"attention_heads": spec.heads.attention, "kv_heads": spec.heads.kv, "layers": spec.heads.layers}
    stated["golden_prompts"] = [{"prompt": prompt, "expect": expect} for prompt, expect in spec.golden_prompts]
    stated["adapters"] = [
        {name: value for name, value in one.items() if value not in (None, "")} for one in spec.adapters
    ]
    return dict(_flat("", {name: value for name, value in stated.items() if value not in (None, "", {}, [])}))


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """`{"a": {"b": 1}, "c": [{"d": 2}]}` -> `a.b` 1, `c.1.d` 2. Lists of plain values stay whole."""
    if isinstance(value, Mapping) and value:
        for key, part in value.items():
            yield from _flat(f"{name}.{key}" if name else str(key), part)
    elif isinstance(value, list) and value and all(isinstance(part, Mapping) for part in value):
        for index, part in enumerate(value, start=1):
            yield from _flat(f"{name}.{index}", part)
    else:
        yield name, value


def _lines(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[Line, ...]:
    return tuple(_line(name, before, after) for name in sorted({*before, *after}))


def _line(name: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> Line:
    if name not in before:
        change = Change.ADDED
    elif name not in after:
        change = Change.REMOVED
    else:
        change = Change.SAME if equal_for_engines(before[name], after[name]) else Change.CHANGED
    return Line(name, before.get(name), after.get(name), change)


def equal_for_engines(one: Any, other: Any) -> bool:
    """Compares as engines do: `True` is not 1."""
    return bool(one == other) and isinstance(one, bool) == isinstance(other, bool)


def _instance_type(
    before: VersionSpec, after: VersionSpec, kind: str, machines: Mapping[str, InstanceShape]
) -> InstanceTypeDiff:
    (old, problem_before), (new, problem_after) = (_rendered(spec, kind, machines) for spec in (before, after))
    return InstanceTypeDiff(
        instance_type=kind,
        problem_before=problem_before,
        problem_after=problem_after,
        degrees=_lines(_degrees(before, kind, old), _degrees(after, kind, new)),
        arguments=_lines(_arguments(old), _arguments(new)),
    )


def _rendered(spec: VersionSpec, kind: str, machines: Mapping[str, InstanceShape]) -> tuple[Rendering | None, str]:
    if kind not in spec.parallelism:
        return None, NOT_NAMED
    if kind not in machines:
        return None, "this instance type does not exist"
    try:
        return render_version(spec, machines[kind]), ""
    except InvalidVersion as error:
        return None, str(error).removeprefix(f"{spec.reference}: ").removeprefix(f"{spec.reference} on {kind}: ")


def _degrees(spec: VersionSpec, kind: str, rendering: Rendering | None) -> dict[str, Any]:
    """As rendered, with other fields that the version states there; as stated if it cannot be rendered."""
    stated = dict(spec.parallelism.get(kind, {}))
    return {**stated, **asdict(rendering.degrees)} if rendering else stated


def _arguments(rendering: Rendering | None) -> dict[str, Any]:
    return dict(_flat("", arguments_by_flag(rendering.plan.args))) if rendering else {}


def arguments_by_flag(arguments: Sequence[str]) -> dict[str, Any]:
    """`("--a", "1", "--b")` -> `{"--a": "1", "--b": True}`; values that are JSON objects are read."""
    by_flag: dict[str, Any] = {}
    for index, argument in enumerate(arguments):
        if argument.startswith("--"):
            value = arguments[index + 1] if index + 1 < len(arguments) else "--"
            by_flag[argument] = True if value.startswith("--") else _value(value)
    return by_flag


def _value(text: str) -> Any:
    if not text.startswith("{"):
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


FIELD, BY_TYPE = "engine_env", "by_type"
HIDDEN = "(hidden)"


def without_values(path: str, value: Any) -> Any:
    """A version's value at a dotted path, as viewers see it: only names of variables, also in `by_type`. Missing values
    stay missing."""
    if path == BY_TYPE and isinstance(value, Mapping):
        return {kind: _of_type(stated) for kind, stated in value.items()}
    return _names_only(value) if _is_variable(path) else value


def diff_without_values(diff: VersionDiff) -> VersionDiff:
    """A diff that names changed variables without their values."""
    return replace(diff, fields=tuple(map(_line_without_value, diff.fields)))


def _line_without_value(line: Line) -> Line:
    return replace(line, before=without_values(line.name, line.before), after=without_values(line.name, line.after))


def _is_variable(path: str) -> bool:
    """Instance types have dots in their names, so the field name is searched after them."""
    is_of_type = path.startswith(f"{BY_TYPE}.") and f".{FIELD}." in f"{path}."
    return is_of_type or path == FIELD or path.startswith(f"{FIELD}.")


def _of_type(stated: Any) -> Any:
    if not isinstance(stated, Mapping):
        return stated
    return {name: _names_only(value) if name == FIELD else value for name, value in stated.items()}


def _names_only(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict.fromkeys(value, HIDDEN)
    return value if value is None else HIDDEN
