"""Which cells a cell pairs with, as an agent tells the proxy beside it while both run."""

from typing import Final

from msgspec import Struct, to_builtins

from engine_agent.protocol.held_questions import state_name
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
"""What every proxy begins with."""


def pairs_of(assignment: Assignment) -> Pairs:
    """Which a cell is to have; one that does all of its requests has none."""
    if assignment.cell_role is CellRole.MIXED:
        return NO_PAIRS
    cells, nodes, least = assignment.prefill_cells, assignment.decode_nodes, assignment.prefill_from_tokens
    return Pairs(state_name(to_builtins(cells), nodes, least), cells, nodes, least)
