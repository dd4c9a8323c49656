"""Boots the machines that `fleet_stop` ended, before the worker looks for them."""

from typing import Any

from audit.commands import AuditedCommand
from fleet.nodes.services.nodes import embedded_fleet_resume
from kernel import clock


class Command(AuditedCommand):
    help = "Boot the stopped machines of the local fleet again. Machines that still run are left alone."
    one_transaction = False

    def handle(self, *args: Any, **options: Any) -> None:
        booted = embedded_fleet_resume(now=clock.now())
        self.stdout.write(f"booted {booted} stopped machines" if booted else "no stopped machine to boot")
