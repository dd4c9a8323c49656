"""Runs several management commands one after another in one process, because each process of Django takes over a second
of a processor to start: `python -m controlplane.management.in_order migrate --no-input , grant_application switchyard`.

Exits with the status of the first command that fails."""

import os
import sys
from itertools import groupby


def main(arguments: list[str]) -> None:
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.settings")
    from django.core.management import execute_from_command_line

    for is_separator, command in groupby(arguments, ",".__eq__):
        if not is_separator:
            execute_from_command_line(["manage.py", *command])


if __name__ == "__main__":
    main(sys.argv[1:])
