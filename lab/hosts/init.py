"""Starts a laboratory: `python -m lab.hosts.init`, with topology and forwarded ports as JSON on standard input. It
becomes PID 1 of a PID namespace that holds every host: its end, however it comes, ends all there and leaves no mount or
interface.

On standard output a line of JSON when all hosts have booted, or why not; afterwards it answers commands on its socket.
"""

import asyncio
import json
import os
import socket
import sys
from collections.abc import Mapping
from typing import Any

from lab.hosts import kernel
from lab.hosts.commands import Commands
from lab.hosts.laboratory import Laboratory, Listener
from lab.hosts.places import Places, read_places
from lab.hosts.state import read_state
from lab.hosts.topology import NoLaboratory

LONGEST_REQUEST = 65536
LOOPBACK = "127.0.0.1"


def listen(forwards: list[list[Any]]) -> list[Listener]:
    """Sockets on the real host for what `lab.hosts.client.Forward` describes.

    Raises:
        NoLaboratory: a port is taken.
    """
    listeners = []
    for port, host, target, by_loopback in forwards:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((LOOPBACK, port))
        except OSError as error:
            raise NoLaboratory(f"Port {port} of this host, for {host}, cannot be used: {error.strerror}.") from None
        listener.listen(256)
        listeners.append(Listener(listener, host, target, by_loopback))
    return listeners


def enter_namespaces(places: Places) -> None:
    """Leave the real host's network and mounts, and its users too where we are not root.

    Raises:
        NoLaboratory: the kernel does not let us.
    """
    try:
        if places.uid:
            kernel.unshare(kernel.CLONE_NEWUSER)
            kernel.map_user(0, places.uid, 0, places.gid)
        kernel.unshare(kernel.CLONE_NEWNS | kernel.CLONE_NEWNET | kernel.CLONE_NEWPID)
        kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    except OSError as error:
        hint = "" if places.uid == 0 else "; unprivileged user namespaces must be allowed here, or be root"
        raise NoLaboratory(f"This kernel makes no hosts for us ({error.strerror}){hint}.") from None


async def run(settings: Mapping[str, Any], places: Places, forwards: list[Listener]) -> None:
    """Make everything, say so, and do as one is told until the end."""
    topology, _ = read_state(settings)
    laboratory = Laboratory(topology, places)
    places.socket.unlink(missing_ok=True)
    await laboratory.make_network(forwards)
    if settings["cloud"]:
        await laboratory.start_cloud(settings["cloud"], forwards)
    for name in topology.hosts:
        await laboratory.boot(name)
    commands = Commands(laboratory)
    os.chdir(places.home)  # a socket's path may not be long
    server = await asyncio.start_unix_server(commands.serve, places.socket.name, limit=LONGEST_REQUEST)
    print(json.dumps({"pid": kernel.pid_outside()}), flush=True)
    await server.serve_forever()


def main() -> int:
    """Start it; the first process ends once the laboratory's has begun."""
    settings, places = json.loads(sys.stdin.readline()), read_places()
    try:
        forwards = listen(settings["forwards"])
        enter_namespaces(places)
        if os.fork():
            return 0
        asyncio.run(run(settings, places, forwards))
    except (NoLaboratory, OSError) as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
