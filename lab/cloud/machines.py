"""The life of instances by the cloud's clock. moto's own are running at once and terminated at once; here they are
pending first and shutting down first, are not found for a while, and are forgotten an hour after their end."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lab.cloud.capacity import Capacity, Market, Reserved

if TYPE_CHECKING:
    from lab.cloud.world import World

CODES = {"pending": 0, "running": 16, "shutting-down": 32, "terminated": 48}


@dataclass
class Interface:
    """A network interface of a machine: moto's, and what moto does not keep of it."""

    moto: Any
    card: int
    device: int
    kind: str
    deleted_with_machine: bool


@dataclass
class Machine:
    """One instance. Times are seconds since 1970 of the cloud's clock."""

    moto: Any
    region: str
    zone: str
    instance_type: str
    vcpus: int
    market: Market
    launched: float
    visible: float
    runs: float
    interfaces: tuple[Interface, ...]
    group: str = ""
    reserved: Reserved | None = None
    network_nodes: tuple[str, ...] = ()
    ending: float | None = None
    ended: float | None = None
    end_reason: str = ""
    events: list[dict[str, Any]] = field(default_factory=list)
    impaired_since: float | None = None
    reboots: int = 0
    interrupted: float | None = None
    """When AWS ends it, by its own warning."""
    rebalance_at: float | None = None
    """When a rebalance was recommended."""
    announced: str = ""
    """The state that the last event was about."""

    @property
    def id(self) -> str:
        return str(self.moto.id)

    def state(self, now: float) -> str:
        """Its name in DescribeInstances."""
        if self.ended is not None and now >= self.ended:
            return "terminated"
        if self.ending is not None:
            return "shutting-down"
        return "running" if now >= self.runs else "pending"


class Machines:
    """All of a World's that are not forgotten."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self._all: dict[str, Machine] = {}
        self._to_tear_down: set[str] = set()
        self.capacity = Capacity()

    def __iter__(self) -> Iterator[Machine]:
        return iter(list(self._all.values()))

    def get(self, machine_id: str) -> Machine | None:
        """None: never launched here, or forgotten."""
        return self._all.get(machine_id)

    def add(self, machine: Machine) -> None:
        self._all[machine.id] = machine
        if machine.reserved:
            machine.reserved.used.add(machine.id)

    def live(self) -> list[Machine]:
        return [each for each in self if each.ending is None]

    def end(self, machine: Machine, reason: str, message: str) -> None:
        """It begins to shut down; again is nothing. `reason` and `message` as `StateReason` has them."""
        if machine.ending is not None:
            return
        now = self._world.clock.now()
        machine.ending, machine.ended = now, now + self._world.delays.shutting_down_s
        machine.moto._reason = machine.end_reason = message
        machine.moto.state_reason.code, machine.moto.state_reason.message = reason, message
        self._to_tear_down.add(machine.id)

    def settle(self) -> None:
        """Make moto's instances what the clock says that they are now."""
        now = self._world.clock.now()
        for machine in self:
            if machine.interrupted is not None and now >= machine.interrupted:
                self.end(machine, "Server.SpotInstanceTermination", "Your instance was reclaimed")
            if machine.reserved and now >= machine.reserved.closes_at():
                self.end(machine, "Server.CapacityBlockExpired", "Your Capacity Block has ended")
            state = machine.state(now)
            if state == "terminated" and machine.id in self._to_tear_down:
                self._tear_down(machine)
            machine.moto._state.name, machine.moto._state.code = state, CODES[state]
            if machine.ended is not None and now >= machine.ended + self._world.delays.forgotten_s:
                self._forget(machine)

    def _tear_down(self, machine: Machine) -> None:
        """What AWS does at an instance's end, and what moto leaves behind."""
        self._to_tear_down.discard(machine.id)
        reason = machine.moto.state_reason
        ec2 = self._world.backend("ec2", machine.region)
        for each in machine.interfaces:
            each.moto.delete_on_termination = False  # moto must not take its own for all of them
        machine.moto.terminate()
        machine.moto.state_reason, machine.moto._reason = reason, machine.end_reason
        machine.moto.nics = {0: copy.copy(machine.interfaces[0].moto)}  # moto describes no machine without
        for each in machine.interfaces:
            each.moto.instance, each.moto.attachment_id, each.moto.status = None, None, "available"
            if each.deleted_with_machine:
                ec2.enis.pop(each.moto.id, None)
        subnet = ec2.get_subnet(machine.moto.subnet_id)
        for address in machine.moto._private_ips:
            subnet.del_subnet_ip(address)
        machine.moto._private_ips = set()  # or its end in this process would give them back once more
        if machine.reserved:
            machine.reserved.used.discard(machine.id)
        else:
            self.capacity.give_back(machine.instance_type, machine.zone, machine.market)

    def _forget(self, machine: Machine) -> None:
        reservations = self._world.backend("ec2", machine.region).reservations
        for reservation in list(reservations.values()):
            if machine.moto in reservation.instances:
                reservation.instances.remove(machine.moto)
            if not reservation.instances:
                reservations.pop(reservation.id, None)
        del self._all[machine.id]
