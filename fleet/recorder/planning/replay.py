"""Runs recorded rounds again with the same pure planners, or with other settings, and compares the decisions. What a
setting would have done to the fleet afterwards is a question for a forecast: each round is decided on its recorded
inputs."""

import difflib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, get_args, get_type_hints

from fleet.reconcile.planning.decisions import Decision
from fleet.reconcile.planning.planner import PLANNERS
from fleet.reconcile.planning.settings import FleetSettings
from fleet.recorder.planning.encoding import Round, canonical

SETTINGS_MOST = 20
LONGEST_VALUE = 40


class InvalidSetting(ValueError):
    """A setting that does not exist, or a value that it cannot have; the text says what would be right."""


@dataclass(frozen=True, slots=True)
class Compared:
    """A decision of a round. `recorded` and `replayed`: whether it was made then and now; `applied`: then."""

    planner: str
    decision: Decision
    recorded: bool
    replayed: bool
    applied: bool


@dataclass(frozen=True, slots=True)
class ReplayedRound:
    round: Round
    compared: tuple[Compared, ...]

    @property
    def is_same(self) -> bool:
        return all(one.recorded and one.replayed for one in self.compared)


def replay(one: Round, changes: Mapping[str, str] | None = None) -> ReplayedRound:
    """Decides a round again. Without changes only the planners that had a turn run; with changes the round ends, as in
    a pass, at the first planner that decides anything. Raises InvalidSetting."""
    settings = with_changes(one.settings, changes or {})
    recorded = {part.planner: part for part in one.decided}
    compared: list[Compared] = []
    turns = len(one.decided)
    for planner in PLANNERS:
        part = recorded.get(planner.__name__)
        decided = planner(one.view, settings, one.now)
        then = list(zip(part.decisions, part.applied, strict=True)) if part else []
        compared += _compared(planner.__name__, then, decided)
        turns -= part is not None
        if (decided and changes) or (not turns and not changes):
            break
    seen = {each.planner for each in compared}
    for part in one.decided:
        if part.planner not in seen and part.decisions:
            compared += _compared(part.planner, list(zip(part.decisions, part.applied, strict=True)), ())
    return ReplayedRound(one, tuple(compared))


def _compared(planner: str, then: Iterable[tuple[Decision, bool]], decided: Iterable[Decision]) -> Iterator[Compared]:
    """Decisions of then in their order, and then those that only this run has."""
    now: dict[tuple[type, bytes], list[Decision]] = defaultdict(list)
    for decision in decided:
        now[type(decision), canonical(decision)].append(decision)
    for decision, applied in then:
        same = now[type(decision), canonical(decision)]
        yield Compared(planner, decision, recorded=True, replayed=bool(same and same.pop()), applied=applied)
    for decision in (one for left in now.values() for one in left):
        yield Compared(planner, decision, recorded=False, replayed=True, applied=False)


# --- settings --------------------------------------------------------------------------------------------------------


def with_changes(settings: FleetSettings, changes: Mapping[str, str]) -> FleetSettings:
    """`changes`: names, such as `lost_after_s` or `faults.close_after_s`, with values as text. Raises
    InvalidSetting."""
    if len(changes) > SETTINGS_MOST:
        raise InvalidSetting(f"{len(changes)} settings; the limit is {SETTINGS_MOST}")
    for name, value in changes.items():
        settings = _with_change(settings, name, name.split("."), value)
    return settings


def _with_change(part: Any, name: str, path: list[str], value: str) -> Any:
    first, *rest = path
    known = {one.name for one in fields(part)}
    if first not in known or bool(rest) is not is_dataclass(getattr(part, first)):
        raise InvalidSetting(f"there is no setting {name[:80]!r}{_nearest(name)}")
    if rest:
        return replace(part, **{first: _with_change(getattr(part, first), name, rest, value)})
    return replace(part, **{first: _parsed(name, value, get_type_hints(type(part))[first])})


def _nearest(name: str) -> str:
    names = setting_names()
    same = [one for one in names if one.rpartition(".")[2] == name.rpartition(".")[2]]
    near = same or difflib.get_close_matches(name[:80], names, n=3)
    return f"; near: {', '.join(near)}" if near else ""


def setting_names(kind: Any = FleetSettings, prefix: str = "") -> list[str]:
    """All settings of planners, those in groups as `faults.close_after_s`."""
    found: list[str] = []
    hints = get_type_hints(kind)
    for one in fields(kind):
        hint = hints[one.name]
        found += setting_names(hint, f"{prefix}{one.name}.") if is_dataclass(hint) else [f"{prefix}{one.name}"]
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
