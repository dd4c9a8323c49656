"""Base class of management commands that change something: one record per run, with the account that ran it. A failed
record never stops a command, because commands that stop a fleet must work without the database."""

import logging
from typing import Any

from django.core.management.base import BaseCommand, CommandError
from django.db import Error, transaction

from audit.row_capture import Changes, RowCapture, session_capture
from audit.services import Act, audit_record, command_actor
from kernel import clock
from kernel.refusals import Refusal
from kernel.tracing import bind_request_id

log = logging.getLogger(__name__)


class AuditedCommand(BaseCommand):
    """A command whose `handle` changes the control plane. A `Refusal` becomes its error.

    `one_transaction`: its changes and its record are one transaction. False for commands that start or stop processes,
    which must see committed rows. `has_external_effect`: it has an effect even without written rows. Django's system
    checks are skipped, because they load the whole API; `migrate` runs them."""

    requires_system_checks = []
    one_transaction = True
    has_external_effect = False
    unrecorded_options: frozenset[str] = frozenset()

    def execute(self, *args: Any, **options: Any) -> str | None:
        with bind_request_id():
            try:
                if self.one_transaction:
                    return self._execute_in_transaction(*args, **options)
                with session_capture() as changes:
                    output: str | None = super().execute(*args, **options)
            except Refusal as refused:
                raise CommandError(str(refused)) from refused
            try:
                self._record(changes, options)
            except Error as error:
                log.error("%s did its work, but could not be recorded: %s", self._name, error)
            return output

    @transaction.atomic
    def _execute_in_transaction(self, *args: Any, **options: Any) -> str | None:
        capture = RowCapture()
        capture.start()
        output: str | None = super().execute(*args, **options)
        self._record(capture.finish(), options)
        return output

    @property
    def _name(self) -> str:
        return self.__class__.__module__.rpartition(".")[2]

    def _record(self, changes: Changes, options: dict[str, Any]) -> None:
        if not changes and not self.has_external_effect:
            return
        given = {key: text for key, text in options.items() if key not in _DJANGOS | self.unrecorded_options and text}
        act = Act(
            action=f"command.{self._name}",
            about=changes.objects,
            changes={"asked": given, "rows": changes.rows, "events": changes.events},
        )
        audit_record(actor=command_actor(), act=act, now=clock.now())


_DJANGOS = frozenset(
    {"verbosity", "settings", "pythonpath", "traceback", "no_color", "force_color", "skip_checks", "stdout", "stderr"}
)
