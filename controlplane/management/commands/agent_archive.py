"""`manage.py agent_archive [TAG…]`: fetch the agent for hosts with another Python or processor than our own, or pack
our Python for hosts whose own is too old."""

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from fleet.releases.services.archive import (
    PROCESSORS,
    PYTHONS,
    ArchiveUnavailable,
    archive_fetch,
    archives,
    carried_pythons,
    python_pack,
)

PYTHON = "python"


class Command(BaseCommand):
    help = "Fetch the agent's archive for other Pythons and processors; without a tag, list those that are there."

    def add_arguments(self, parser: ArgumentParser) -> None:
        known = ", ".join(f"{python}-{processor}" for python in PYTHONS for processor in PROCESSORS)
        parser.add_argument("tags", nargs="*", help=f"some of {known}; {PYTHON}: this computer's Python")

    def handle(self, *args: Any, **options: Any) -> None:
        for tag in options["tags"]:
            try:
                python_pack() if tag == PYTHON else archive_fetch(tag)
            except ArchiveUnavailable as missing:
                raise CommandError(str(missing)) from None
        for archive in archives():
            size_mib = archive.path.stat().st_size / 2**20
            self.stdout.write(f"{archive.tag}  {size_mib:.1f} MiB  sha256 {archive.digest}")
        for python in carried_pythons():
            size_mib, needs = python.path.stat().st_size / 2**20, f"glibc {python.least_glibc} or newer"
            self.stdout.write(f"python-{python.processor}  {size_mib:.1f} MiB  sha256 {python.digest}  {needs}")
