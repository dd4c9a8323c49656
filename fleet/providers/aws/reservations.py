"""What EC2 says of capacity reservations: how much is left in them, and when Capacity Blocks end."""

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime

from fleet.planning.call_budget import PAGE
from fleet.providers.aws import calls


@dataclass(frozen=True, slots=True)
class Reservation:
    """`free`: machines that may still be launched in it; none once it is over."""

    id: str
    free: int
    is_block: bool
    ends_at: datetime | None


def reservations_read(region: str, ids: Collection[str]) -> tuple[Reservation, ...]:
    """Those of these ids that there are. All of the account are listed: one that is unknown would have a call by ids
    refused as a whole.

    Raises:
        CallFailed: not all were said.
    """
    return tuple(
        Reservation(
            id=one["CapacityReservationId"],
            free=one["AvailableInstanceCount"] if one["State"] == "active" else 0,
            is_block=one.get("ReservationType") == "capacity-block",
            ends_at=one.get("EndDate"),
        )
        for page in calls.pages("DescribeCapacityReservations", region, MaxResults=PAGE)
        for one in page["CapacityReservations"]
        if one["CapacityReservationId"] in ids
    )
