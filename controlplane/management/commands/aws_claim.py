"""Says that this control plane is the one that may change its clouds."""

from typing import Any

from django.core.management.base import CommandParser

from audit.commands import AuditedCommand
from fleet.clouds.services.upkeep import cloud_claim
from kernel import clock


class Command(AuditedCommand):
    help = "Take over the clouds of this install, whichever copy of its database held them. Stop that one first."
    one_transaction = False
    has_external_effect = True

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--confirm", required=True, metavar="INSTALL", help="the install's name, such as sw-…")

    def handle(self, *args: Any, **options: Any) -> None:
        install = cloud_claim(confirm=options["confirm"], now=clock.now())
        self.stdout.write(f"{install} holds its clouds; the first beat follows within a minute")
