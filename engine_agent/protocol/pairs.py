"""Which cells a cell pairs with, as an agent tells the proxy beside it while both run."""

import zlib
from typing import Final

from msgspec import Struct, json

from engine_agent.protocol.messages import PREFILL_FROM_TOKENS, Assignment, PrefillCell
from engine_agent.protocol.states import CellRole


class Pairs(Struct, frozen=True):
    """Body of `POST /pairs` on a proxy's administration port. See `Assignment`, whose members these are. `name` is
    short, and another one for other pairs: what a proxy says that it has. Empty: it was told of none."""

    name: str = ""
    prefill_cells: tuple[PrefillCell, ...] = ()
    decode_nodes: tuple[str, ...] = ()
    prefill_from_tokens: int = PREFILL_FROM_TOKENS


NO_PAIRS: Final = Pairs()


def pairs_of(assignment: Assignment) -> Pairs:
    """Which a cell is to have; one that does all of its requests has none."""
    if assignment.cell_role is CellRole.MIXED:
        return NO_PAIRS
    cells, nodes, least = assignment.prefill_cells, assignment.decode_nodes, assignment.prefill_from_tokens
    return Pairs(f"{zlib.crc32(json.encode((cells, nodes, least))):08x}", cells, nodes, least)
