"""Decides which prefill cells a decode cell may call, and whom a prefill cell may be called by: cells of one place
whose KV layouts are equal. Pure.

Never two of different layouts, whatever a rollout is at: a decode cell without a prefill cell of its own layout does
all by itself.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from engine_agent.protocol.messages import DECODE_NODES_MAX, PREFILL_CELLS_MAX
from engine_agent.protocol.states import CellRole


@dataclass(frozen=True, slots=True)
class PairingCell:
    """A cell apart that runs. `layout`: the fingerprint of what it hands over, never empty; `node`: its leader;
    `serves`: it takes new work."""

    id: str
    role: CellRole
    layout: str
    node: str
    serves: bool


def prefill_cells_of(decode: PairingCell, there: Iterable[PairingCell]) -> tuple[PairingCell, ...]:
    """Those of the cells of its place that this decode cell may call."""
    found = (
        one
        for one in there
        if one.role is CellRole.PREFILL and one.serves and one.layout and one.layout == decode.layout
    )
    return tuple(sorted(found, key=lambda one: one.id)[:PREFILL_CELLS_MAX])


def decode_nodes_of(prefill: PairingCell, there: Iterable[PairingCell]) -> tuple[str, ...]:
    """The nodes whose proxies may call this prefill cell: they may still do so while they drain."""
    found = {one.node for one in there if one.role is CellRole.DECODE and one.layout and one.layout == prefill.layout}
    return tuple(sorted(found)[:DECODE_NODES_MAX])
