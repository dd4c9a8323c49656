"""The values of an engine's variables, which may be secrets (`HF_TOKEN`): who only looks sees their names. Pure."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from models_registry.planning.diff import Line, VersionDiff

FIELD, BY_TYPE = "engine_env", "by_type"
HIDDEN = "(hidden)"


def without_values(path: str, value: Any) -> Any:
    """What a version says at a dotted path, as who only looks sees it: variables by their names, also those that
    `by_type` states. What is not there stays so."""
    if path == BY_TYPE and isinstance(value, Mapping):
        return {kind: _of_type(stated) for kind, stated in value.items()}
    return _names_only(value) if _is_variable(path) else value


def diff_without_values(diff: VersionDiff) -> VersionDiff:
    """A difference that says which variables differ, and not in what."""
    return replace(diff, fields=tuple(map(_line_without_value, diff.fields)))


def _line_without_value(line: Line) -> Line:
    return replace(line, before=without_values(line.name, line.before), after=without_values(line.name, line.after))


def _is_variable(path: str) -> bool:
    """Names of instance types have dots, so that of the field is looked for behind them."""
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
