"""Decides the tags of tasks, and judges tasks without a row. Pure. Tags name the node of a task, its cell and its
generation, for people, for bills, and for a control plane with older rows. They follow the rows after each list."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fleet.clouds.planning.tasks import OVER, TAG_NODE, TaskSeen

TAG_CELL = "switchyard:cell"
TAG_GENERATION = "switchyard:generation"
TAGGED_AT_ONCE = 40
"""Calls after each list, so that a rollout of a large region does not use up the budget of other calls."""


@dataclass(frozen=True, slots=True)
class Serves:
    """The work of a task. `cell` and `generation` are empty for a spare."""

    node: str = ""
    cell: str = ""
    generation: str = ""

    @property
    def tags(self) -> dict[str, str]:
        return {TAG_NODE: self.node, TAG_CELL: self.cell, TAG_GENERATION: self.generation}

    def __str__(self) -> str:
        place = f" in {self.cell} at generation {self.generation}" if self.cell else ""
        return f"{self.node or 'no node'}{place}"


def plan_tags(tasks: Sequence[TaskSeen], wanted: Mapping[str, Serves]) -> dict[str, Serves]:
    """Returns the tags to set, by task. `wanted`: of recorded tasks. Members of cells come first."""
    running = [one for one in tasks if one.status not in OVER and one.id in wanted]
    changed = [one for one in running if serves_of(one) != wanted[one.id]]
    ordered = sorted(changed, key=lambda one: (not wanted[one.id].cell, one.id))
    return {one.id: wanted[one.id] for one in ordered[:TAGGED_AT_ONCE]}


def serves_of(task: TaskSeen) -> Serves:
    """Returns what a task's tags state."""
    return Serves(*(task.tags.get(name, "") for name in (TAG_NODE, TAG_CELL, TAG_GENERATION)))


@dataclass(frozen=True, slots=True)
class Stray:
    """A running task without a row. `is_referenced`: it is left alone, because it belongs to an open launch or
    `serves_now` a cell, which contradicts the rows. `is_recorded`: rows prove that it should have ended."""

    task: TaskSeen
    serves_now: bool
    is_referenced: bool
    is_recorded: bool


def judge_stray(
    task: TaskSeen, open_launches: frozenset[str], attempts: frozenset[tuple[str, str]], serving: Mapping[str, Serves]
) -> Stray:
    """Judges a task without a row by its tags. `open_launches`: `startedBy` of attempts whose outcome is not known.
    `attempts`: unit and number of all recorded ones. `serving`: by node, for nodes that are not retired."""
    stated = serves_of(task)
    serves_now = bool(stated.cell) and serving.get(stated.node) == stated
    is_old = bool(stated.node) and not serves_now
    is_recorded = is_old or (task.unit, task.attempt) in attempts
    return Stray(task, serves_now, serves_now or task.started_by in open_launches, is_recorded)
