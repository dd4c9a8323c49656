"""Captures the rows that a request or command writes. Database triggers record every row in the transaction of the
change, for any statement; a rollback, also to a savepoint, removes these records as well.

Triggers do nothing unless a capture is on, which is the case for one transaction or one command's session only."""

import json
import logging
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from django.apps import apps
from django.db import DEFAULT_DB_ALIAS, Error, connection, connections

from audit.record_format import HIDDEN, is_secret_name

NOT_CAPTURED = frozenset(
    {
        "django_session",
        "django_admin_log",
        "kernel_lease",
        "kernel_idempotentanswer",
        "kernel_change",
        "kernel_changehorizon",
        "accounts_loginfailure",
        "accounts_keychallenge",
        "audit_auditrecord",
        "audit_auditchain",
        "audit_auditexport",
        "audit_capturedrow",
    }
)
"""Bookkeeping tables, whose rows are not changes."""
EVENTS = "kernel_event"
HIDDEN_COLUMNS = frozenset(
    {"password", "digest", "key_digest", "session_key", "last_login", "last_used_at", "updated_at"}
)
"""Hashes of secrets, and times that every use updates."""
USE_TIMES = frozenset({"last_used_at", "last_seen_at"})
"""A row with changes only in these columns was used, not changed."""
MAX_ROWS_LISTED = 20
"""Consecutive rows of one table and operation; of more rows only the number is recorded."""

_SWITCH = """
SELECT current_setting('switchyard.audit_capture', true), set_config('switchyard.audit_capture', %s, %s)
"""
_TAKE = """
DELETE FROM audit_capturedrow WHERE capture = %s
RETURNING id, table_name, operation, key::text, columns::text
"""
_DROP_ABANDONED = "DELETE FROM audit_capturedrow WHERE at < now() - interval '1 day'"
_TABLES_WITH_TRIGGER = """
SELECT relname FROM pg_trigger JOIN pg_class ON pg_class.oid = tgrelid WHERE tgname = 'audit_capture'
"""
_CREATE_TRIGGER = """
CREATE TRIGGER audit_capture AFTER INSERT OR UPDATE OR DELETE ON {table} FOR EACH ROW
WHEN (current_setting('switchyard.audit_capture', true) <> '') EXECUTE FUNCTION audit_capture_row({key})
"""

log = logging.getLogger(__name__)


@dataclass
class Changes:
    """Rows that were written and not rolled back. `objects`: objects of the events as `noun/key`, in order."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    objects: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.rows or self.events)


class RowCapture:
    """One capture: `start` before the first write, `finish` as the last step before the commit."""

    def __init__(self, *, session: bool = False) -> None:
        """`session`: captures over several transactions of this connection, not inside one."""
        self._session = session
        self._name = uuid.uuid4().hex
        self._outer = ""

    def start(self) -> None:
        with connection.cursor() as cursor:
            if self._session:
                cursor.execute(_DROP_ABANDONED)
            cursor.execute(_SWITCH, [self._name, not self._session])
            self._outer = cursor.fetchone()[0] or ""

    def finish(self) -> Changes:
        """Stop capturing and return what was captured."""
        with connection.cursor() as cursor:
            cursor.execute(_SWITCH, [self._outer, not self._session])
            cursor.execute(_TAKE, [self._name])
            captured = sorted(cursor.fetchall())
        return _changes(
            [(table, did, json.loads(key), json.loads(columns)) for _, table, did, key, columns in captured]
        )


@contextmanager
def session_capture() -> Iterator[Changes]:
    """Capture over the transactions of a command. Without a database nothing is captured."""
    capture, changes = RowCapture(session=True), Changes()
    try:
        capture.start()
    except Error as error:
        log.warning("changed rows are not captured: %s", error)
        yield changes
        return
    try:
        yield changes
    finally:
        try:
            vars(changes).update(vars(capture.finish()))
        except Error as error:
            log.warning("changed rows are not known: %s", error)


def install_triggers(*, using: str = DEFAULT_DB_ALIAS, **_: Any) -> None:
    """Receiver of `post_migrate`: adds the trigger to every table of a model except `NOT_CAPTURED`."""
    keys = {
        model._meta.db_table: model._meta.pk.column
        for model in apps.get_models(include_auto_created=True)
        if model._meta.managed and not model._meta.proxy
    }
    with connections[using].cursor() as cursor:
        cursor.execute(_TABLES_WITH_TRIGGER)
        installed = {row[0] for row in cursor.fetchall()}
        for table in sorted(set(keys) - installed - NOT_CAPTURED):
            cursor.execute(_CREATE_TRIGGER.format(table=f'"{table}"', key=f"'{keys[table]}'"))


Captured = tuple[str, str, Any, dict[str, Any]]
"""Table, operation, primary key, and columns by name: [before, after] of an update, the value of a delete."""


def _changes(captured: list[Captured]) -> Changes:
    changes = Changes()
    for (table, operation), group in groupby(captured, key=lambda row: row[:2]):
        if table == EVENTS:
            for _, _, _, columns in group:
                _add_event(changes, columns)
            continue
        entries = [_captured_entry(*row) for row in group if not _was_only_used(*row)]
        if len(entries) > MAX_ROWS_LISTED:
            entries = [{"table": table, "did": operation, "rows": len(entries)}]
        changes.rows.extend(entries)
    return changes


def _add_event(changes: Changes, event: dict[str, Any]) -> None:
    changes.events.append({"kind": event.get("kind", ""), "message": event.get("message", "")})
    for noun in ("cell", "node", "deployment", "region"):
        if (name := f"{noun}/{event.get(noun)}") not in changes.objects and event.get(noun):
            changes.objects.append(name)


def _was_only_used(_table: str, operation: str, _key: Any, columns: dict[str, Any]) -> bool:
    return operation == "update" and set(columns) <= USE_TIMES


def _captured_entry(table: str, operation: str, key: Any, columns: dict[str, Any]) -> dict[str, Any]:
    entry = {"table": table, "did": operation, "key": key}
    match operation:
        case "update":
            return {**entry, "changed": _without_secrets(columns)}
        case "delete":
            return {**entry, "was": _without_secrets(columns)}
    return entry


def _without_secrets(columns: dict[str, Any]) -> dict[str, Any]:
    hidden = (name for name in columns if name in HIDDEN_COLUMNS or is_secret_name(name))
    return columns | dict.fromkeys(hidden, HIDDEN)
