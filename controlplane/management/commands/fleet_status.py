"""Says how far the fleet is, and waits until every wanted cell is ready."""

import time
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from fleet.cells.selectors import Readiness, fleet_readiness
from traffic.routing.selectors import ingresses_waiting

POLL_S = 0.2


class Command(BaseCommand):
    help = "Print how many cells are ready; with --wait-s, wait until all are and every ingress follows."
    requires_system_checks = []

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--wait-s", type=float, default=0.0, help="seconds to wait; 0 only prints")

    def handle(self, *args: Any, **options: Any) -> None:
        deadline = time.monotonic() + options["wait_s"]
        last = ""
        while True:
            readiness = self._print_readiness()
            if (line := readiness.summary) != last:
                self.stdout.write(line)
                self.stdout.flush()
                last = line
            if readiness.is_ready or not options["wait_s"]:
                return
            if time.monotonic() >= deadline:
                waiting = "; ".join(readiness.waiting_for)
                raise CommandError(f"not ready after {options['wait_s']:.0f} s: {waiting}")
            time.sleep(POLL_S)

    def _print_readiness(self) -> Readiness:
        readiness = fleet_readiness()
        return readiness.plus(ingresses_waiting()) if readiness.is_ready else readiness
