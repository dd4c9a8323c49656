"""`manage.py agent_release [CHECKOUT]`: have the fleet know another release of the agent than the one carried."""

from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from django.core.management.base import CommandError

from audit.commands import AuditedCommand
from fleet.machines.models import Machine
from fleet.machines.planner import WITH_MACHINE_AGENT
from fleet.releases.models import AgentRelease
from fleet.releases.services.archive import NoRelease
from fleet.releases.services.releases import archives_note, release_register
from kernel import clock


class Command(AuditedCommand):
    help = "Keep the agent of a checkout as a release, for `switchyard agents upgrade --to`; without one, list them."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("checkout", nargs="?", type=Path, help="a folder with engine_agent in it")

    def handle(self, *args: Any, **options: Any) -> None:
        checkout: Path | None = options["checkout"]
        if checkout is not None:
            try:
                row = release_register(checkout.resolve(), now=clock.now())
                if Machine.objects.filter(provider__in=WITH_MACHINE_AGENT).exists():
                    archives_note(row)  # it takes seconds, which no request should wait
                self.stdout.write(row.id)
            except (NoRelease, OSError) as error:
                raise CommandError(str(error)) from None
            return
        for row in AgentRelease.objects.all():
            self.stdout.write(
                f"{row.id}  {row.version}  protocol {row.protocol}{'  current' if row.is_current else ''}"
            )
