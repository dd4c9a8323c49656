"""`manage.py remove_second_factors USER`: for a user who has lost them, when no admin is available. The owner of the
host needs no approval."""

from argparse import ArgumentParser
from typing import Any

from django.contrib.auth.models import User
from django.core.management.base import CommandError

from accounts.services.second_factor import second_factors_remove
from audit.commands import AuditedCommand
from audit.services import command_actor
from kernel import clock


class Command(AuditedCommand):
    help = "Remove a user's second factors and recovery codes, and end the user's sessions."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("username", metavar="USER")

    def handle(self, *_: Any, **options: Any) -> None:
        username: str = options["username"]
        try:
            second_factors_remove(username=username, actor=command_actor().name[:64], now=clock.now())
        except User.DoesNotExist:
            raise CommandError(f"there is no user {username!r}") from None
        self.stdout.write(f"{username} now logs in with the password alone")
