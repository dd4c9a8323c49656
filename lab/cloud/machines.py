"""The life of instances by the cloud's clock, capacity by type, zone and market, quotas and limits of calls.

moto's instances run and terminate immediately. Here they are pending and shutting down first, are not found for a
while, and are forgotten an hour after their end. Limits are from "Request throttling for the Amazon EC2 API"; names and
codes of quotas from Service Quotas."""

import copy
import math
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple

from lab.cloud.wire import Call, Refused


class Bucket(NamedTuple):
    """Tokens it holds, and how many come back each second."""

    size: float
    refill: float


READS = Bucket(100, 20)
UNPAGED_READS = Bucket(50, 10)
"""Of DescribeInstances and DescribeInstanceStatus without a filter or pages."""
WRITES = Bucket(50, 5)
BY_OPERATION = {
    "RunInstances": Bucket(5, 2),
    "TerminateInstances": Bucket(100, 5),
    "CreateTags": Bucket(100, 10),
    "DescribeInstanceTopology": Bucket(1, 1),
    "DescribeCapacityBlockOfferings": Bucket(10, 0.15),
    "PurchaseCapacityBlock": Bucket(10, 0.15),
    "CreateLaunchTemplateVersion": Bucket(100, 5),
}
INSTANCES = {"RunInstances": Bucket(1000, 2), "TerminateInstances": Bucket(1000, 20)}
"""A second bucket of these calls: of machines."""
CHANGES = Bucket(5, 5)
"""Of Route 53, an account."""
UNPAGED = ("DescribeInstances", "DescribeInstanceStatus")


class Limits:
    """The buckets. Off until a test switches them on: `enforced`."""

    def __init__(self, *, enforced: bool = False) -> None:
        self.enforced = enforced
        self._left: dict[tuple[str, str], tuple[float, float]] = {}

    def take(self, call: Call, now: float) -> None:
        if not self.enforced:
            return
        if call.service == "route53":
            self._take_tokens(("", "route53"), CHANGES, 1, now, "Throttling")
        elif call.service == "ec2":
            if call.operation in INSTANCES:
                machines = int(call.form.get("MaxCount") or sum("InstanceId." in key for key in call.form))
                self._take_tokens((call.region, f"{call.operation} machines"), INSTANCES[call.operation], machines, now)
            name, bucket = _ec2_bucket(call)
            self._take_tokens((call.region, name), bucket, 1, now)

    def _take_tokens(
        self, key: tuple[str, str], bucket: Bucket, tokens: int, now: float, code: str = "RequestLimitExceeded"
    ) -> None:
        left, at = self._left.get(key, (bucket.size, now))
        left = min(bucket.size, left + (now - at) * bucket.refill)
        self._left[key] = (left, now)
        if left < tokens:
            raise Refused(code, "Request limit exceeded.")
        self._left[key] = (left - tokens, now)


def _ec2_bucket(call: Call) -> tuple[str, Bucket]:
    if call.operation in BY_OPERATION:
        return call.operation, BY_OPERATION[call.operation]
    if not call.operation.startswith(("Describe", "Get")):
        return "writes", WRITES
    asked = any(key.startswith(("Filter.", "MaxResults", "InstanceId.")) for key in call.form)
    return ("unpaged", UNPAGED_READS) if call.operation in UNPAGED and not asked else ("reads", READS)


FAMILIES = {"p": "P", "g": "G and VT", "vt": "G and VT", "inf": "Inf", "trn": "Trn"}
STANDARD = "Standard (A, C, D, H, I, M, R, T, Z)"


def quota_of(instance_type: str, *, spot: bool) -> str:
    """Name of the quota that counts an instance type's vCPUs, as Service Quotas spells it."""
    family = re.match("[a-z]+", instance_type)
    name = FAMILIES.get(family[0] if family else "", STANDARD)
    return f"All {name} Spot Instance Requests" if spot else f"Running On-Demand {name} instances"


def check_quota(quotas: Mapping[str, int], instance_type: str, vcpus: int, running: int, *, spot: bool) -> None:
    most = quotas.get(quota_of(instance_type, spot=spot), math.inf)
    if running + vcpus > most and spot:
        raise Refused("MaxSpotInstanceCountExceeded", "Max spot instance count exceeded")
    if running + vcpus > most:
        raise Refused(
            "VcpuLimitExceeded",
            f"You have requested more vCPU capacity than your current vCPU limit of {most} allows for the instance "
            "bucket that the specified instance type belongs to.",
        )


BLOCK_ENDS_MACHINES_S = 1800.0
"""AWS ends the machines of a Capacity Block from 30 minutes before its end."""


class Market(StrEnum):
    """How machines are paid, as `InstanceMarketOptions.MarketType` has it."""

    ON_DEMAND = "on-demand"
    SPOT = "spot"
    BLOCK = "capacity-block"
    INTERRUPTIBLE = "interruptible-capacity-reservation"


@dataclass
class Reserved:
    """A capacity reservation, or the one of a Capacity Block: machines of a type in a zone, from `starts` to `ends`
    (seconds since 1970; None: no end). `market`: ON_DEMAND for a plain one. `used` by ids of machines."""

    instance_type: str
    zone: str
    total: int
    starts: float
    ends: float | None = None
    market: Market = Market.ON_DEMAND
    is_open: bool = False
    group_arn: str = ""
    network_nodes: tuple[str, ...] = ()
    tags: dict[str, str] = field(default_factory=dict)
    id: str = field(default_factory=lambda: f"cr-{secrets.token_hex(9)[:17]}")
    used: set[str] = field(default_factory=set)
    announced: bool = False

    def state(self, now: float) -> str:
        if now < self.starts:
            return "scheduled"
        return "expired" if self.ends is not None and now >= self.ends else "active"

    def closes_at(self) -> float:
        """From when it takes no more machines, and ends those it has."""
        early = BLOCK_ENDS_MACHINES_S if self.is_block else 0.0
        return math.inf if self.ends is None else self.ends - early

    @property
    def region(self) -> str:
        return self.zone[:-1]

    @property
    def is_block(self) -> bool:
        """A Capacity Block, which ends its machines before its own end."""
        return self.market is Market.BLOCK

    @property
    def left(self) -> int:
        return self.total - len(self.used)


@dataclass
class Capacity:
    """`free`: machines left of (type, zone, market); those that it does not name are plenty."""

    free: dict[tuple[str, str, Market], int] = field(default_factory=dict)
    reserved: dict[str, Reserved] = field(default_factory=dict)

    def reserve(self, reserved: Reserved) -> Reserved:
        self.reserved[reserved.id] = reserved
        return reserved

    def left(self, instance_type: str, zone: str, market: Market) -> float:
        return self.free.get((instance_type, zone, market), math.inf)

    def take(self, instance_type: str, zone: str, market: Market, count: int) -> None:
        """Machines were launched outside of reservations."""
        if (instance_type, zone, market) in self.free:
            self.free[instance_type, zone, market] -= count

    def give_back(self, instance_type: str, zone: str, market: Market) -> None:
        """A machine ended that was in no reservation."""
        if (instance_type, zone, market) in self.free:
            self.free[instance_type, zone, market] += 1

    def wanted(
        self, reservation_id: str | None, instance_type: str, zone: str, market: Market, now: float
    ) -> Reserved | None:
        """The reservation that a launch goes into: the one it names, or an open one that fits. Raises Refused if the
        named one does not exist, does not fit or is not active."""
        if reservation_id is None:
            return next(iter(self._open(instance_type, zone, market, now)), None)
        reserved = self.reserved.get(reservation_id)
        if reserved is None:
            raise Refused(
                "InvalidCapacityReservationId.NotFound",
                f"The capacity reservation ID '{reservation_id}' does not exist",
            )
        if (reserved.instance_type, reserved.zone, reserved.market) != (instance_type, zone, market):
            raise Refused(
                "InvalidParameterValue",
                f"The instance configuration for this RunInstances request does not match the Capacity Reservation "
                f"{reservation_id}: it has {reserved.market} {reserved.instance_type} in {reserved.zone}.",
            )
        if reserved.state(now) != "active" or now >= reserved.closes_at():
            raise Refused("InvalidCapacityReservationState", f"{reservation_id} is not active, or about to end.")
        return reserved

    def _open(self, instance_type: str, zone: str, market: Market, now: float) -> Iterable[Reserved]:
        fits = (instance_type, zone, market)
        for each in self.reserved.values():
            there = each.is_open and each.left and each.state(now) == "active"
            if there and (each.instance_type, each.zone, each.market) == fits:
                yield each


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
        """Returns None if it was never launched here or is forgotten."""
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
