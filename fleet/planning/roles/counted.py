"""What cells of a place count of their requests, and what a while between two looks says of one of them. Pure.

Totals belong to one start of a cell: what started anew meanwhile is left out of the difference. Cells of a place get
requests in turn, so lengths are the median of the cells', and none counts for many times what the median cell has: one
that lies of itself moves little where there are three.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from engine_agent.protocol.states import CellRole
from fleet.planning.roles.capacity import RoleDemand

LONGEST_S = 3600.0
"""Between two looks; a longer one says nothing of now."""
MOST_OF_MEDIAN = 4.0
"""Requests of a cell, as a multiple of the median cell's, that count at most."""
MOST_GROWTH = 10.0
"""By which a forecast may multiply what comes now."""


@dataclass(frozen=True, slots=True)
class CountedCell:
    """Totals of one start of a cell. `read_tokens`: of prompts that a prefill cell read for others. `handover_s`: how
    long it takes a decode cell now to take one over; None: it took none."""

    generation: int
    role: CellRole
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    read_tokens: int = 0
    in_flight: float = 0.0
    handover_s: float | None = None

    def since(self, before: "CountedCell") -> "CountedCell | None":
        """What was added; None: it is another count."""
        added = CountedCell(
            self.generation,
            self.role,
            self.requests - before.requests,
            self.prompt_tokens - before.prompt_tokens,
            self.cached_tokens - before.cached_tokens,
            self.completion_tokens - before.completion_tokens,
            self.read_tokens - before.read_tokens,
        )
        numbers = (
            added.requests, added.prompt_tokens, added.cached_tokens, added.completion_tokens, added.read_tokens,
        )  # fmt: skip
        return added if self.generation == before.generation and min(numbers) >= 0 else None


Counted = Mapping[str, CountedCell]
"""Cell -> what it counted."""


def demand_between(before: Counted, now: Counted, seconds: float, expected_at_once: float | None) -> RoleDemand | None:
    """What came in so many seconds; None: nothing is known. `expected_at_once`: requests at once that are forecast.

    Where engines count what they took over as cached, those tokens count that prefill cells have read, if these are
    more; never more than the prompts have.
    """
    pairs = ((cell, before[name]) for name, cell in now.items() if name in before)
    added = [one for cell, earlier in pairs if (one := cell.since(earlier)) is not None]
    answered = [one for one in added if one.role is not CellRole.PREFILL and one.requests > 0]
    if not 0 < seconds <= LONGEST_S or not answered:
        return None
    most = MOST_OF_MEDIAN * median(one.requests for one in answered)
    requests = int(sum(min(one.requests, most) for one in answered))
    prompt = median(one.prompt_tokens / one.requests for one in answered)
    own = median(max(0, one.prompt_tokens - one.cached_tokens) / one.requests for one in answered)
    read = min(prompt, sum(one.read_tokens for one in added) / requests)
    per_s = requests / seconds
    at_once = sum(cell.in_flight for cell in now.values() if cell.role is not CellRole.PREFILL)
    expected = None
    if expected_at_once is not None and at_once > 0:
        expected = per_s * min(MOST_GROWTH, expected_at_once / at_once)
    return RoleDemand(
        per_s=per_s,
        uncached_tokens=max(1.0, own, read),
        output_tokens=max(1.0, median(one.completion_tokens / one.requests for one in answered)),
        requests=requests,
        expected_per_s=expected,
    )


def handover_s(now: Counted) -> float | None:
    """How long taking over a prompt takes, the median of the decode cells that did; None: none did."""
    seen = [cell.handover_s for cell in now.values() if cell.handover_s is not None]
    return median(seen) if seen else None
