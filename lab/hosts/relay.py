"""Delays packets and drops some: `python -m lab.hosts.relay`, with the laboratory's topology and conditions on standard
input, a line for each change. It exits at the end of standard input.

netem would do this in the kernel, but many kernels lack it. Packets without delay are not routed here."""

import contextlib
import heapq
import json
import os
import select
import socket
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from ipaddress import IPv4Address
from random import Random

from lab.hosts import kernel
from lab.hosts.conditions import RELAY, RELAY_FAR_END, Conditions, Paths, Slowness, read_state
from lab.hosts.topology import Topology

ADDRESSES = slice(26, 34)
"""Of an IPv4 packet in an Ethernet frame: where it comes from and where it goes, four bytes each."""
IPV4 = 0x0800
"""From <linux/if_ether.h>."""
MOST_HELD = 50_000
"""Packets. More are lost, as in a router whose queue is full."""
LONGEST_FRAME = 65536
PIECE_BYTES = 65536
BURST = 64
"""Packets read from one router before what is due is sent."""
BUFFER_BYTES = 4 << 20
BEFORE_OTHERS = -10
"""The nice value of the relay, where it may have one: waiting for a core would be more delay than was asked for."""


@dataclass
class DelayLine:
    """Packets on their way, in the order in which they arrive. Times in seconds of one clock, given by the caller."""

    path: Callable[[bytes], Slowness]
    chance: Random
    _held: list[tuple[float, int, int, bytes]] = field(default_factory=list)
    _count: int = 0

    def take(self, router: int, frame: bytes, now_s: float) -> None:
        """A packet sets off; some never arrive."""
        if len(self._held) >= MOST_HELD:
            return
        path = self.path(frame[ADDRESSES])
        if path.loss and self.chance.random() < path.loss:
            return
        self._count += 1
        heapq.heappush(self._held, (now_s + path.delay_s, self._count, router, frame))

    def due(self, now_s: float) -> Iterable[tuple[int, bytes]]:
        while self._held and self._held[0][0] <= now_s:
            _, _, router, frame = heapq.heappop(self._held)
            yield router, frame

    def wait_s(self, now_s: float) -> float | None:
        """Until the next one arrives; None: nothing is on its way."""
        return max(0.0, self._held[0][0] - now_s) if self._held else None


def paths(topology: Topology, conditions: Conditions) -> Callable[[bytes], Slowness]:
    """The path of a packet by its two addresses, each pair worked out once."""
    known: dict[bytes, Slowness] = {}
    compute = Paths(topology, conditions).between

    def path(addresses: bytes) -> Slowness:
        found = known.get(addresses)
        if found is None:
            found = known[addresses] = compute(IPv4Address(addresses[:4]), IPv4Address(addresses[4:]))
        return found

    return path


class Orders:
    """Lines on standard input, the newest of which counts. Not buffered, for the rest would wait unseen."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._rest = b""

    def read(self) -> str | None:
        """The newest whole line, once something can be read; empty: none is whole yet; None: that was the end."""
        piece = os.read(self.descriptor, PIECE_BYTES)
        *lines, self._rest = (self._rest + piece).split(b"\n")
        if not piece:
            return None
        return lines[-1].decode() if lines else ""


def relay(line: DelayLine, cables: list[socket.socket], orders: Orders) -> None:
    numbers = {cable.fileno(): number for number, cable in enumerate(cables)}
    while True:
        wait_s = line.wait_s(time.monotonic())
        readable, _, _ = select.select([orders.descriptor, *numbers], [], [], wait_s)
        if orders.descriptor in readable:
            text = orders.read()
            if text is None:
                return
            if text:
                line.path = paths(*read_state(json.loads(text)))
        for descriptor in numbers.keys() & set(readable):
            _read_burst(cables[numbers[descriptor]], numbers[descriptor], line)
        for number, frame in line.due(time.monotonic()):
            try:
                cables[number].send(frame)
            except OSError:  # its queue is full: lost
                continue


def _read_burst(cable: socket.socket, number: int, line: DelayLine) -> None:
    for _ in range(BURST):
        try:
            frame = cable.recv(LONGEST_FRAME)
        except OSError:  # nothing more
            return
        line.take(number, frame, time.monotonic())


def open_cable(router: str) -> socket.socket:
    with kernel.inside_network(router):
        kernel.without_offloads(RELAY)
        cable = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
        cable.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        cable.bind((RELAY_FAR_END, IPV4))
    cable.setblocking(False)
    return cable


def main() -> None:
    kernel.die_with_parent()
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, BEFORE_OTHERS)
    orders = Orders(sys.stdin.fileno())
    while not (first := orders.read()):
        if first is None:
            return
    topology, conditions = read_state(json.loads(first))
    line = DelayLine(paths(topology, conditions), Random())
    cables = [open_cable(router) for router in topology.routers]
    print("ready", flush=True)
    relay(line, cables, orders)


if __name__ == "__main__":
    main()
