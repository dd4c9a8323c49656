"""Decides which cells count tokens otherwise than their engines do, from what both counted since the same moment. Pure.

A bill is made of what cell proxies count; their engines' own counters are the only other witness. What is in flight is
in neither count (`engine_agent.protocol.messages.TokenCheck`), so any difference is one. Nothing is corrected here.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

KIND = "token-drift"
DRIFT_ALLOWED = 0.001
"""Of the engine's count; issue 16 sets it."""
TOKENS_ALLOWED = 200
"""A difference of less is none, however few tokens there were: a probe that was cut by a restart has some 40."""


@dataclass(frozen=True, slots=True)
class CheckedCell:
    """What both counted of one cell, `since` seconds since 1970: prompts and completions."""

    cell: str
    since: float
    engine: tuple[int, int]
    counted: tuple[int, int]

    @property
    def drift(self) -> int:
        """By how many tokens the counts differ, both ways added."""
        return sum(abs(ours - theirs) for ours, theirs in zip(self.counted, self.engine, strict=True))

    @property
    def has_drift(self) -> bool:
        return self.drift > max(TOKENS_ALLOWED, DRIFT_ALLOWED * sum(self.engine))


@dataclass(frozen=True, slots=True)
class DriftPlan:
    """`opened`: cells with the sentence of their incident; `closed`: cells with why theirs is over."""

    opened: tuple[tuple[CheckedCell, str], ...] = ()
    closed: tuple[tuple[str, str], ...] = ()


def plan_token_drift(
    checked: Iterable[CheckedCell], known_cells: Collection[str], open_about: Collection[str]
) -> DriftPlan:
    """What to open and close. `known_cells`: those that there are; `open_about`: those with an open incident. A cell
    that says nothing now keeps its incident."""
    by_cell = {each.cell: each for each in checked}
    opened = [
        (each, _sentence(each)) for name, each in sorted(by_cell.items()) if each.has_drift and name not in open_about
    ]
    closed = []
    for name in sorted(open_about):
        if name not in known_cells:
            closed.append((name, "the cell is no more"))
        elif name in by_cell and not by_cell[name].has_drift:
            closed.append((name, "cell and engine count the same again"))
    return DriftPlan(tuple(opened), tuple(closed))


def _sentence(each: CheckedCell) -> str:
    share = 100 * each.drift / max(1, sum(each.engine))
    return (
        f"{each.cell} counted {each.counted[0]} prompt and {each.counted[1]} completion tokens, its engine"
        f" {each.engine[0]} and {each.engine[1]}: {share:.2f} % apart"
    )
