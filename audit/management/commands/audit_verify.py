"""Checks the chain of audit records and prints its head."""

from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError, CommandParser

from audit.services import audit_verify, exported_head, parse_head


class Command(BaseCommand):
    help = (
        "Check every audit record; print the first broken one and exit with 1. Prints the head, to be stored elsewhere."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--head",
            default="",
            help="NUMBER:DIGEST that was printed earlier and must still match; default: the last exported record",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            kept = parse_head(options["head"]) if options["head"] else exported_head(settings.AUDIT_EXPORT)
        except (ValueError, OSError) as error:
            raise CommandError(str(error)) from error
        verdict = audit_verify(kept)
        if verdict.first_break is not None:
            raise CommandError(f"record {verdict.first_break.number} is broken: {verdict.first_break.why}")
        since = f", and record {kept.number} matches the stored head" if kept is not None else ""
        self.stdout.write(f"{verdict.checked} records are intact{since}; head {verdict.head}")
