"""What was read from tables that nobody writes for hours, until somebody does: for those who look every second.

One query tells which tables were written to since the last look, by the numbers of transactions, as for `RowCache`, and
of rows, which says when one is gone. Like that it holds for one connection (`FullLooks`) and one thread, and costs a
look at every row, so it is for tables that stay short. What is kept is shared by all who ask for it: it is read only.
"""

from collections.abc import Callable, Collection
from typing import Any, TypeVar

from django.db import connection
from psycopg import sql

T = TypeVar("T")
_MARK = sql.SQL("pg_snapshot_xmin(pg_current_snapshot())::xid::text")
_TABLE = sql.SQL("(SELECT (count(*), count(*) FILTER (WHERE age(xmin) <= age(%(since)s::xid)))::text FROM {table})")
_NEVER = "3"
"""The first transaction of all that is no special one (`FirstNormalTransactionId`): every row is of it or later."""


class WrittenTables:
    """`get` gives what was loaded before, unless one of its tables was written to. `look` first."""

    def __init__(self, tables: Collection[str]) -> None:
        self._tables = tuple(tables)
        parts = [_MARK, *(_TABLE.format(table=sql.Identifier(table)) for table in self._tables)]
        self._query = sql.SQL("SELECT {}").format(sql.SQL(", ").join(parts))
        self._since = _NEVER
        self._rows: dict[str, str] = {}
        self._kept: dict[str, Any] = {}
        self._tables_of: dict[str, frozenset[str]] = {}

    def look(self) -> None:
        """See what was written since the last look; where nothing is kept there is nothing to see, and a single look
        costs nothing."""
        if not self._kept:
            return
        with connection.cursor() as cursor:
            cursor.execute(self._query, {"since": self._since})
            self._since, *counted = cursor.fetchone()
        for table, (rows, written) in zip(self._tables, map(_pair, counted), strict=True):
            if written != "0" or rows != self._rows.get(table):
                self._forget(table)
            self._rows[table] = rows

    def get(self, name: str, tables: Collection[str], load: Callable[[], T]) -> T:
        """What `load` returns, which reads these tables and nothing else that may change, time included."""
        if name not in self._kept:
            self._kept[name] = load()
            self._tables_of[name] = frozenset(tables)
        kept: T = self._kept[name]
        return kept

    def get_lasting(self, name: str, tables: Collection[str], load: Callable[[], T]) -> T:
        """As `get`, for what time alone takes rows from and never adds one to: nothing stays nothing."""
        found = self.get(name, tables, load)
        if found:
            del self._kept[name]
        return found

    def _forget(self, table: str) -> None:
        for name in [name for name in self._kept if table in self._tables_of[name]]:
            del self._kept[name]


def _pair(counted: str) -> tuple[str, str]:
    rows, _, written = counted.strip("()").partition(",")
    return rows, written
