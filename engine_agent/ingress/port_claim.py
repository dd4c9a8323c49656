"""One ingress for each address and port of a host. HAProxy shares its port with whoever else asks to (SO_REUSEPORT), so
two fleets with the same port would each get half of the other's requests, and no error. It never ends another process.
"""

import contextlib
import errno
import socket
import time
from collections.abc import Callable, Iterator

from engine_agent.protocol.ports import INGRESS_CLAIM

RELEASED_WITHIN_S = 5.0
"""The worker of a HAProxy that was killed just now listens until it notices."""
POLL_S = 0.1


class PortTaken(OSError):
    """Somebody else serves on this port, or is about to."""


@contextlib.contextmanager
def port_claimed(host: str, port: int, serves_already: Callable[[], bool]) -> Iterator[None]:
    """Keep other ingresses from this address and port. `serves_already`: whether the one who listens is our own.

    Raises:
        PortTaken: another ingress has claimed it, or something else listens on it.
    """
    with socket.socket(socket.AF_UNIX) as claim:
        try:
            claim.bind(INGRESS_CLAIM.format(host=host, port=port))
        except OSError as error:
            raise PortTaken(_refusal(host, port, "another ingress of this host has it")) from error
        deadline_s = time.monotonic() + RELEASED_WITHIN_S
        while not serves_already() and is_taken(host, port):
            if time.monotonic() >= deadline_s:
                raise PortTaken(_refusal(host, port, "something listens on it"))
            time.sleep(POLL_S)
        yield


def _refusal(host: str, port: int, why: str) -> str:
    return (
        f"{host}:{port} is not free: {why}. Both would get a part of the requests: end the other one "
        f"(`ss -ltnp` names it), or give this region another port"
    )


def is_taken(host: str, port: int) -> bool:
    """Whether somebody listens there. An address that this host does not have is for HAProxy to refuse."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False
