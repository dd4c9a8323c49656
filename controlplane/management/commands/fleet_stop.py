"""Ends every machine of the embedded providers in this home: agents, engines, proxies and ingresses."""

from typing import Any

from django.conf import settings

from audit.commands import AuditedCommand
from fleet.providers import embedded_providers


class Command(AuditedCommand):
    help = "Stop every process of the local fleet of this home. The database keeps what should run; `make up` resumes."
    one_transaction = False
    acts_outside = True

    def handle(self, *args: Any, **options: Any) -> None:
        stopped = sum(provider.terminate_all() for provider in embedded_providers())
        self.stdout.write(f"stopped {stopped} processes of {settings.SWITCHYARD_HOME}")
