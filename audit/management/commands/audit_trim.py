"""Removes old audit records, from the beginning of the chain."""

from datetime import UTC, datetime
from typing import Any

from django.core.management.base import CommandError, CommandParser

from audit.commands import AuditedCommand
from audit.services import audit_trim


class Command(AuditedCommand):
    help = "Remove audit records before a day, after checking that they are intact and exported."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--before", required=True, help="the first day to keep, YYYY-MM-DD in UTC")
        parser.add_argument(
            "--unexported-too", action="store_true", help="also remove records that were never exported"
        )

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            before = datetime.strptime(options["before"], "%Y-%m-%d").replace(tzinfo=UTC)
        except ValueError as error:
            raise CommandError(str(error)) from error
        removed = audit_trim(before=before, unexported_too=options["unexported_too"])
        self.has_external_effect = removed > 0
        self.stdout.write(f"removed {removed} records from before {options['before']}")
