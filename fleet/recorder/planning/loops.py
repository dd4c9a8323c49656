"""What the flight recorder knows of a control loop: the types of its inputs and decisions, its planners, and how its
decisions are explained and its settings changed. Each loop declares a `RecordedLoop` next to its planner. Pure."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from fleet.recorder.planning.reasons import Alternative, Reason

Planner = Callable[[Any, Any, datetime], tuple[Any, ...]]
"""Snapshot, settings and time -> decisions."""


class InvalidSetting(ValueError):
    """A setting that does not exist, or a value that it cannot have; the text says what would be right."""


@dataclass(frozen=True, slots=True)
class Decided:
    """Decisions of one planner, and which of them were applied; the others had become stale, or time ran out."""

    planner: str
    decisions: tuple[Any, ...]
    applied: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Round:
    """A round of a pass: its inputs, and what the planners decided up to the first one that changed something."""

    view: Any
    settings: Any
    now: datetime
    decided: tuple[Decided, ...]


@dataclass(frozen=True, slots=True)
class NoSettings:
    """Of loops that only have policies, which are part of their inputs."""


@dataclass(frozen=True, eq=False)
class RecordedLoop:
    """`name`: as stored, and the prefix of its settings; the reconciler's have none. `explain`: reads a round, and
    returns what makes the reason of one of its decisions. `check`: raises InvalidSetting for changed settings by name;
    `change`: a round with them. `with_choices`: names of the decisions that `alternatives` explains."""

    name: str
    view: type
    settings: type
    decisions: tuple[type, ...]
    planners: tuple[Planner, ...]
    explain: Callable[[Round], Callable[[Any, str], Reason]]
    check: Callable[[Mapping[str, str]], object]
    change: Callable[[Round, Mapping[str, str]], Round]
    alternatives: Callable[[Round, Any], tuple[Alternative, ...]]
    with_choices: frozenset[str] = field(default_factory=frozenset)
    setting_names: Callable[[], Iterable[str]] = tuple
    is_told: Callable[[Any], bool] = lambda _: True
