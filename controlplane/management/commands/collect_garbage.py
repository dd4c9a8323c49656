"""`manage.py collect_garbage [--region NAME] [--delete]`: prints the garbage of clouds, and deletes it."""

from argparse import ArgumentParser
from collections.abc import Iterator
from datetime import datetime
from typing import Any

from django.core.management.base import CommandError

from audit.commands import AuditedCommand
from fleet.clouds.aws.calls import CallFailed
from fleet.clouds.aws.identity import install_ensure
from fleet.clouds.aws.listing import region_list
from fleet.clouds.models import CloudRegion
from fleet.clouds.services.garbage import (
    cloud_garbage_collect,
    cloud_list,
    cloud_machine_garbage,
    cloud_resource_garbage,
)
from fleet.clouds.services.regions import AWS
from fleet.reconcile.planning.states import CloudRegionState
from kernel import clock


class Command(AuditedCommand):
    help = (
        "Print the garbage of clouds: machines without a row, and volumes, network interfaces and spot requests "
        "without a machine. With --delete, also run the control plane's next garbage collection now."
    )
    one_transaction = False
    has_external_effect = True

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--region", default="", help="one region (default: all that are ready)")
        parser.add_argument("--delete", action="store_true", help="delete what two complete lists have shown")

    def handle(self, *args: Any, **options: Any) -> None:
        now = clock.now()
        clouds = CloudRegion.objects.filter(region__provider=AWS, state=CloudRegionState.READY).order_by("region_id")
        if options["region"]:
            clouds = clouds.filter(pk=options["region"])
            if not clouds:
                raise CommandError(f"there is no region {options['region']!r} of provider aws that is ready")
        install = install_ensure(now)
        if install.read_only:
            self.stdout.write(f"nothing is deleted now: {install.read_only}")
        elif install.dry_run_until > now:
            until = f"{install.dry_run_until:%Y-%m-%d %H:%M} UTC"
            self.stdout.write(f"nothing is deleted until {until}: this is the install's first day")
        for cloud in clouds:
            for line in _garbage_lines(cloud, install.pk, now):
                self.stdout.write(f"{cloud.pk}: {line}")
            if options["delete"]:
                cloud_list(cloud, now)
                cloud_garbage_collect(cloud, now)
                self.stdout.write(f"{cloud.pk}: collected; the region's events name what was deleted")


def _garbage_lines(cloud: CloudRegion, install: str, now: datetime) -> Iterator[str]:
    """Yields one line for each suspect, and what would happen to it."""
    try:
        listing = region_list(cloud, install, now)
        sources = [cloud_resource_garbage(cloud, now)]
    except CallFailed as error:
        yield f"it was not listed: {error}"
        return
    if listing.complete:
        sources.append(cloud_machine_garbage(cloud, listing))
    else:
        yield "the list of machines is incomplete, so no machine counts as garbage"
    plans = [source.plan(now) for source in sources]
    yield from (f"held: {plan.held}" for plan in plans if plan.held)
    deleted = {one.id for plan in plans for one in plan.delete}
    suspects = sorted(name for plan in plans for name in plan.suspects)
    yield from (f"{name} {'would be deleted' if name in deleted else 'is a suspect'}" for name in suspects)
    if not suspects:
        yield "no garbage"
