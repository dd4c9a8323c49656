"""`manage.py deactivate_user USER`: removes an admin when no second admin is left to approve it. The owner of the
host needs no approval."""

from argparse import ArgumentParser
from typing import Any

from django.contrib.auth.models import User
from django.core.management.base import CommandError

from accounts.services.user import user_change
from audit.commands import AuditedCommand
from audit.services import command_actor
from kernel import clock


class Command(AuditedCommand):
    help = "Deactivate a user or a service account: end its sessions and tokens, and withdraw its requests."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("username", metavar="USER")

    def handle(self, *_: Any, **options: Any) -> None:
        username: str = options["username"]
        try:
            user_change(username=username, actor=command_actor().name[:64], now=clock.now(), active=False)
        except User.DoesNotExist:
            raise CommandError(f"there is no user {username!r}") from None
        self.stdout.write(f"{username} is deactivated")
