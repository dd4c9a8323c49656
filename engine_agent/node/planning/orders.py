"""Which orders a node takes: those that speak of a later state than the one it holds (invariant I5).

It compares an order with the one in force and with what runs, and says why it is refused.
"""

from engine_agent.node.planning.node import Membership, membership_of
from engine_agent.protocol.messages import Assignment, Desired


def refusal(in_force: Desired | None, received: Desired, node_id: str, running: Membership | None = None) -> str | None:
    """Why the received order must not replace the one in force, or None if it may. `running`: as what a process of
    this node still runs, whatever the order in force says.

    An order of the same cell and generation may change the phase, and nothing else that a running engine depends on.
    """
    if received.node != node_id:
        return f"it is for node {received.node}; this is {node_id}"
    if in_force is not None and received.version < in_force.version:
        return f"its version {received.version} is older than {in_force.version}"
    held = in_force.assignment if in_force is not None else None
    known = (None if held is None else membership_of(held), running)
    return next(filter(None, (_goes_back(received.assignment, member) for member in known)), None)


def _goes_back(offered: Assignment | None, known: Membership | None) -> str | None:
    if offered is None or known is None or offered.cell != known.cell:
        return None
    if offered.generation < known.generation:
        return f"generation {offered.generation} of {offered.cell} is older than {known.generation}"
    if offered.generation == known.generation and offered.rank != known.rank:
        place = f"generation {known.generation} of {known.cell}"
        return f"rank {offered.rank} in {place}, where this node is rank {known.rank}"
    return None
