"""`manage.py ensure_operator`: creates the operator's login and API token if needed. Safe to repeat at every start."""

import os
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from django.core.management.base import CommandError

from accounts.services.user import operator_ensure
from audit.commands import AuditedCommand
from kernel import clock


class Command(AuditedCommand):
    help = "Create or update the superuser `operator`, and write its API token to a file if none there is valid."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--password-env",
            required=True,
            metavar="NAME",
            help="environment variable that holds the password (never an argument: others could read it)",
        )
        parser.add_argument("--token-file", required=True, type=Path, metavar="PATH", help="where the API token goes")

    def handle(self, *_: Any, **options: Any) -> None:
        variable: str = options["password_env"]
        token_file: Path = options["token_file"]
        password = os.environ.get(variable, "")
        if not password:
            raise CommandError(f"{variable} is not set: put the operator's password into that variable")
        try:
            user, written = operator_ensure(password=password, token_file=token_file, now=clock.now())
        except OSError as error:
            raise CommandError(f"cannot write the API token to {token_file}: {error.strerror}") from error
        what = "API token written to" if written else "API token still valid in"
        self.stdout.write(f"user {user.get_username()} is ready; {what} {token_file}")
