"""Watches what a request writes, at the one place where every service's statements pass: which rows, and of updated and
deleted ones which values before and after. It changes no statement and, beyond reading those rows, runs none."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from django.apps import apps
from django.db import connection, models

from audit.redaction import HIDDEN, is_secret_name
from audit.statements import Write, savepoint, write_of
from kernel.trail import Trail

BOOKKEEPING = frozenset(
    {
        "django_session",
        "django_admin_log",
        "kernel_event",
        "kernel_lease",
        "kernel_idempotentanswer",
        "kernel_change",
        "kernel_changehorizon",
        "accounts_loginfailure",
        "audit_auditrecord",
        "audit_auditchain",
        "audit_auditexport",
    }
)
"""Tables that say nothing of a change by themselves: it stands beside them, or there was none. Events are noted where
they are written."""
UNTOLD_COLUMNS = frozenset(
    {"password", "digest", "key_digest", "session_key", "last_login", "last_used_at", "updated_at"}
)
"""Hashes of secrets, and times that every use moves."""
ROWS_COMPARED = 20
"""Of one statement; of more only their number is told."""

Execute = Callable[[str, Any, bool, dict[str, Any]], Any]
Model = type[models.Model]
Rows = dict[Any, dict[str, Any]]


class Watcher:
    """An execute wrapper of Django's connection that notes writes in a trail."""

    def __init__(self, trail: Trail) -> None:
        self._trail = trail
        self._marks: dict[str, tuple[int, int, int]] = {}
        self._is_looking = False

    def __call__(self, execute: Execute, sql: str, params: Any, many: bool, context: dict[str, Any]) -> Any:
        if self._is_looking:
            return execute(sql, params, many, context)
        if point := savepoint(sql):
            return self._savepoint(*point, execute, (sql, params, many, context))
        write = write_of(sql)
        if write is None or write.table in BOOKKEEPING or _moves_times_only(write):
            return execute(sql, params, many, context)
        model = _models().get(write.table)
        before = None if many or model is None else self._before(model, write, params)
        result = execute(sql, params, many, context)
        self._trail.rows.extend(self._noted(model, write, before))
        return result

    def _savepoint(self, word: str, name: str, execute: Execute, call: tuple[Any, ...]) -> Any:
        if word == "SAVEPOINT":
            self._marks[name] = self._trail.mark()
        elif name in self._marks:
            self._trail.take_back(self._marks[name])
        return execute(*call)

    @contextmanager
    def _looking(self) -> Iterator[None]:
        self._is_looking = True
        try:
            yield
        finally:
            self._is_looking = False

    def _before(self, model: Model, write: Write, params: Any) -> Rows | None:
        """Primary key -> the columns that will change, of the rows that a statement means; None: too many, or none
        that can be told beforehand."""
        if write.where is None:
            return None
        key = model._meta.pk
        sql = (
            f'SELECT "{write.table}"."{key.column}" FROM "{write.table}" WHERE {write.where} LIMIT {ROWS_COMPARED + 1}'  # noqa: S608 - both parts are Django's own
        )
        with self._looking(), connection.cursor() as cursor:
            cursor.execute(sql, tuple(params or ())[write.skip :])
            keys = [row[0] for row in cursor.fetchall()]
            return self._values(model, write, keys) if len(keys) <= ROWS_COMPARED else None

    def _values(self, model: Model, write: Write, keys: list[Any]) -> Rows:
        names = [each.attname for each in model._meta.concrete_fields if _is_told(write, each)]
        rows = model._base_manager.filter(pk__in=keys).order_by("pk").values("pk", *names)
        return {row["pk"]: {name: row[name] for name in names} for row in rows}

    def _noted(self, model: Model | None, write: Write, before: Rows | None) -> list[dict[str, Any]]:
        """One entry for each row that is not as it was; one for the statement where rows cannot be compared."""
        entry = {"table": write.table or "(several)", "did": write.kind}
        if model is None or before is None:
            return [entry]
        if write.kind == "delete":
            return [{**entry, "key": key, "was": _shown(values)} for key, values in before.items()]
        with self._looking():
            after = self._values(model, write, list(before))
        noted = []
        for key, old in before.items():
            new = after.get(key, {})
            changed = {name: [old[name], new.get(name)] for name in old if old[name] != new.get(name)}
            if changed:
                noted.append({**entry, "key": key, "changed": _shown(changed)})
        return noted


@contextmanager
def watching(trail: Trail) -> Iterator[None]:
    """Note in the trail what is written inside."""
    with connection.execute_wrapper(Watcher(trail)):
        yield


@cache
def _models() -> dict[str, Model]:
    return {model._meta.db_table: model for model in apps.get_models(include_auto_created=True)}


def _moves_times_only(write: Write) -> bool:
    return write.kind == "update" and bool(write.columns) and set(write.columns) <= {"last_used_at", "last_seen_at"}


def _is_told(write: Write, column: "models.Field[Any, Any]") -> bool:
    return not write.columns or column.column in write.columns


def _shown(values: dict[str, Any]) -> dict[str, Any]:
    hidden = (name for name in values if name in UNTOLD_COLUMNS or is_secret_name(name))
    return values | dict.fromkeys(hidden, HIDDEN)
