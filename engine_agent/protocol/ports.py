"""The ports of a fleet. A node's processes listen at offsets from its `port_base`, so that peers need no discovery. On
one computer, the launcher rejects overlapping ports and the local provider gives nodes free blocks. Pure. A node owns
the `PORTS_PER_NODE` ports from its base upwards. The rendezvous port changes with the generation, because a port of a
killed engine can stay busy for a while."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from engine_agent.protocol.states import AgentKind

PORTS_PER_NODE = 20

PROXY = 0
"""Cell proxy: OpenAI HTTP for the ingress (leader only)."""
KV_TRANSFER = 1
"""Engine: where decode cells request the KV cache of a prefill cell (leader only; the transport may use further ports
for the bytes)."""
PROXY_ADMIN = 2
"""Cell proxy: `/status`, `/phase`, `/metrics` on loopback (leader only)."""
ENGINE = 3
"""Engine: OpenAI HTTP, `/health`, `/metrics` on loopback (leader only)."""
ENGINE_ADMIN = 4
"""Engine: administration and fault injection (`sim`), or the server behind its API (`triton`), on loopback."""
ENGINE_METRICS = 5
"""Engine: metrics of the server behind its API, on loopback (`triton` only)."""
ROOT_COMMUNICATOR = 5
"""Where the devices of a cell's nodes meet (leader only, `neuron` only, so the port is free for other engines)."""
COLLECTIVES_MASTER = 6
"""Where the processes that drive those devices meet (leader only, `neuron` only)."""
AGENT_METRICS = 7
"""Node agent: `/metrics` on loopback."""
RENDEZVOUS = 8
"""First of `RENDEZVOUS_SLOTS` ports for leader/follower rendezvous, used in turn by generation."""
RENDEZVOUS_SLOTS = 11
ARTIFACTS = 19
"""Node agent: weights and builds, for other nodes of the fleet."""
METRICS_ABOVE = 1000
"""Offset of an ingress's metrics on loopback from its port for applications."""
HOPS_ABOVE = 2000
"""Offset of an ingress's port for other regions' requests."""
TLS_ABOVE = 3000
"""Offset of an ingress's TLS port for applications."""
GRPC_ABOVE, GRPC_TLS_ABOVE = 4000, 5000
"""Offsets of an ingress's ports for gRPC, without and with TLS."""
CLOUD_INGRESS = 8080
"""Port for applications of ingresses on machines of a cloud, where nothing else listens."""
LOWEST_PORT, HIGHEST_PORT = 1024, 65535
"""Range of the ports that agents listen on without root."""
INGRESS_CLAIM = "\0switchyard-ingress-{host}:{port}"
"""Name of the abstract Unix socket that reserves an address and port for an ingress. Like a port, it belongs to the
network namespace and ends with its owner."""


def first_ports(kind: AgentKind) -> range:
    """The ports that an agent of a node or an ingress may have as its first, with room for the others."""
    return range(LOWEST_PORT, HIGHEST_PORT + 2 - (PORTS_PER_NODE if kind is AgentKind.NODE else 1))


def metrics_port(ingress_port: int) -> int:
    return _port_at_offset(ingress_port, METRICS_ABOVE)


def ingress_ports(ingress_port: int) -> dict[str, int]:
    """Purpose -> port of an ingress; all follow from its port for applications."""
    return {
        "applications": ingress_port,
        "metrics": metrics_port(ingress_port),
        "other regions' requests": hop_port(ingress_port),
        "applications over TLS": tls_port(ingress_port),
        "gRPC": grpc_port(ingress_port),
        "gRPC over TLS": grpc_tls_port(ingress_port),
    }


def hop_port(ingress_port: int) -> int:
    """Port on which an ingress accepts other regions' requests."""
    return _port_at_offset(ingress_port, HOPS_ABOVE)


def tls_port(ingress_port: int) -> int:
    """Port on which an ingress accepts applications' requests over TLS, once its region has a certificate."""
    return _port_at_offset(ingress_port, TLS_ABOVE)


def grpc_port(ingress_port: int) -> int:
    """Port on which an ingress accepts gRPC without TLS, if its region serves gRPC."""
    return _port_at_offset(ingress_port, GRPC_ABOVE)


def grpc_tls_port(ingress_port: int) -> int:
    """Port on which an ingress accepts gRPC over TLS, if its region serves gRPC and has a certificate."""
    return _port_at_offset(ingress_port, GRPC_TLS_ABOVE)


def _port_at_offset(port: int, offset: int) -> int:
    return port + offset if port + offset <= HIGHEST_PORT else port - offset


def rendezvous_port(port_base: int, generation: int) -> int:
    """Port of the leader where followers of this generation connect."""
    return port_base + RENDEZVOUS + generation % RENDEZVOUS_SLOTS


DEMO_REGIONS = ("us-east-1", "us-west-2")
"""Regions of the seeded fleet, in the order of their ingress ports."""
MAX_BLOCKS = 500


@dataclass(frozen=True, slots=True)
class PortUse:
    """A port, its user, and the variable that changes it; "" if there is none."""

    port: int
    purpose: str
    variable: str = ""


def demo_ingresses(first: int, each: int = 1) -> dict[str, int]:
    """Name -> port of the ingresses of the seeded fleet, `each` per region: first the first one of each region."""
    return {
        local_ingress(region, number): local_ingress_port(first, index, len(DEMO_REGIONS), number)
        for number in range(each)
        for index, region in enumerate(DEMO_REGIONS)
    }


def local_ingress(region: str, number: int) -> str:
    """Name of the ingress of a region with this number, from 0."""
    return f"i-{region}" + (f"-{number + 1}" if number else "")


MOST_INGRESSES = 8
"""Of one region of provider `local`."""


def region_of_same_ingress(region: str, others: Iterable[str]) -> str | None:
    """Returns the region with an ingress that has the name of one of this region's, as `us-east-1` has for
    `us-east-1-2`; None if there is none."""
    own = {local_ingress(region, number) for number in range(MOST_INGRESSES)}
    for other in others:
        if own & {local_ingress(other, number) for number in range(MOST_INGRESSES)}:
            return other
    return None


def local_ingress_port(first: int, position: int, positions: int, number: int) -> int:
    """Port of the ingress with this number of the region at `position`: the first ones of all regions, then the second
    ones."""
    return first + position + number * positions


def fixed_ports(*, dashboard: int, agents: int, ingresses: Mapping[str, int]) -> list[PortUse]:
    """Configured ports, and the ports that follow from them. `ingresses`: port by name."""
    return [
        PortUse(dashboard, "the dashboard", "SWITCHYARD_PORT"),
        PortUse(agents, "agents", "SWITCHYARD_AGENT_PORT"),
        *(
            PortUse(port, f"{purpose} of the ingress {name}", "SWITCHYARD_INGRESS_PORT")
            for name, first in ingresses.items()
            for purpose, port in ingress_ports(first).items()
        ),
    ]


def node_ports(node: str, port_base: int) -> list[PortUse]:
    return [PortUse(port, f"node {node}") for port in range(port_base, port_base + PORTS_PER_NODE)]


def overlap(uses: Collection[PortUse]) -> str:
    """A sentence that names the first port with two users and the remedy; "" if there is none."""
    first: dict[int, PortUse] = {}
    for use in uses:
        other = first.setdefault(use.port, use)
        if other is not use:
            variables = " or ".join(dict.fromkeys(filter(None, (other.variable, use.variable))))
            remedy = f"set {variables} to another port" if variables else "move one of them"
            return f"Port {use.port} is for {other.purpose} and for {use.purpose}: {remedy}."
    return ""


def node_blocks(first: int, taken: Collection[int], most: int = MAX_BLOCKS) -> Iterator[int]:
    """First ports of the free blocks for nodes, among `most` blocks from `first` upwards."""
    known = frozenset(taken)
    end = min(HIGHEST_PORT + 2 - PORTS_PER_NODE, first + most * PORTS_PER_NODE)
    for base in range(first, end, PORTS_PER_NODE):
        if known.isdisjoint(range(base, base + PORTS_PER_NODE)):
            yield base
