"""Learns where machines and reservations of a region of a cloud are in its network: steps of `cloud_upkeep`."""

import logging
from datetime import datetime

from fleet.models import CloudRegion
from fleet.providers.aws.calls import CallFailed, Refused
from fleet.providers.aws.topology import region_places, reservation_places

log = logging.getLogger(__name__)


def cloud_places(cloud: CloudRegion, now: datetime) -> None:
    """Ask for one batch. Our own budget allows about one a second; what it refuses comes with the next step."""
    try:
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
