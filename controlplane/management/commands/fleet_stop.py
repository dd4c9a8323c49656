"""Ends every machine of the embedded providers in this home: agents, engines, proxies and ingresses. Machines that cost
money are stopped only if the install's name is given."""

from collections.abc import Iterable
from typing import Any

from django.conf import settings
from django.core.management.base import CommandError, CommandParser
from django.db import Error

from audit.commands import AuditedCommand
from fleet.clouds.base import ProviderError, embedded_providers, provider_named
from fleet.clouds.models import Install
from fleet.machines.models import Machine
from fleet.machines.planner import CLOUDS, ENDED
from fleet.reconcile.planning.states import MachineState


class Command(AuditedCommand):
    help = "Stop every process of the local fleet of this home. The database keeps what should run; `make up` resumes."
    one_transaction = False
    has_external_effect = True

    def add_arguments(self, parser: CommandParser) -> None:
        what = "also terminate the machines of its clouds: the install's name, such as sw-…"
        parser.add_argument("--cloud", default="", metavar="INSTALL", help=what)

    def handle(self, *args: Any, **options: Any) -> None:
        stopped = sum(provider.terminate_all() for provider in embedded_providers())
        self.stdout.write(f"stopped {stopped} processes of {settings.SWITCHYARD_HOME}")
        try:
            self._stop_clouds(options["cloud"])
        except Error as error:
            self.stderr.write(f"what runs in clouds is not known: {error}")

    def _stop_clouds(self, name: str) -> None:
        running = Machine.objects.filter(provider__in=CLOUDS).exclude(state=MachineState.GONE)
        running = running.exclude(cloud_state__in=ENDED).select_related("instance_type")
        install = Install.objects.first()
        if install is None or not running:
            return
        said = f"{len(running)} machines of {_names(running)}, for {sum(map(_price, running)):.2f} $/h"
        if not name:
            self.stdout.write(f"{said}, run on; `manage.py fleet_stop --cloud {install}` ends them")
            return
        if name != install.pk:
            raise CommandError(f"this install is {install}, not {name!r}; {said}, run on")
        failed = [f"{row.provider_id}: {error}" for row in running if (error := _terminate_machine(row)) is not None]
        self.stdout.write(f"ended {len(running) - len(failed)} of {said}")
        if failed:
            raise CommandError("these may run on: " + "; ".join(failed))


def _names(rows: Iterable[Machine]) -> str:
    return ", ".join(sorted({row.provider for row in rows}))


def _price(row: Machine) -> float:
    """Of an hour, as it was read, else as it is stated of the type."""
    stated = row.instance_type.price_per_hour if row.instance_type else None
    return row.price_per_hour or stated or 0.0


def _terminate_machine(machine: Machine) -> ProviderError | None:
    try:
        provider_named(machine.provider).terminate(machine.runs)
    except ProviderError as error:
        return error
    return None
