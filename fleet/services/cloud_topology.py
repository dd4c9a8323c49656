"""Learns where machines and reservations of a region of a cloud are in its network: steps of `cloud_upkeep`."""

import logging
import time
from collections.abc import Callable
from datetime import datetime

from fleet.models import CloudRegion
from fleet.providers.aws.calls import CallFailed, Refused
from fleet.providers.aws.topology import region_places, reservation_places
from kernel import clock

WAIT_MOST_S = 0.6
"""For a call that our budget allows so soon. It allows 0.8 a second, so of looks a second apart every other one would
come in vain; with this, one of four does. The region's other steps wait as long."""

log = logging.getLogger(__name__)


def cloud_places(cloud: CloudRegion, now: datetime, wait: Callable[[float], None] = time.sleep) -> None:
    """Ask for one batch. What our own budget does not allow soon comes with the next step."""
    try:
        try:
            region_places(cloud, now)
        except Refused as refused:
            if refused.not_before is None:
                raise
            left_s = (refused.not_before - clock.now()).total_seconds()
            if left_s <= WAIT_MOST_S:
                wait(max(0.0, left_s))
                region_places(cloud, now)
    except CallFailed as error:
        if not (isinstance(error, Refused) and error.not_before is not None):
            log.warning("topology of region %s was not read: %s", cloud.pk, error)


def cloud_reservation_places(cloud: CloudRegion, _: datetime) -> None:
    """Ask for the places of all reservations."""
    try:
        reservation_places(cloud)
    except CallFailed as error:
        log.warning("topology of reservations in region %s was not read: %s", cloud.pk, error)
