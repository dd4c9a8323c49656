"""Which orders a node takes: those that speak of a later state than the one it holds (invariant I5).

It compares an order with the one in force and says why it is refused; it never looks at what runs.
"""

from engine_agent.protocol.messages import Desired


def refusal(in_force: Desired | None, received: Desired, node_id: str) -> str | None:
    """Why the received order must not replace the one in force, or None if it may.

    An order of the same cell and generation may change the phase, and nothing else that a running engine depends on.
    """
    if received.node != node_id:
        return f"it is for node {received.node}; this is {node_id}"
    if in_force is None:
        return None
    if received.version < in_force.version:
        return f"its version {received.version} is older than {in_force.version}"
    held, offered = in_force.assignment, received.assignment
    if held is None or offered is None or held.cell != offered.cell:
        return None
    if offered.generation < held.generation:
        return f"generation {offered.generation} of {offered.cell} is older than {held.generation}"
    if offered.generation == held.generation and offered.rank != held.rank:
        return (
            f"rank {offered.rank} in generation {held.generation} of {held.cell}, where this node is rank {held.rank}"
        )
    return None
