"""The load balancer of each region, as far as clients notice: a connection on the real host goes to a target that the
cloud calls healthy. Targets come and go as the control plane registers them; nothing here is told of an ingress.
"""

import asyncio
import itertools
import socket
import threading
from functools import partial

from lab.cloud.nlb import healthy_targets
from lab.cloud.world import World
from lab.hosts.forward import Target, carry, refuse
from lab.hosts.topology import OUTSIDE

Listener = tuple[str, int, socket.socket]
"""Region, port of the targets, and a socket that listens on the real host."""


class Balancer:
    """One for all regions. It has a thread of its own."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._turns = itertools.count()

    def start(self, listeners: list[Listener]) -> None:
        threading.Thread(target=lambda: asyncio.run(self._serve(listeners)), name="balancer", daemon=True).start()

    async def _serve(self, listeners: list[Listener]) -> None:
        for region, port, listener in listeners:
            await asyncio.start_server(partial(self._carry, region, port), sock=listener, backlog=256)
        await asyncio.Event().wait()

    async def _carry(self, region: str, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        targets = healthy_targets(self._world, region, port)
        if not targets:
            refuse(writer)
            return
        await carry(reader, writer, Target(OUTSIDE, targets[next(self._turns) % len(targets)], port))
