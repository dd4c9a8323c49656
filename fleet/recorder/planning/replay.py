"""Runs recorded rounds again with the same pure planners, or with other settings, and compares the decisions. What a
setting would have done to the fleet afterwards is a question for a forecast: each round is decided on its recorded
inputs."""

import difflib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fleet.recorder.planning.encoding import canonical
from fleet.recorder.planning.loops import InvalidSetting, RecordedLoop, Round

SETTINGS_MOST = 20


@dataclass(frozen=True, slots=True)
class Compared:
    """A decision of a round. `recorded` and `replayed`: whether it was made then and now; `applied`: then."""

    planner: str
    decision: Any
    recorded: bool
    replayed: bool
    applied: bool


@dataclass(frozen=True, slots=True)
class ReplayedRound:
    """`round`: as it was recorded; `decided_on`: the same with the changed settings."""

    round: Round
    decided_on: Round
    compared: tuple[Compared, ...]

    @property
    def is_same(self) -> bool:
        return all(one.recorded and one.replayed for one in self.compared)


def replay(loop: RecordedLoop, one: Round, changes: Mapping[str, str] | None = None) -> ReplayedRound:
    """Decides a round again. Without changes only the planners that had a turn run; with changes the round ends, as in
    a pass, at the first planner that decides anything. Raises InvalidSetting."""
    changed = loop.change(one, changes) if changes else one
    recorded = {part.planner: part for part in one.decided}
    compared: list[Compared] = []
    turns = len(one.decided)
    for planner in loop.planners:
        part = recorded.get(planner.__name__)
        try:
            decided = planner(changed.view, changed.settings, changed.now)
        except (ArithmeticError, ValueError) as wrong:
            if not changes:
                raise
            stated = ", ".join(f"{name}={value}" for name, value in changes.items())
            raise InvalidSetting(f"the {loop.name} cannot decide with {stated}: {wrong}") from None
        then = list(zip(part.decisions, part.applied, strict=True)) if part else []
        compared += _compared(planner.__name__, then, decided)
        turns -= part is not None
        if (decided and changes) or (not turns and not changes):
            break
    seen = {each.planner for each in compared}
    for part in one.decided:
        if part.planner not in seen and part.decisions:
            compared += _compared(part.planner, list(zip(part.decisions, part.applied, strict=True)), ())
    return ReplayedRound(one, changed, tuple(compared))


def _compared(planner: str, then: Iterable[tuple[Any, bool]], decided: Iterable[Any]) -> Iterator[Compared]:
    """Decisions of then in their order, and then those that only this run has."""
    now: dict[tuple[type, bytes], list[Any]] = defaultdict(list)
    for decision in decided:
        now[type(decision), canonical(decision)].append(decision)
    for decision, applied in then:
        same = now[type(decision), canonical(decision)]
        yield Compared(planner, decision, recorded=True, replayed=bool(same and same.pop()), applied=applied)
    for decision in (one for left in now.values() for one in left):
        yield Compared(planner, decision, recorded=False, replayed=True, applied=False)


# --- other settings --------------------------------------------------------------------------------------------------


def changes_by_loop(loops: Iterable[RecordedLoop], changes: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Loop -> its changed settings, from names such as `lost_after_s` or `autoscaler.down_after_s`. Checks all of them,
    also those of loops that a replay has no round of. Raises InvalidSetting."""
    if len(changes) > SETTINGS_MOST:
        raise InvalidSetting(f"{len(changes)} settings; the limit is {SETTINGS_MOST}")
    known = {loop.name: loop for loop in loops}
    found: dict[str, dict[str, str]] = {name: {} for name in known}
    main = next(iter(known))
    for name, value in changes.items():
        prefix, _, rest = name.partition(".")
        loop, own = (prefix, rest) if prefix in known and prefix != main else (main, name)
        if own not in set(known[loop].setting_names()):
            raise InvalidSetting(f"there is no setting {name[:80]!r}{_nearest(name, known.values(), main)}")
        found[loop][own] = value
    for loop, stated in found.items():
        known[loop].check(stated)
    return found


def _nearest(name: str, loops: Iterable[RecordedLoop], main: str) -> str:
    names = [f"{'' if loop.name == main else f'{loop.name}.'}{one}" for loop in loops for one in loop.setting_names()]
    same = [one for one in names if one.rpartition(".")[2] == name.rpartition(".")[2]]
    near = same or difflib.get_close_matches(name[:80], names, n=3)
    return f"; near: {', '.join(near)}" if near else ""
