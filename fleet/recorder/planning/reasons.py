"""What the recorder stores of a decision, whichever loop made it: its subjects, rule, inputs and limits, all bounded.
Decides nothing."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice
from math import isfinite
from typing import Any

SUBJECTS_MOST = 40
"""Of one decision: a cell of more nodes is found by its own name."""
LONGEST_TEXT = 500
FIELDS_MOST = 16
ALTERNATIVES_MOST = 20
Value = str | float | int | bool | None


class Subject(StrEnum):
    """What can be asked about. The name of a share is `DEPLOYMENT@REGION`: where requests from that region go."""

    CELL = "cell"
    NODE = "node"
    DEPLOYMENT = "deployment"
    ROLLOUT = "rollout"
    INCIDENT = "incident"
    MACHINE = "machine"
    REGION = "region"
    SHARE = "share"

    def named(self, name: str | int) -> str:
        return f"{self.value}:{name}"


@dataclass(frozen=True, slots=True)
class Reason:
    """Why one decision was made. `subjects`: what it is about, as `cell:c-1`, the most specific first; `rule`: that it
    follows; `inputs`: values that mattered; `limits`: settings and policies that they were compared with."""

    decision: str
    planner: str
    subjects: tuple[str, ...]
    rule: str
    reason: str
    inputs: Mapping[str, Value] = field(default_factory=dict)
    limits: Mapping[str, Value] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Alternative:
    """A candidate that was not chosen, with the reason."""

    name: str
    why_not: str


def decision_words(name: str) -> str:
    """`StartCell` as `start cell`."""
    return "".join(f" {letter.lower()}" if letter.isupper() else letter for letter in name).strip()


def subjects_bounded(found: Iterable[str]) -> tuple[str, ...]:
    """Each once, at most `SUBJECTS_MOST`."""
    return tuple(islice(dict.fromkeys(found), SUBJECTS_MOST))


def values_bounded(values: Mapping[str, Any]) -> dict[str, Value]:
    """The first `FIELDS_MOST` values that say something."""
    known = {name: value for name, value in values.items() if isinstance(value, Value) and value not in ("", None)}
    return {name: _plain(value) for name, value in islice(known.items(), FIELDS_MOST)}


def _plain(value: Any) -> Value:
    """PostgreSQL's JSON has neither NUL nor numbers that are not finite."""
    if isinstance(value, float):
        return round(value, 3) if isfinite(value) else str(value)
    return text_bounded(value) if isinstance(value, str) else value


def text_bounded(value: object) -> str:
    return str(value).replace("\0", "")[:LONGEST_TEXT]
