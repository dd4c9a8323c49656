"""`manage.py audit_export`: sends audit records to a file, a bucket or a syslog server. Changes no record."""

from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from audit.services import audit_export
from audit.sinks import BadTarget, ExportFailed


class Command(BaseCommand):
    help = "Export audit records as JSON lines to a file, a bucket or a syslog server."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--to", required=True, help="s3://bucket/prefix, file:///path, syslog[+tcp]://host:port")
        parser.add_argument("--after", type=int, default=0, help="only records with a greater number")

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            exported = audit_export(target=options["to"], after=options["after"])
        except (BadTarget, ExportFailed) as error:
            raise CommandError(str(error)) from error
        self.stdout.write(f"exported {exported} records")
