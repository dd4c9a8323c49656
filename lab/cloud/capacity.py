"""What of each instance type the cloud has left, by zone and market, and what is reserved."""

import math
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from lab.cloud.wire import Refused

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
        """As DescribeCapacityReservations calls it."""
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
        """Machines that may still be launched into it."""
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
        """The reservation that a launch goes into: the one it names, or an open one that fits.

        Raises:
            Refused: the named one does not exist, does not fit or is not active.
        """
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
