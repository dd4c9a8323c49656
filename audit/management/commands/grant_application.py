"""Gives the application's role of the database what it needs, and of the audit record no more than adding to it."""

from typing import Any

from django.core.management.base import CommandError, CommandParser

from audit.commands import AuditedCommand
from audit.services import application_role_grant
from kernel.refusals import Refusal


class Command(AuditedCommand):
    help = "Grant a role of PostgreSQL what the control plane's processes need. Run as the owner, after every migrate."
    acts_outside = True

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("role", help="its name; it exists already, and is neither a superuser nor the owner")

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            application_role_grant(role=options["role"])
        except Refusal as refusal:
            raise CommandError(str(refusal)) from refusal
        self.stdout.write(f"{options['role']} may add audit records and read them, and change neither them nor a table")
