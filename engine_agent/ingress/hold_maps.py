"""What the table says of pools whose requests wait for a first cell, as maps: they change without a reload. Pure."""

from collections.abc import Iterable

from engine_agent.protocol.ingress_messages import Pool

HOLDS_MAP, COLD_STARTS_MAP, READY_MAP = "holds.map", "cold-starts.map", "ready.map"
"""Pool -> for how many seconds its requests are held; how long a cell takes to start; when, in seconds since 1970, the
first of those that start is expected, 0 while none does."""
WITHHELD_MAP = "withheld.map"
"""Pool -> what keeps its first cell from machines; those alone that are kept."""
LONGEST_HOLD_S = 600
"""As long as clients of OpenAI and Anthropic wait for an answer; every one of them holds two connections."""


def hold_entries(pools: Iterable[Pool]) -> dict[str, dict[str, str]]:
    """The maps; none where nothing is held."""
    held = {pool.name: pool.hold for pool in pools if pool.hold}
    if not held:
        return {}
    return {
        HOLDS_MAP: {name: str(hold.for_s) for name, hold in held.items()},
        COLD_STARTS_MAP: {name: str(hold.cold_start_s) for name, hold in held.items()},
        READY_MAP: {name: str(hold.ready_at) for name, hold in held.items()},
        WITHHELD_MAP: {name: hold.withheld.value for name, hold in held.items() if hold.withheld},
    }
