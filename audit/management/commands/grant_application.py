"""Grants the application's database role the minimum that it needs; it may only add audit records."""

from typing import Any

from django.core.management.base import CommandParser

from audit.commands import AuditedCommand
from audit.services import application_role_grant


class Command(AuditedCommand):
    help = "Grant a PostgreSQL role the rights of the control plane's processes. Run it as owner after each migrate."
    has_external_effect = True

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("role", help="name of an existing role that is neither a superuser nor the owner")

    def handle(self, *args: Any, **options: Any) -> None:
        application_role_grant(role=options["role"])
        self.stdout.write(
            f"{options['role']} may add and read audit records, and may change neither records nor tables"
        )
