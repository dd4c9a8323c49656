"""Three times as many real-time requests at once, while batch work fills the cell: how long until they wait no longer
than they would have without it, and whether any is refused that would not have been."""

from dataclasses import dataclass

from bench.guest.rules import rule_of
from bench.guest.world import Cell, Load

SLOTS = 64
REALTIME_LIMIT = 2 * SLOTS
"""As `engine_agent.proxy.admission` has it: what is above that is refused."""
AS_ALONE = 1.06
LOAD = Load(rate=0.8, warm_up_s=60.0, measured_s=90.0, surge=3.0, surge_at_s=90.0)


@dataclass(frozen=True)
class Surge:
    """Of one seed. `excess`: by second after the surge began, how much later the first tokens of requests that came in
    it were than without batch work, in seconds in all; `refused`: in flight above the limit, with and without."""

    excess: dict[int, list[tuple[float, float]]]
    refused: tuple[int, int]


def surge(rule: str, tokens: int, seed: int, load: Load = LOAD) -> Surge:
    """A run with batch work and one without, of the same arrivals."""
    beside = Cell(rule_of(rule, SLOTS, tokens), load, seed)
    alone = Cell(rule_of("alone", SLOTS, 0), load, seed)
    with_batch, without = dict(beside.run().firsts), dict(alone.run().firsts)
    by_second: dict[int, list[tuple[float, float]]] = {}
    for at_s, ttft_s in without.items():
        if at_s >= load.surge_at_s and at_s in with_batch:
            by_second.setdefault(int(at_s - load.surge_at_s), []).append((ttft_s, with_batch[at_s]))
    refused = tuple(max(0, each.most_urgent - REALTIME_LIMIT) for each in (beside, alone))
    return Surge(by_second, (refused[0], refused[1]))
