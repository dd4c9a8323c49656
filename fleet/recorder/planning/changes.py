"""Changed settings of a replay: text into the settings of planners and the policies of deployments. Pure."""

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar, get_args, get_type_hints

import msgspec

from fleet.recorder.planning.loops import InvalidSetting
from kernel.constraints import InvalidField

LONGEST_VALUE = 40
S = TypeVar("S")
P = TypeVar("P", bound=msgspec.Struct)


# --- settings of planners --------------------------------------------------------------------------------------------


def settings_changed(settings: S, changes: Mapping[str, str]) -> S:
    """Settings in groups are named `faults.close_after_s`. Raises InvalidSetting."""
    for name, value in changes.items():
        settings = _with_change(settings, name, name.split("."), value)
    return settings


def _with_change(part: Any, name: str, path: list[str], value: str) -> Any:
    first, *rest = path
    if rest:
        return replace(part, **{first: _with_change(getattr(part, first), name, rest, value)})
    return replace(part, **{first: _parsed(name, value, get_type_hints(type(part))[first])})


def names_of_settings(kind: Any, prefix: str = "") -> list[str]:
    """All settings of a dataclass, those in groups as `faults.close_after_s`."""
    found: list[str] = []
    hints = get_type_hints(kind)
    for one in fields(kind):
        hint = hints[one.name]
        found += names_of_settings(hint, f"{prefix}{one.name}.") if is_dataclass(hint) else [f"{prefix}{one.name}"]
    return found


def _parsed(name: str, value: str, hint: Any) -> Any:
    """Numbers and switches; finite and at least 0. Raises InvalidSetting."""
    kinds = get_args(hint) or (hint,)
    if bool in kinds and value in {"true", "false"}:
        return value == "true"
    if int not in kinds and float not in kinds:
        raise InvalidSetting(f"a replay cannot set {name}, which is a {hint}")
    is_whole = float not in kinds
    try:
        number = (int(value) if is_whole else float(value)) if len(value) <= LONGEST_VALUE else -1
    except ValueError:
        number = -1
    if not 0 <= number < float("inf"):
        noun = "a whole number" if is_whole else "a number"
        raise InvalidSetting(f"{name} is {noun} of at least 0, not {value[:LONGEST_VALUE]!r}")
    return number


# --- policies --------------------------------------------------------------------------------------------------------


def policy_changed(
    policy: P, changes: Mapping[str, str], parse: Callable[[Mapping[str, Any], P], P], *, loop: str
) -> P:
    """A policy with these fields. `parse`: of the noun that owns it; it knows the bounds. Raises InvalidSetting."""
    try:
        return parse({name: _scalar(value) for name, value in changes.items()}, policy) if changes else policy
    except InvalidField as wrong:
        raise InvalidSetting(f"{loop}.{wrong}") from None


def policy_names(kind: type[msgspec.Struct]) -> list[str]:
    return [one.name for one in msgspec.structs.fields(kind)]


def _scalar(text: str) -> Any:
    """A number, `true`, `false` or `null`; else the text."""
    if len(text) > LONGEST_VALUE:
        return text[:LONGEST_VALUE]
    try:
        value = msgspec.json.decode(text.encode())
    except (msgspec.DecodeError, UnicodeEncodeError):
        return text
    return text if isinstance(value, str | list | dict) else value
