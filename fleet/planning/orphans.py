"""Which of the machines that a provider runs belong to nobody, and may be ended. Pure.

A machine counts as an orphan once two looks found it so: what is being launched or given back at this moment is none.
When much of what a provider runs is unknown, the fleet's records are what is wrong, as after an old backup: nothing is
ended.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

ENDED_AT_ONCE = 5
"""In one look, which comes every minute."""
UNKNOWN_MOST_SHARE = 0.25
"""Of what a provider runs; two are always believed."""


@dataclass(frozen=True, slots=True)
class OrphanPlan:
    """`end` now; `suspects` are to be seen again first; `held`: why nothing is ended, "" if something may be."""

    end: tuple[str, ...] = ()
    suspects: frozenset[str] = frozenset()
    held: str = ""


def plan_orphans(running: Collection[str], wanted: Mapping[str, bool], before: Collection[str]) -> OrphanPlan:
    """`wanted`: of the nodes that are recorded, whether they may still run. `before`: the suspects of the last look."""
    orphans = sorted(node for node in running if not wanted.get(node, False))
    unknown = [node for node in orphans if node not in wanted]
    if len(unknown) > max(2, UNKNOWN_MOST_SHARE * len(running)):
        held = f"{len(unknown)} of {len(running)} machines are of no node that is recorded: were records lost?"
        return OrphanPlan(suspects=frozenset(orphans), held=held)
    sure = [node for node in orphans if node in before]
    return OrphanPlan(end=tuple(sure[:ENDED_AT_ONCE]), suspects=frozenset(orphans))
