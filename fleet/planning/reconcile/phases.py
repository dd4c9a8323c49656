"""What the nodes of a cell are told to do in each of its states."""

from engine_agent.protocol.states import Phase
from fleet.planning.states import CellState

PHASES: dict[CellState, Phase] = {
    CellState.STARTING: Phase.SERVE,
    CellState.READY: Phase.SERVE,
    CellState.DRAINING: Phase.DRAIN,
}
"""A cell in any other state runs no engine: it starts again as a whole, with a new generation."""
