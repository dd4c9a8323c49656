"""The values of an engine's variables, which may be secrets (`HF_TOKEN`): who only looks sees their names. Pure."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from models_registry.planning.diff import Line, VersionDiff

FIELD = "engine_env"
HIDDEN = "(hidden)"


def is_variable(path: str) -> bool:
    """Whether a dotted path names the variables, or one of them."""
    return path == FIELD or path.startswith(f"{FIELD}.")


def names_only(value: Any) -> Any:
    """Variables, or the value of one, as who only looks sees it; what is not there stays so."""
    if isinstance(value, Mapping):
        return dict.fromkeys(value, HIDDEN)
    return value if value is None else HIDDEN


def diff_without_values(diff: VersionDiff) -> VersionDiff:
    """A difference that says which variables differ, and not in what."""
    return replace(diff, fields=tuple(_line_without_value(line) for line in diff.fields))


def _line_without_value(line: Line) -> Line:
    if not is_variable(line.name):
        return line
    return replace(line, before=names_only(line.before), after=names_only(line.after))
