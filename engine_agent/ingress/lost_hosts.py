"""Servers whose host is gone, as after a power failure. Pure; the time is an argument.

A process that ends has its kernel, which resets its connections. A host that ends says nothing: what was sent to it is
sent again for a quarter of an hour, and whoever waits for the answer waits as long. Keepalives do not help: the kernel
sends none while it waits for what it sent to be taken. So the checks decide. Once nothing at all has answered them for
a while, requests that wait there are taken back: those whose answer had not begun are tried elsewhere.
"""

from collections.abc import Iterable

from engine_agent.ingress.desired import ServerKey
from engine_agent.ingress.running import RunningServer

NOTHING_ANSWERS = ("L4TOUT",)
UNREACHABLE = ("No route to host", "Host is down", "Network is unreachable")
"""What routers, or the kernel for want of a neighbour, say of a host that is gone; HAProxy has it with `L4CON`."""


class LostHosts:
    """Since when each server's host has given no sign, and in how many looks.

    It is gone after `after_s` seconds, and if at least as many looks said so: an agent that was itself paused has seen
    one before and one after.
    """

    def __init__(self, after_s: float) -> None:
        self._after_s = after_s
        self._silent: dict[ServerKey, tuple[float, int]] = {}

    def note(self, servers: Iterable[RunningServer], now_s: float) -> tuple[ServerKey, ...]:
        """Take in one look at all servers. Returns those whose requests are to be taken back."""
        silent, gone = {}, []
        for server in servers:
            if not is_silent(server):
                continue
            key = (server.backend, server.name)
            since_s, looks = self._silent.get(key, (now_s, 0))
            silent[key] = since_s, looks + 1
            if server.in_flight and min(now_s - since_s, looks + 1) >= self._after_s:
                gone.append(key)
        self._silent = silent
        return tuple(gone)


def is_silent(server: RunningServer) -> bool:
    """By its health check, nothing answered at its address: no process, and no kernel for one."""
    by_router = server.reason.startswith("L4CON") and any(text in server.reason for text in UNREACHABLE)
    return not server.usable and (server.reason.startswith(NOTHING_ANSWERS) or by_router)
