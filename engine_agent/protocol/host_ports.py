"""Every port that a fleet on one computer listens on, in one table. By it the launcher refuses a start whose ports
overlap, and the local provider gives nodes blocks that nothing else uses. Pure."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from engine_agent.protocol.ports import HIGHEST_PORT, PORTS_PER_NODE, ingress_ports

DEMO_REGIONS = ("us-east-1", "us-west-2")
"""Regions of the seeded fleet, in the order of their ingress ports."""
MAX_BLOCKS = 500


@dataclass(frozen=True, slots=True)
class PortUse:
    """A port, what listens there, and the variable that moves it; "" if none does."""

    port: int
    purpose: str
    variable: str = ""


def demo_ingresses(first: int) -> dict[str, int]:
    """Region -> port of its ingress, in the seeded fleet."""
    return {region: first + index for index, region in enumerate(DEMO_REGIONS)}


def fixed_ports(*, dashboard: int, agents: int, ingresses: Mapping[str, int]) -> list[PortUse]:
    """What listens at a port that a person chose, and at those that follow from it. `ingresses`: port by region."""
    return [
        PortUse(dashboard, "the dashboard", "SWITCHYARD_PORT"),
        PortUse(agents, "agents", "SWITCHYARD_AGENT_PORT"),
        *(
            PortUse(port, f"{purpose} of the ingress of {region}", "SWITCHYARD_INGRESS_PORT")
            for region, first in ingresses.items()
            for purpose, port in ingress_ports(first).items()
        ),
    ]


def node_ports(node: str, port_base: int) -> list[PortUse]:
    return [PortUse(port, f"node {node}") for port in range(port_base, port_base + PORTS_PER_NODE)]


def overlap(uses: Collection[PortUse]) -> str:
    """A sentence that names the first port with two users, and what to do; "" if each port has one."""
    first: dict[int, PortUse] = {}
    for use in uses:
        other = first.setdefault(use.port, use)
        if other is not use:
            variables = " or ".join(dict.fromkeys(filter(None, (other.variable, use.variable))))
            remedy = f"set {variables} to another port" if variables else "move one of them"
            return f"Port {use.port} is for {other.purpose} and for {use.purpose}: {remedy}."
    return ""


def node_blocks(first: int, taken: Collection[int], most: int = MAX_BLOCKS) -> Iterator[int]:
    """First ports of the blocks that nodes may have, among the `most` from `first` upwards: none of theirs is taken."""
    known = frozenset(taken)
    end = min(HIGHEST_PORT + 2 - PORTS_PER_NODE, first + most * PORTS_PER_NODE)
    for base in range(first, end, PORTS_PER_NODE):
        if known.isdisjoint(range(base, base + PORTS_PER_NODE)):
            yield base
