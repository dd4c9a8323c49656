"""`manage.py aws_check [--region NAME]`: what the account lets this install do, call by call. Exit code 1 where
something is denied or missing."""

import sys
from argparse import ArgumentParser
from typing import Any

from django.core.management.base import CommandError

from audit.commands import AuditedCommand
from fleet.clouds.aws.check import Verdict, region_check
from fleet.clouds.aws.identity import install_ensure
from fleet.clouds.ecs.check import cluster_check
from fleet.clouds.models import CloudRegion
from fleet.clouds.services.regions import ECS, TEMPLATES
from kernel import clock

TO_FIX = (Verdict.DENIED, Verdict.MISSING)


class Command(AuditedCommand):
    help = "Print this install's id on AWS, and per region what its account allows, lacks or denies."
    one_transaction = False  # it calls AWS

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--region", default="", help="this one alone; else all regions of provider aws or ecs")

    def handle(self, *args: Any, **options: Any) -> None:
        now = clock.now()
        install = install_ensure(now).id
        self.stdout.write(f"this install is {install}")
        clouds = CloudRegion.objects.filter(region__provider__in=TEMPLATES).order_by("region_id")
        clouds = clouds.select_related("region")
        if options["region"]:
            clouds = clouds.filter(pk=options["region"])
            if not clouds:
                raise CommandError(f"there is no region {options['region']!r} of provider aws or ecs")
        to_fix = 0
        for cloud in clouds:
            self.stdout.write(f"\nregion {cloud.pk}, {cloud.state}{f': {cloud.reason}' if cloud.reason else ''}")
            check = cluster_check if cloud.region.provider == ECS else region_check
            for found in check(cloud, install, now):
                to_fix += found.verdict in TO_FIX
                self.stdout.write(f"  {found.verdict:<8} {found.what}{f': {found.text}' if found.text else ''}")
        if to_fix:
            self.stdout.write(f"\n{to_fix} to mend")
            sys.exit(1)
