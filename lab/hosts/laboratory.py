"""Hosts and network as they are, and what changes them. Effects are here; what they should be is decided in
`conditions`, `network` and `file_tree`. It runs in the laboratory's PID 1 (`lab.hosts.init`), one change at a time."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from lab.hosts import kernel
from lab.hosts.conditions import (
    SYSCTLS,
    Conditions,
    Steps,
    dropped,
    host_cable,
    outside_cable,
    relayed,
    router_steps,
    rules,
    rules_to_change,
    write_state,
)
from lab.hosts.file_tree import FileTree, etc_files, place_of, remove_files, write
from lab.hosts.host import CLOCK, CRONTAB, LIBRARY, REBOOTED, SHUTDOWN, host_environment
from lab.hosts.places import CHECKOUT, Places
from lab.hosts.topology import CLOUD, OUTSIDE, NoLaboratory, TemporaryHost, Topology

IP_WITHIN_S = 20.0
READY_WITHIN_S = 60.0


@dataclass(frozen=True, slots=True)
class Running:
    """A host that has power: its PID 1 here, and as the real host sees it."""

    pid: int
    outside: int
    watch: int


class Listener(NamedTuple):
    """A socket that listens on the real host, and what it stands for: see `lab.hosts.client.Forward`."""

    listener: socket.socket
    host: str
    port: int
    by_loopback: bool


class Laboratory:
    """One laboratory, from its first router to its end, which is the end of this process."""

    def __init__(self, topology: Topology, places: Places) -> None:
        self.topology = topology
        self.conditions = Conditions(off=frozenset(topology.hosts))
        self.running: dict[str, Running] = {}
        self.clocks: dict[str, float] = {}
        self.shut_down: set[str] = set()
        """Hosts that exited without a command to power off."""
        self._reboots: set[asyncio.Task[None]] = set()
        self._temporary_hosts: dict[str, TemporaryHost] = {}
        self._places = places
        self._rules = {router: frozenset[str]() for router in topology.routers}
        self._relay: Process | None = None
        self._cloud: Process | None = None
        self._helpers: list[Process] = []

    # --- the network --------------------------------------------------------------------------------------------------

    async def make_network(self, forwards: list[Listener]) -> None:
        kernel.mount("tmpfs", "/run", "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=755")
        _ip(None, ["link set lo up"])
        names = (*self.topology.routers, OUTSIDE)
        _ip(None, [f"netns add {name}" for name in names])
        for router in self.topology.routers:
            with kernel.inside_network(router):
                _set_sysctls()
        self._run_steps([*router_steps(self.topology), *outside_cable(self.topology)])
        self._relay = await self._start_helper("lab.hosts.relay", first=self._orders())
        direct = [each for each in forwards if each.host not in self.topology.regions]
        targets = [self._target(each) for each in direct]
        await self._start_helper("lab.hosts.forward", *targets, pass_fds=[each.listener.fileno() for each in direct])
        self._apply()

    async def start_cloud(self, settings: Mapping[str, str | float], forwards: list[Listener]) -> None:
        """Before any host boots. See `lab.hosts.cloud.Settings`; of the forwards it gets those of its load balancers.
        Raises NoLaboratory if it did not start."""
        given = {**settings, "address": str(self.topology.host(CLOUD).address)}
        balanced = [each for each in forwards if each.host in self.topology.regions]
        ways = [f"{each.listener.fileno()}={each.host}:{each.port}" for each in balanced]
        first, descriptors = json.dumps(given).encode() + b"\n", [each.listener.fileno() for each in balanced]
        self._cloud = await self._start_helper("lab.hosts.cloud", *ways, first=first, pass_fds=descriptors)

    def _tell_cloud(self, name: str) -> None:
        if self._cloud and self._cloud.stdin:
            reply = {"host": name, "power": name in self.running, "shut_down": name in self.shut_down}
            self._cloud.stdin.write(json.dumps(reply).encode() + b"\n")

    def _target(self, each: Listener) -> str:
        host = self.topology.host(each.host)
        way = f"{host.name}@127.0.0.1" if each.by_loopback else f"{OUTSIDE}@{host.address}"
        return f"{each.listener.fileno()}={way}:{each.port}"

    def change(self, conditions: Conditions) -> None:
        self.conditions = conditions
        self._apply()
        if self._relay and self._relay.stdin:
            self._relay.stdin.write(self._orders())

    def _apply(self) -> None:
        drops = dropped(self.topology, self.conditions)
        for router, pairs in relayed(self.topology, self.conditions).items():
            wanted = rules(drops, pairs)
            if changes := rules_to_change(self._rules[router], wanted):
                _ip(router, changes)
                self._rules[router] = wanted

    def _orders(self) -> bytes:
        return json.dumps(write_state(self.topology, self.conditions)).encode() + b"\n"

    async def _start_helper(
        self, module: str, *arguments: str, first: bytes = b"", pass_fds: list[int] | None = None
    ) -> Process:
        helper = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", module, *arguments),
            stdin=PIPE,
            stdout=PIPE,
            cwd=CHECKOUT,
            pass_fds=pass_fds or [],
        )
        self._helpers.append(helper)
        if helper.stdin is None or helper.stdout is None:
            raise NoLaboratory(f"{module} has no pipes.")
        helper.stdin.write(first)
        if not await asyncio.wait_for(helper.stdout.readline(), READY_WITHIN_S):
            raise NoLaboratory(f"{module} exited immediately; see {self._places.log}.")
        return helper

    async def hops(self, seconds: float) -> Any:
        watching = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "lab.hosts.hops", str(seconds)), stdin=PIPE, stdout=PIPE, cwd=CHECKOUT
        )
        reply, _ = await asyncio.wait_for(watching.communicate(self._orders()), READY_WITHIN_S + seconds)
        if watching.returncode != 0:
            raise NoLaboratory(f"Connections cannot be watched; why is in {self._places.log}.")
        return json.loads(reply)

    def _run_steps(self, steps: Steps) -> None:
        for namespace, lines in steps:
            _ip(namespace, lines)

    # --- power --------------------------------------------------------------------------------------------------------

    async def boot(self, name: str) -> None:
        """Give a host power. It comes up with the files that it had, and a network that remembers nothing. Raises
        NoLaboratory if it runs already, or the kernel refused something."""
        host = self.topology.host(name)
        if name in self.running:
            raise NoLaboratory(f"{name} has power already.")
        added = self._temporary_hosts.get(name)
        try:
            _ip(None, [f"netns add {name}"])
            self._run_steps(host_cable(self.topology, host, added.link_local if added else ()))
            self.change(self.conditions.with_power(name, on=True))
            reply = await self._start_host(name)
        except NoLaboratory:
            self.change(self.conditions.with_power(name, on=False))
            self._unplug(name)
            raise
        self.shut_down.discard(name)
        running = Running(reply["pid"], reply["outside"], os.pidfd_open(reply["pid"]))
        self.running[name] = running
        asyncio.get_running_loop().add_reader(running.watch, self._ended, name, running)
        self._tell_cloud(name)

    async def _start_host(self, name: str) -> dict[str, Any]:
        starting = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "lab.hosts.host"),
            stdin=PIPE,
            stdout=PIPE,
            cwd=CHECKOUT,
        )
        if starting.stdin is None or starting.stdout is None:
            raise NoLaboratory(f"{name} has no pipes.")
        starting.stdin.write(json.dumps(self._specification(name)).encode() + b"\n")
        line = await asyncio.wait_for(starting.stdout.readline(), READY_WITHIN_S)
        await starting.wait()
        reply: dict[str, Any] = json.loads(line or b'{"error": "it exited without an answer"}')
        if "error" in reply:
            raise NoLaboratory(f"{name} does not boot: {reply['error']}. More may be in {self._places.log}.")
        return reply

    async def power_off(self, name: str) -> None:
        """Power a host off: first its packets stop, then all its processes. Its files stay. Raises NoLaboratory if it
        has no power."""
        self.topology.host(name)
        running = self.running.get(name)
        if running is None:
            raise NoLaboratory(f"{name} has no power.")
        self.change(self.conditions.with_power(name, on=False))
        os.kill(running.pid, signal.SIGKILL)
        while name in self.running:  # noqa: ASYNC110 - the pidfd's callback below takes it out
            await asyncio.sleep(0.005)

    def _ended(self, name: str, running: Running) -> None:
        """Its PID 1 is gone, and so is all that ran on it: it was switched off, or it fell over."""
        asyncio.get_running_loop().remove_reader(running.watch)
        os.close(running.watch)
        status = -1
        with contextlib.suppress(ChildProcessError):
            status = os.waitpid(running.pid, 0)[1]
        if status == 0:
            self.shut_down.add(name)
        try:
            self.change(self.conditions.with_power(name, on=False))
            self._unplug(name)
        finally:
            del self.running[name]
            self._tell_cloud(name)
        if os.WIFEXITED(status) and os.WEXITSTATUS(status) == REBOOTED:
            self._reboots.add(reboot := asyncio.get_running_loop().create_task(self._boot_again(name)))
            reboot.add_done_callback(self._reboots.discard)

    async def _boot_again(self, name: str) -> None:
        with contextlib.suppress(NoLaboratory):  # it was removed or booted meanwhile
            await self.boot(name)

    def _unplug(self, name: str) -> None:
        # A namespace takes its time to go, and its cable with it, whose name and address the next one may need.
        router = self.topology.router_of(self.topology.host(name))
        with kernel.inside_network(router):
            has_cable = name in {interface for _, interface in socket.if_nameindex()}
        if has_cable:
            _ip(router, [f"link del {name}"])
        if (kernel.NETWORKS / name).exists():
            _ip(None, [f"netns del {name}"])

    # --- temporary hosts ----------------------------------------------------------------------------------------------

    async def add(self, added: TemporaryHost) -> None:
        """One host more, with power. Nothing is left of a host of this name that was here before. Raises NoLaboratory
        if its name or its address is taken or cannot be, or it does not boot."""
        topology = self.topology.with_temporary_host(added.host)
        folder = self._places.files_of(added.name)
        remove_files(folder.parent)
        try:
            for path, text in added.files.items():
                write(folder, path, text)
        except ValueError as error:
            raise NoLaboratory(str(error)) from None
        self._temporary_hosts[added.name] = added
        self.topology = topology
        try:
            await self.boot(added.name)
        except NoLaboratory:
            await self.remove(added.name)
            raise

    async def remove(self, name: str) -> None:
        """Remove a temporary host. Of its files only /var/log is kept, next to the folder of its files. Raises
        NoLaboratory if it is not a temporary host."""
        topology = self.topology.without_temporary_host(name)
        if name in self.running:
            await self.power_off(name)
        self.topology = topology
        self.change(self.conditions.without(name))
        del self._temporary_hosts[name]
        self.clocks.pop(name, None)
        self.shut_down.discard(name)
        folder = self._places.files_of(name)
        with contextlib.suppress(FileNotFoundError):
            place_of(folder, "/var/log").rename(folder.with_name("log"))
        remove_files(folder)

    # --- files and clock ----------------------------------------------------------------------------------------------

    def _specification(self, name: str) -> dict[str, Any]:
        host, places = self.topology.host(name), self._places
        given = places.given_to(name)
        given.mkdir(parents=True, exist_ok=True)
        given.chmod(0o755)
        if places.faketime:
            shutil.copy(places.faketime, given / LIBRARY)
        for command in (CRONTAB, SHUTDOWN):
            shutil.copy(Path(__file__).with_name(f"{command}.sh"), given / command)
            (given / command).chmod(0o755)
        if name not in self.clocks:
            self.set_clock(name, 0.0)
        shown, hidden = places.views(host.role)
        added = self._temporary_hosts.get(name)
        devices = added.devices if added else ()
        tree = FileTree(places.files_of(name), shown, hidden, given, is_root=places.uid == 0, devices=devices)
        return {
            "name": name,
            "tree": {field: str(value) if isinstance(value, Path) else value for field, value in asdict(tree).items()},
            "etc": etc_files(name, [(each.name, str(each.address)) for each in self.topology.hosts.values()]),
            "environment": self.environment(name),
            "uid": places.uid,
            "gid": places.gid,
        }

    def environment(self, name: str) -> dict[str, str]:
        user, home = self._places.user()
        every = host_environment(home, user, self._places.python, has_clock=self._places.faketime is not None)
        added = self._temporary_hosts.get(name)
        return {**every, **added.environment} if added else every

    def set_clock(self, name: str, ahead_s: float) -> None:
        """Let a host's time of day differ from the real one. Its processes see it within a second."""
        self.clocks[name] = ahead_s
        clock = self._places.given_to(name) / CLOCK
        fresh = clock.with_suffix(".new")
        fresh.write_text(f"{ahead_s:+.3f}\n")
        fresh.chmod(0o644)
        fresh.replace(clock)

    def has_clocks(self) -> bool:
        return self._places.faketime is not None


def _set_sysctls() -> None:
    for name, value in SYSCTLS.items():
        Path("/proc/sys/net/ipv4", name).write_text(value)


def _ip(namespace: str | None, lines: list[str]) -> None:
    with kernel.inside_network(namespace) if namespace else contextlib.nullcontext():
        done = subprocess.run(
            ["ip", "-batch", "-"], input="\n".join(lines) + "\n", capture_output=True, text=True, check=False,
            timeout=IP_WITHIN_S, env={**os.environ, "PATH": f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"},
        )  # fmt: skip
    if done.returncode != 0:
        raise NoLaboratory(f"The network cannot be made ({'; '.join(done.stderr.split(chr(10))[:2])}).")
