"""Lists what runs in a region of a cloud. What that says of the machines that are recorded is kept, what is nobody's is
ended."""

import logging
from datetime import datetime

from fleet.models import CloudRegion
from fleet.providers.aws.calls import CallFailed
from fleet.providers.aws.install import install_ensure
from fleet.providers.aws.listing import presence_store, region_list
from fleet.services.cloud_sweep import cloud_sweep
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
        cloud_sweep(cloud, listing, clock.now())
