"""Lists the machines of a region of a cloud, stores the states of those that are recorded, and collects the garbage."""

import logging
from datetime import datetime

from fleet.models import CloudRegion
from fleet.providers.aws.calls import CallFailed
from fleet.providers.aws.install import install_ensure
from fleet.providers.aws.listing import presence_store, region_list
from fleet.services.garbage_collection import cloud_machine_garbage, cloud_source_collect
from kernel import clock

log = logging.getLogger(__name__)


def cloud_list(cloud: CloudRegion, now: datetime) -> None:
    """List a region, and note which zones did not answer. Blocks as long as the cloud does."""
    try:
        listing = region_list(cloud, install_ensure(now).id, now)
    except CallFailed as error:
        log.warning("region %s was not listed: %s", cloud.pk, error)
        return
    presence_store(cloud, listing, clock.now())
    columns = {"listed_at": now} if listing.complete else {}
    CloudRegion.objects.filter(pk=cloud.pk).update(silent_zones=sorted(listing.silent_zones), **columns)
    if listing.complete:
        cloud_source_collect(cloud, cloud_machine_garbage(cloud, listing), clock.now())
