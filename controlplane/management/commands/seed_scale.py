"""Fills an empty database with a large fleet that nothing runs, to see how screens and API carry it."""

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from fleet.deployments.services.large_demo import load_test_fleet_seed
from kernel import clock
from kernel.refusals import Conflict
from traffic.routing.services.tables import load_test_traffic_seed


class Command(BaseCommand):
    help = "Fill an empty database with a large fleet that nothing runs. Never for a database that is in use."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--cells", type=int, default=2500)
        parser.add_argument("--nodes", type=int, default=5000)
        parser.add_argument("--no-past", action="store_true", help="without events and load of the past: much faster")

    def handle(self, *args: Any, **options: Any) -> None:
        now = clock.now()
        try:
            seeded = load_test_fleet_seed(
                cells=options["cells"], nodes=options["nodes"], now=now, with_past=not options["no_past"]
            )
        except Conflict as refused:
            raise CommandError(str(refused)) from refused
        load_test_traffic_seed(now=now)
        self.stdout.write(
            f"{seeded.cells} cells on {seeded.nodes} nodes, in {seeded.regions} regions and {seeded.deployments}"
            " deployments"
        )
