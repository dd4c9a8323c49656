"""Where machines of a cloud are in its network, and which of them to ask for next. Pure.

DescribeInstanceTopology takes 100 ids a call, and one call a second for an account and region: so the control plane
asks, and never the agents. It answers only for running machines of some types, and says nothing of the others.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta

from fleet.planning.call_budget import TOPOLOGY_EVERY_S, TOPOLOGY_PAGE
from fleet.planning.placement.distance import Path

AGAIN_S = 60.0
"""After an answer that said nothing of a machine it is asked for again; each time after twice as long, up to
`TOPOLOGY_EVERY_S`."""
CALL = "DescribeInstanceTopology"


@dataclass(frozen=True, slots=True)
class PlacedMachine:
    """`id`: its provider's. `asked_at`: when its place was last asked for; None: never. `path`: as far as is known."""

    id: str
    launched_at: datetime
    asked_at: datetime | None = None
    path: Path = ()

    @property
    def is_known(self) -> bool:
        return len(self.path) > 1


def path_of(zone_id: str, network_nodes: Iterable[str], block: str = "") -> Path:
    """A machine's place, widest first: its zone, by the id that is the same in all accounts, its network nodes, and for
    UltraServers the Capacity Block that is one of them. Without nodes only the zone is known, and machines of types
    that have no topology still spread over zones."""
    nodes = tuple(node for node in network_nodes if node)
    return (zone_id, *nodes, block) if block and nodes else (zone_id, *nodes)


def batches(machines: Iterable[PlacedMachine], now: datetime) -> tuple[tuple[str, ...], ...]:
    """Which ids to ask for, by call: those never asked for first, then those of which nothing is known yet, then those
    that may have moved; in each, the longest waiting first."""
    due = [machine for machine in machines if _is_due(machine, now)]
    due.sort(key=lambda one: (one.asked_at is not None, one.is_known, one.asked_at or one.launched_at, one.id))
    ids = [machine.id for machine in due]
    return tuple(tuple(ids[at : at + TOPOLOGY_PAGE]) for at in range(0, len(ids), TOPOLOGY_PAGE))


def _is_due(machine: PlacedMachine, now: datetime) -> bool:
    if machine.asked_at is None:
        return True
    pause_s = TOPOLOGY_EVERY_S
    if not machine.is_known:
        pause_s = min(max(AGAIN_S, (machine.asked_at - machine.launched_at).total_seconds()), pause_s)
    return now - machine.asked_at >= timedelta(seconds=pause_s)
