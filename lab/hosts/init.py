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
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from typing import Any

from lab.hosts import kernel
from lab.hosts.conditions import Cut, Lost, Slowness, read_state
from lab.hosts.laboratory import Laboratory, Listener
from lab.hosts.places import Places, read_places
from lab.hosts.topology import NoLaboratory, read_temporary_host

LONGEST_WATCH_S = 30.0


class Commands:
    """What may be asked on the socket: a JSON object in a line with `do`, answered with one."""

    def __init__(self, laboratory: Laboratory) -> None:
        self._laboratory = laboratory
        self._alone = asyncio.Lock()
        self._known: dict[str, Callable[..., Awaitable[Any]]] = {
            "status": self.status,
            "cut": self.cut,
            "heal": self.heal,
            "slow": self.slow,
            "power-off": self.power_off,
            "boot": self.boot,
            "add": self.add,
            "remove": self.remove,
            "skew": self.skew,
            "where": self.where,
            "hops": self.hops,
        }

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            request = json.loads(await reader.readline())
            async with self._alone:
                answer = {"done": await self._known[request.pop("do")](**request)}
        except NoLaboratory as error:
            answer = {"error": str(error)}
        except (OSError, ValueError, TypeError, KeyError) as error:
            answer = {"error": f"The laboratory could not do that: {error!r}"}
        writer.write(json.dumps(answer).encode() + b"\n")
        writer.close()

    async def status(self) -> Any:
        laboratory = self._laboratory
        return {
            "hosts": [
                {**asdict(host), "address": str(host.address), **self._state(host.name)}
                for host in laboratory.topology.hosts.values()
            ],
            "sites": {site: laboratory.conditions.of(site) for site in laboratory.topology.networks},
        }

    def _state(self, name: str) -> dict[str, Any]:
        laboratory = self._laboratory
        has_power = name in laboratory.running
        return {
            "power": has_power,
            "shut_down": name in laboratory.shut_down,
            "processes": _processes(laboratory.running[name].outside) if has_power else 0,
            "ahead_s": laboratory.clocks.get(name, 0.0),
            "wrong": laboratory.conditions.of(name),
        }

    async def cut(self, name: str, other: str | None, lost: str) -> None:
        for each in (name, *([other] if other else [])):
            self._laboratory.topology.network_of(each)
        self._laboratory.change(self._laboratory.conditions.with_cut(Cut(name, other, Lost(lost))))

    async def heal(self, name: str | None) -> None:
        if name:
            self._laboratory.topology.network_of(name)
        self._laboratory.change(self._laboratory.conditions.healed(name))

    async def slow(self, name: str, delay_s: float, loss: float) -> None:
        self._laboratory.topology.network_of(name)
        self._laboratory.change(self._laboratory.conditions.with_slow(name, Slowness(delay_s, loss)))

    async def power_off(self, name: str) -> None:
        await self._laboratory.power_off(name)

    async def boot(self, name: str) -> None:
        await self._laboratory.boot(name)

    async def add(self, **added: Any) -> None:
        await self._laboratory.add(read_temporary_host(added))

    async def remove(self, name: str) -> None:
        await self._laboratory.remove(name)

    async def skew(self, name: str, seconds: float) -> None:
        self._laboratory.topology.host(name)
        if not self._laboratory.has_clocks():
            raise NoLaboratory("Clocks cannot be set: the package libfaketime is not installed for this machine.")
        self._laboratory.set_clock(name, seconds)

    async def hops(self, seconds: float) -> Any:
        if not 0 < seconds <= LONGEST_WATCH_S:
            raise NoLaboratory(f"{seconds:g} s: connections are watched for up to {LONGEST_WATCH_S:g} s.")
        return await self._laboratory.hops(seconds)

    async def where(self, name: str) -> Any:
        """The pids, as the real host sees them, by whose namespaces one comes in; what a process there gets."""
        self._laboratory.topology.host(name)
        running = self._laboratory.running.get(name)
        if running is None:
            raise NoLaboratory(f"{name} has no power: `lab boot {name}` first.")
        environment = self._laboratory.environment(name)
        return {"pid": running.outside, "laboratory": kernel.pid_outside(), "environment": environment}


def _processes(init: int) -> int:
    own, count = os.stat(f"/proc/{init}/ns/pid").st_ino, 0
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                count += os.stat(f"/proc/{entry}/ns/pid").st_ino == own
            except OSError:
                continue
    return count


LONGEST_REQUEST = 65536
LOOPBACK = "127.0.0.1"


def listen(forwards: list[list[Any]]) -> list[Listener]:
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
    """Leave the real host's network and mounts, and its users too where we are not root. Raises NoLaboratory if the
    kernel does not let us."""
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
    """Create the laboratory, report that, and execute commands until it is stopped."""
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
