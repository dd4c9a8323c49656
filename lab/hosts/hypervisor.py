"""Lets what the cloud launches be real: an instance that runs has a host, one that has ended has none.

It compares and follows; nobody calls it, so that whatever ends an instance, a call, a spot warning or the end of its
Capacity Block, takes its host away. Whoever gives hosts power is a `Power`: the laboratory, or a test.
"""

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from ipaddress import IPv4Address
from pathlib import Path
from typing import Protocol

from lab.cloud.machines import Machine
from lab.cloud.world import World
from lab.hosts.file_tree import START_AT_BOOT
from lab.hosts.guests import Guest
from lab.hosts.topology import Host, NoLaboratory, Role

METADATA = IPv4Address("169.254.169.254")
FIRST_BOOT = f"{START_AT_BOOT}/00-cloud-init.start"
SHUT_DOWN = "Client.InstanceInitiatedShutdown"
NOT_BOOTED = "Server.InternalError"


class Power(Protocol):
    """Hosts that come and go. Each raises `NoLaboratory` where that cannot be."""

    def add(self, guest: Guest) -> None:
        """It has booted when this returns."""

    def remove(self, name: str) -> None:
        """It is gone when this returns, with its files."""

    def restart(self, name: str) -> None:
        """It has booted again, with its files."""


@dataclass
class Running:
    name: str
    reboots: int


class Hypervisor:
    """The hosts of one cloud's instances. `environment`: what each host's processes get. It has one thread."""

    def __init__(self, world: World, power: Power, environment: Mapping[str, str]) -> None:
        self._world, self._power, self._environment = world, power, environment
        self._numbers = itertools.count(1)
        self.running: dict[str, Running] = {}
        """By instance."""

    def step(self) -> None:
        """Make hosts what the instances are now."""
        with self._world.settled():
            now = self._world.clock.now()
            wanted = {machine.id: machine for machine in self._world.machines if machine.state(now) == "running"}
        # What has ended goes first: the next one may have its address.
        for machine_id in [each for each in self.running if each not in wanted]:
            self._power.remove(self.running.pop(machine_id).name)
        for machine_id, machine in wanted.items():
            host = self.running.get(machine_id)
            if host is None:
                self._boot(machine)
            elif host.reboots != machine.reboots:
                host.reboots = machine.reboots
                self._power.restart(host.name)

    def _boot(self, machine: Machine) -> None:
        name = f"v{next(self._numbers)}"  # an instance's own name is longer than that of an interface may be
        host = Host(name, Role.GUEST, machine.region, IPv4Address(machine.moto.private_ip_address))
        files = {FIRST_BOOT: Path(__file__).with_name("cloud-init.sh").read_text()}
        self.running[machine.id] = Running(name, machine.reboots)
        try:
            self._power.add(Guest(host, (METADATA,), self._environment, files))
        except NoLaboratory as error:
            del self.running[machine.id]
            with self._world.settled():
                self._world.machines.end(machine, NOT_BOOTED, str(error))

    def machine_of(self, name: str) -> Machine | None:
        """The instance that a host is; None: it is none of ours any more."""
        machine_id = next((each for each, host in self.running.items() if host.name == name), "")
        return self._world.machines.get(machine_id)

    def ended(self, name: str, *, by_itself: bool) -> None:
        """A host has no power any more: it shut itself down, which ends the instance, or its hardware failed."""
        machine = self.machine_of(name)
        if machine is None:
            return
        with self._world.settled():
            if by_itself:
                self._world.machines.end(machine, SHUT_DOWN, "Instance initiated shutdown")
            elif machine.impaired_since is None:
                machine.impaired_since = self._world.clock.now()

    def booted(self, name: str) -> Machine | None:
        """A host has power; the instance that it is."""
        machine = self.machine_of(name)
        if machine is not None:
            machine.impaired_since = None
        return machine

    def table(self) -> Iterable[dict[str, str]]:
        """Every instance that is not forgotten, for people."""
        with self._world.settled():
            now = self._world.clock.now()
            for machine in self._world.machines:
                host = self.running.get(machine.id)
                yield {
                    "instance": machine.id,
                    "host": host.name if host else "",
                    "state": machine.state(now),
                    "type": machine.instance_type,
                    "zone": machine.zone,
                    "market": str(machine.market),
                    "address": str(machine.moto.private_ip_address or ""),
                    "reason": machine.end_reason,
                }
