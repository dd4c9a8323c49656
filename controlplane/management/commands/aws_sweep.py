"""`manage.py aws_sweep [--region NAME] [--end]`: what runs or lies about in clouds and belongs to nobody."""

from argparse import ArgumentParser
from collections.abc import Iterator
from datetime import datetime
from typing import Any

from django.core.management.base import CommandError

from audit.commands import AuditedCommand
from fleet.models import CloudRegion
from fleet.planning.states import CloudRegionState
from fleet.providers.aws.calls import CallFailed
from fleet.providers.aws.install import install_ensure
from fleet.providers.aws.listing import region_list
from fleet.services.cloud_leftovers import cloud_leftovers, leftovers_plan
from fleet.services.cloud_listing import cloud_list
from fleet.services.cloud_sweep import sweep_plan
from kernel import clock


class Command(AuditedCommand):
    help = (
        "Print what belongs to nobody in clouds: machines that no row knows, volumes, network interfaces and spot "
        "requests without a machine. Ends nothing, unless --end has it look as the control plane does."
    )
    one_transaction = False
    acts_outside = True

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--region", default="", help="this one alone; else all that are ready")
        parser.add_argument(
            "--end", action="store_true", help="make the control plane's next look now, which ends what two have shown"
        )

    def handle(self, *args: Any, **options: Any) -> None:
        now = clock.now()
        clouds = CloudRegion.objects.filter(state=CloudRegionState.READY).order_by("region_id")
        if options["region"]:
            clouds = clouds.filter(pk=options["region"])
            if not clouds:
                raise CommandError(f"there is no region {options['region']!r} of provider aws that is ready")
        install = install_ensure(now)
        if install.read_only or install.dry_run_until > now:
            until = f"until {install.dry_run_until:%Y-%m-%d %H:%M} UTC, as on the first day of every install"
            self.stdout.write(f"nothing is ended {f'now: {install.read_only}' if install.read_only else until}")
        for cloud in clouds:
            for line in _found(cloud, install.pk, now):
                self.stdout.write(f"{cloud.pk}: {line}")
            if options["end"]:
                cloud_list(cloud, now)
                cloud_leftovers(cloud, now)
                self.stdout.write(f"{cloud.pk}: looked, as the control plane does; its events say what was ended")


def _found(cloud: CloudRegion, install: str, now: datetime) -> Iterator[str]:
    """One line for each, and what would become of it."""
    try:
        listing = region_list(cloud, install, now)
        left = leftovers_plan(cloud, now)
    except CallFailed as error:
        yield f"it was not listed: {error}"
        return
    if not listing.complete:
        yield "machines were not listed as a whole, so none counts as nobody's"
    machines = sweep_plan(cloud, listing, now) if listing.complete else None
    held = [text for text in (machines.held if machines else "", left.held) if text]
    yield from (f"held: {text}" for text in held)
    ends = {*(machines.end if machines else ()), *(one.provider_id for one in left.end)}
    suspects = sorted({*(machines.suspects if machines else ()), *left.suspects})
    for name in suspects:
        yield f"{name} {'would be ended' if name in ends else 'belongs to nobody; not to be ended yet'}"
    if not suspects:
        yield "nothing belongs to nobody"
