"""Reserves ports for a test. Its servers listen much later, when a port that was only probed may be in use.

They lie outside of those that the kernel gives to connections and to servers on port 0, and each process has a claim
to those that it hands out: no other worker and no other session gives them to its tests.
"""

import contextlib
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from engine_agent.protocol.ports import HOPS_ABOVE, TLS_ABOVE, grpc_port, grpc_tls_port, hop_port, tls_port


@dataclass
class _Area:
    """Ports of which each process takes a block for itself; `each_with`: the further ports that must be free for a
    port."""

    ports: range
    block: int
    each_with: Callable[[int], tuple[int, ...]] = lambda port: (port,)
    _own: range | None = field(default=None)
    _next: int = 0

    def neighbours(self, count: int) -> int:
        """The first of so many, each time others: what ended a moment ago may still hold the last ones."""
        own = self._own = self._own or self._claim()
        for _ in own:
            first, self._next = own.start + self._next, self._next + 1
            if first + count > own.stop:
                self._next = 0
            elif _are_free(each for port in range(first, first + count) for each in self.each_with(port)):
                self._next += count - 1
                return first
        raise AssertionError(f"no {count} free ports in a row from {own.start} to {own.stop - 1}")

    def _claim(self) -> range:
        blocks = (range(first, first + self.block) for first in self.ports[:: self.block])
        found = next((block for block in blocks if claimed(block.start)), None)
        assert found is not None, f"other test sessions have all ports from {self.ports.start} to {self.ports.stop - 1}"
        return found


def _ports_of_ingress(port: int) -> tuple[int, ...]:
    return (port, hop_port(port), tls_port(port), grpc_port(port), grpc_tls_port(port))


_ABOVE_THE_KERNELS = _Area(range(61_000, 65_500), 150)
_OF_INGRESSES = _Area(range(10_000, 11_000), 50, _ports_of_ingress)
"""Below the kernel's range, with room for the further ports of each ingress."""
assert len(_OF_INGRESSES.ports) <= min(HOPS_ABOVE, TLS_ABOVE - HOPS_ABOVE), "no port belongs to two"


def free_port() -> int:
    return free_ports(1)


def free_ports(count: int) -> int:
    """The first of so many neighbours that nothing listens on."""
    return _ABOVE_THE_KERNELS.neighbours(count)


def free_ingress_port() -> int:
    """One that is free, and so are its ports for other regions and for TLS."""
    return _OF_INGRESSES.neighbours(1)


_CLAIMS: dict[int, socket.socket] = {}


def claimed(port: int) -> bool:
    """Whether no other process of tests has it: from now on this one does, until `release`. The kernel takes the claim
    back when its owner ends."""
    claim = socket.socket(socket.AF_UNIX)
    try:
        claim.bind(f"\0switchyard-tests-{port}")
    except OSError:
        claim.close()
        return False
    _CLAIMS[port] = claim
    return True


def release(port: int) -> None:
    _CLAIMS.pop(port).close()


def _are_free(ports: Iterable[int]) -> bool:
    with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
        for port in ports:
            stack.enter_context(socket.create_server(("127.0.0.1", port)))
        return True
    return False
