"""The cloud of tests in a laboratory: `python -m lab.hosts.cloud LISTENER=REGION:PORT …`, with `Settings` as JSON in
the first line of its standard input, and in each further line that a host has booted or ended. It ends when standard
input does. LISTENER is the descriptor of a socket that listens on the real host, for a region's load balancer.

The cloud answers at the host `aws`, each instance's metadata inside that instance's network: a socket stays in the
namespace that it was made in, so nothing of this runs on a host."""

import asyncio
import contextlib
import itertools
import json
import logging
import os
import select
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from werkzeug.serving import make_server

from lab.cloud.ecs_agents import serve_task_keys
from lab.cloud.entry import healthy_targets
from lab.cloud.imds import serve_metadata
from lab.cloud.server import QuietRequests, World, serve, serving
from lab.cloud.stack import ECS_IMAGE
from lab.hosts import client, kernel
from lab.hosts.cloud_control import PORT, Settings
from lab.hosts.cloud_control_api import METADATA, TASK_KEYS, Control, Hypervisor
from lab.hosts.forward import Target, carry, refuse
from lab.hosts.places import Places, read_places
from lab.hosts.topology import CLOUD, OUTSIDE, NoLaboratory, TemporaryHost, write_temporary_host

METADATA_PORT = 80
STEP_S = 0.2
"""How often instances are compared with hosts."""
LOG = logging.getLogger("cloud")
Listener = tuple[str, int, socket.socket]
"""Region, port of the targets, and a socket that listens on the real host."""


class Balancer:
    """The load balancers of all regions, as far as clients notice, in a thread.

    A connection on the real host goes to a target that the cloud calls healthy. Targets come and go as the control
    plane registers them."""

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


class LaboratoryPower:
    def __init__(self, places: Places) -> None:
        self._places = places

    def add(self, added: TemporaryHost) -> None:
        client.ask(self._places, "add", **write_temporary_host(added))

    def remove(self, name: str) -> None:
        client.ask(self._places, "remove", name=name)

    def restart(self, name: str) -> None:
        """Off and on; it may have no power just now."""
        with contextlib.suppress(NoLaboratory):
            client.ask(self._places, "power-off", name=name)
        client.ask(self._places, "boot", name=name)


class Cloud:
    """The sockets in the laboratory's networks, as hosts are added and removed."""

    def __init__(self, world: World, hypervisor: Hypervisor) -> None:
        self._world, self._hypervisor = world, hypervisor
        self._application = Control(world, hypervisor)
        self._open: dict[str, contextlib.ExitStack] = {}

    def heard(self, said: Mapping[str, Any]) -> None:
        name = said["host"]
        self.close(name)
        if not said["power"]:
            self._hypervisor.ended(name, by_itself=said["shut_down"])
            return
        try:
            self._listen(name)
        except OSError as error:  # it is gone already: that comes next
            LOG.warning("nothing listens on %s: %s", name, error)

    def _listen(self, name: str) -> None:
        machine = self._hypervisor.booted(name)
        if name != CLOUD and machine is None:
            return
        stack = self._open[name] = contextlib.ExitStack()
        if name == CLOUD:
            stack.enter_context(
                _serve(self._application, _listener(name, "0.0.0.0", PORT))  # noqa: S104 - a host of the laboratory
            )
        if machine:
            at = _listener(name, str(METADATA), METADATA_PORT)
            stack.enter_context(serve_metadata(self._world, machine.id, at))
        if machine and machine.moto.image_id == ECS_IMAGE.id:
            at = _listener(name, str(TASK_KEYS), METADATA_PORT)
            stack.enter_context(serve_task_keys(self._world, machine.id, at))

    def close(self, name: str) -> None:
        if stack := self._open.pop(name, None):
            stack.close()


def _listener(network: str, address: str, port: int) -> socket.socket:
    with kernel.inside_network(network):
        listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((address, port))
    return listener


@contextlib.contextmanager
def _serve(application: Control, listener: socket.socket) -> Iterator[None]:
    listener.listen(256)
    server = make_server("", 0, application, threaded=True, request_handler=QuietRequests, fd=listener.fileno())
    with listener, serving(server, "cloud-in-the-lab"):
        yield


def run(settings: Settings, places: Places, balanced: list[Listener]) -> None:
    world = World()
    world.access_key, world.secret = settings.access_key, settings.secret
    world.delays.pending_s = settings.pending_s
    world.delays.target_registered_s = 0.0  # EC2 takes minutes; what a fleet does meanwhile is a matter for its tests
    hypervisor = Hypervisor(world, LaboratoryPower(places), {"AWS_ENDPOINT_URL": settings.url})
    cloud = Cloud(world, hypervisor)
    with serve(world):
        Balancer(world).start(balanced)
        print("ready", flush=True)
        lines = _lines()
        while (line := next(lines)) is not None:
            if line:
                cloud.heard(json.loads(line))
            for bug in world.bugs:
                LOG.error("the cloud failed: %r", bug)
            world.bugs.clear()
            try:
                hypervisor.step()
            except NoLaboratory as error:
                LOG.error("a host is not what its instance is: %s", error)


def _lines() -> Iterator[bytes | None]:
    """Each that comes on standard input; an empty one whenever none came for a while; None at its end."""
    held = b""
    while True:
        line, found, rest = held.partition(b"\n")
        if found:
            held = rest
            yield line
        elif not select.select([0], [], [], STEP_S)[0]:
            yield b""
        elif piece := os.read(0, 65536):
            held += piece
        else:
            yield None


def main(argv: list[str]) -> None:
    kernel.die_with_parent()
    logging.basicConfig(format="%(asctime)s %(name)s %(message)s")
    first = b""
    while not first.endswith(b"\n"):
        first += os.read(0, 1)
    run(Settings(**json.loads(first)), read_places(), [_balanced(text) for text in argv])


def _balanced(text: str) -> Listener:
    descriptor, _, way = text.partition("=")
    region, _, port = way.partition(":")
    return region, int(port), socket.socket(fileno=int(descriptor))


if __name__ == "__main__":
    main(sys.argv[1:])
