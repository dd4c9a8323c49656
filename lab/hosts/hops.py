"""Finds which connections between hosts are encrypted, from packets at the routers: `python -m lab.hosts.hops SECONDS`
in the laboratory's namespaces, with its state on standard input. It prints one JSON list of `Hop`s.

Connections of applications from outside, which may be plain HTTP, are ignored."""

import json
import select
import socket
import struct
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from ipaddress import IPv4Address

from lab.hosts import kernel
from lab.hosts.conditions import read_state
from lab.hosts.relay import IPV4, LONGEST_FRAME
from lab.hosts.topology import OUTSIDE, Topology

ETHERNET_BYTES = 14
TCP = 6
TLS_RECORDS = range(0x14, 0x18)
"""Change of cipher, alert, handshake, application data (RFC 8446, 5.1)."""
TLS_MAJOR, TLS_MINORS = 3, range(5)
MOST_RECORD_BYTES = (1 << 14) + 2048
SHOWN_BYTES = 24
BURST_WAIT_S = 0.2


@dataclass(frozen=True, slots=True)
class Segment:
    """A TCP segment that carries something. An end is an address and a port."""

    source: tuple[str, int]
    destination: tuple[str, int]
    payload: bytes


@dataclass(frozen=True, slots=True)
class Hop:
    """Connections from one host to a port of another. `sample`: the printable beginning of a plain one."""

    client: str
    server: str
    port: int
    is_encrypted: bool
    connections: int
    sample: str = ""

    def __str__(self) -> str:
        transport = "TLS" if self.is_encrypted else f"PLAIN: {self.sample}"
        return f"{self.client} -> {self.server}:{self.port} ({self.connections}): {transport}"


@dataclass
class Flow:
    records: int = 0
    sample: bytes = b""

    def add(self, payload: bytes) -> None:
        """One more segment. A record may be spread over several, which then begin with anything."""
        if begins_record(payload):
            self.records += 1
        elif not self.sample:
            self.sample = payload[:SHOWN_BYTES]

    @property
    def is_encrypted(self) -> bool:
        """Text never begins as a record does, so that one is proof."""
        return self.records > 0


def segment(packet: bytes) -> Segment | None:
    if len(packet) < 40 or packet[0] >> 4 != 4 or packet[9] != TCP:
        return None
    head, length = (packet[0] & 15) * 4, struct.unpack_from("!H", packet, 2)[0]
    source_port, destination_port = struct.unpack_from("!HH", packet, head)
    payload = packet[head + (packet[head + 12] >> 4) * 4 : length]
    if not payload:
        return None
    source, destination = (str(IPv4Address(packet[at : at + 4])) for at in (12, 16))
    return Segment((source, source_port), (destination, destination_port), payload)


def begins_record(payload: bytes) -> bool:
    if len(payload) < 5:
        return False
    kind, major, minor, length = struct.unpack_from("!BBBH", payload)
    return kind in TLS_RECORDS and major == TLS_MAJOR and minor in TLS_MINORS and 0 < length <= MOST_RECORD_BYTES


def hops(topology: Topology, segments: Iterable[Segment]) -> list[Hop]:
    """Sum up what was seen, the plain ones first. The server is the end with the lower port: clients' are ephemeral."""
    names: Mapping[str, str] = {str(host.address): name for name, host in topology.hosts.items()}
    flows: dict[tuple[tuple[str, int], tuple[str, int]], Flow] = {}
    for each in segments:
        server, client = sorted((each.source, each.destination), key=lambda end: end[1])
        if client[0] in names and server[0] in names:
            flows.setdefault((client, server), Flow()).add(each.payload)
    found: dict[tuple[str, str, int, bool], list[Flow]] = {}
    for (client, server), flow in flows.items():
        found.setdefault((names[client[0]], names[server[0]], server[1], flow.is_encrypted), []).append(flow)
    return [
        Hop(client, server, port, is_encrypted, len(each), "" if is_encrypted else _printable(each[0].sample))
        for (client, server, port, is_encrypted), each in sorted(found.items(), key=lambda item: (item[0][3], item[0]))
    ]


def _printable(sample: bytes) -> str:
    return sample.decode("ascii", "backslashreplace").encode("unicode_escape").decode("ascii")


def watch(topology: Topology, seconds: float) -> list[Segment]:
    taps = []
    for router in topology.routers:
        with kernel.inside_network(router):
            tap = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(IPV4))
        tap.setblocking(False)
        taps.append(tap)
    outside, seen = topology.networks[OUTSIDE], []
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for tap in select.select(taps, [], [], BURST_WAIT_S)[0]:
            found = segment(tap.recv(LONGEST_FRAME)[ETHERNET_BYTES:])
            if found and not any(IPv4Address(end[0]) in outside for end in (found.source, found.destination)):
                seen.append(found)
    return seen


def main(argv: list[str]) -> None:
    kernel.die_with_parent()
    topology, _ = read_state(json.loads(sys.stdin.readline()))
    print(json.dumps([asdict(hop) for hop in hops(topology, watch(topology, float(argv[0])))]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
