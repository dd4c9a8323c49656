"""The base of management commands that change something: one record for each run that did, with the account that ran
it. It never keeps a command from doing its work: what stops a fleet must work while the database is away."""

import getpass
import logging
import os
from contextlib import ExitStack
from typing import Any

from django.core.management.base import BaseCommand
from django.db import Error, transaction

from audit.models import Proof
from audit.services.record import Act, Actor, audit_record
from audit.watching import watching
from kernel import clock
from kernel.correlation import correlated
from kernel.trail import keep_trail

log = logging.getLogger(__name__)


class AuditedCommand(BaseCommand):
    """A command whose `handle` changes the control plane.

    `together`: its changes and its record are one transaction. False for commands that start or end processes, which
    must see what was committed. `acts_outside`: it does something even when it writes no row.
    """

    together = True
    acts_outside = False
    untold_options: frozenset[str] = frozenset()

    def execute(self, *args: Any, **options: Any) -> str | None:
        with ExitStack() as stack:
            stack.enter_context(correlated())
            trail = stack.enter_context(keep_trail())
            if self.together:
                stack.enter_context(transaction.atomic())
            stack.enter_context(watching(trail))
            said: str | None = super().execute(*args, **options)
            if trail.changed or self.acts_outside:
                self._record(trail.objects, {"rows": trail.rows, "events": trail.events}, options)
        return said

    def _record(self, about: list[str], changes: dict[str, Any], options: dict[str, Any]) -> None:
        name = self.__class__.__module__.rpartition(".")[2]
        asked = {key: text for key, text in options.items() if key not in _DJANGOS | self.untold_options and text}
        act = Act(action=f"command.{name}", about=about, changes={"asked": asked, **changes})
        try:
            audit_record(actor=command_actor(), act=act, now=clock.now())
        except Error as error:
            if self.together:
                raise
            log.error("%s did its work, but could not be recorded: %s", name, error)


_DJANGOS = frozenset(
    {"verbosity", "settings", "pythonpath", "traceback", "no_color", "force_color", "skip_checks", "stdout", "stderr"}
)


def command_actor() -> Actor:
    """The account that runs this process, and the machine."""
    try:
        account = getpass.getuser()
    except (KeyError, OSError):
        account = f"uid {os.getuid()}"
    return Actor(account, Proof.COMMAND, os.uname().nodename)
