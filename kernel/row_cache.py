"""Caches the rows of tables in memory, and refreshes only rows that changed since the last refresh.

Every version of a row has the transaction that wrote it (`xmin`). All transactions before the oldest one that ran at
the last refresh had ended by then, so only rows of that one and later ones can be new, however late they were
committed. Deleted rows are detected by the number of rows. No writes are needed.

A cache is valid for one connection: a server that lost its last transactions reuses their numbers, but closes all
connections first. Except for `SharedRead`, it is not thread-safe."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from time import monotonic
from typing import Any, Generic, TypeVar

from django.db import connection
from psycopg import sql

T = TypeVar("T")
_MARK = sql.SQL("pg_snapshot_xmin(pg_current_snapshot())::xid::text")
_TABLE = sql.SQL("(SELECT (count(*), count(*) FILTER (WHERE age(xmin) <= age(%(since)s::xid)))::text FROM {table})")
_NEVER = "3"
"""`FirstNormalTransactionId`: every row is from this transaction or a later one."""


class WrittenTables:
    """`get` returns cached values unless one of their tables was written to. Call `look` first."""

    def __init__(self, tables: Collection[str]) -> None:
        self._tables = tuple(tables)
        parts = [_MARK, *(_TABLE.format(table=sql.Identifier(table)) for table in self._tables)]
        self._query = sql.SQL("SELECT {}").format(sql.SQL(", ").join(parts))
        self._since = _NEVER
        self._rows: dict[str, str] = {}
        self._kept: dict[str, Any] = {}
        self._tables_of: dict[str, frozenset[str]] = {}

    def look(self) -> None:
        """Check which tables were written to since the last look. Without cached values it makes no query."""
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
        """Returns the result of `load`, which may read only these tables, and not the time."""
        if name not in self._kept:
            self._kept[name] = load()
            self._tables_of[name] = frozenset(tables)
        kept: T = self._kept[name]
        return kept

    def has(self, name: str) -> bool:
        """Whether `get` would return a cached value."""
        return name in self._kept

    def get_lasting(self, name: str, tables: Collection[str], load: Callable[[], T]) -> T:
        """As `get`, for loads whose result time can only shrink: an empty result stays empty."""
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


@dataclass(frozen=True, slots=True)
class _Shared(Generic[T]):
    """`mark`: rows of this and later transactions are new; `rows`: their number in each table."""

    server: str
    mark: str
    rows: tuple[str, ...]
    key: object
    value: T


class SharedRead(Generic[T]):
    """A value that a process reads once for all its users, until one of its `tables` is written to. Each use checks the
    tables, in one query, so the value is never stale. Threads may share it."""

    def __init__(self, *tables: str) -> None:
        server = sql.SQL("(pg_postmaster_start_time(), current_database())::text")
        parts = [server, _MARK, *(_TABLE.format(table=sql.Identifier(table)) for table in tables)]
        self._query = sql.SQL("SELECT {}").format(sql.SQL(", ").join(parts))
        self._shared: _Shared[T] | None = None

    def get(self, key: object, load: Callable[[], T]) -> T:
        """Returns the result of `load`, which may read these tables, and others of which `key` has the version."""
        known = self._shared
        with connection.cursor() as cursor:
            cursor.execute(self._query, {"since": known.mark if known else _NEVER})
            server, mark, *counted = cursor.fetchone()
        rows, written = zip(*map(_pair, counted), strict=True)
        is_same = known is not None and (server, rows, key) == (known.server, known.rows, known.key)
        if known is not None and is_same and set(written) == {"0"}:
            return known.value
        value = load()
        self._shared = _Shared(server, mark, rows, key, value)
        return value


Row = tuple[Any, ...]

_CHANGED = sql.SQL("""
SELECT counted.*, known.* FROM (
    SELECT count(*) FILTER (WHERE {kept}), pg_snapshot_xmin(pg_current_snapshot())::xid::text FROM {table}
) AS counted LEFT JOIN (SELECT {kept}, {columns} FROM {table} WHERE {since}) AS known ON true
""")
_WRITTEN = sql.SQL("(SELECT (count(*) FILTER (WHERE {kept}), count(*) FILTER (WHERE {since}))::text FROM {table})")
_SINCE = sql.SQL("age(xmin) <= age(%s::xid)")
"""`age` counts back from now, so it is correct when transaction numbers wrap around."""


FULL_LOOK_EVERY_S = 30.0
"""Everything is reloaded this often, as a safety net."""


class FullLooks:
    """Decides when a cache must be dropped: on a new connection, periodically, and after a failed look."""

    def __init__(self, now_s: Callable[[], float] = monotonic) -> None:
        self._now_s = now_s
        self._connection: object = None
        self._last_s = 0.0

    def begin(self) -> bool:
        """Starts a look. Returns whether it must be a full one."""
        connection.ensure_connection()
        is_full = self._connection is not connection.connection or self._now_s() - self._last_s > FULL_LOOK_EVERY_S
        if is_full:
            self._last_s = self._now_s()
        self._connection = None
        return is_full

    def end(self) -> None:
        self._connection = connection.connection


class RowCache:
    """`columns` are expressions, the first of them the table's key; `kept` is the SQL condition of cached rows.

    `rows` maps a key to the other columns."""

    def __init__(self, table: str, columns: Collection[str], *, kept: str = "true") -> None:
        key, *_ = columns
        named = sql.SQL(", ").join(sql.SQL(f"{each} AS c{number}") for number, each in enumerate(columns))
        parts = {"table": sql.Identifier(table), "kept": sql.SQL(f"({kept})"), "columns": named}
        self._changed = _CHANGED.format(**parts, since=_SINCE)
        self._all = _CHANGED.format(**parts, since=parts["kept"])
        self._keys = sql.SQL("SELECT {key} FROM {table} WHERE {kept}").format(**parts, key=sql.SQL(key))
        self.written = _WRITTEN.format(**parts, since=_SINCE)
        """Returns SQL for the number of cached rows and of new ones since a mark, as one value."""
        self._mark = ""
        self.rows: dict[Any, Row] = {}

    def forget(self) -> None:
        """Read every row the next time."""
        self._mark = ""

    @property
    def mark(self) -> str:
        """The transaction up to which the cache is complete; empty if it is not loaded."""
        return self._mark

    def is_current(self, written: str, mark: str) -> bool:
        """Whether nothing has changed since the mark, by the value of `written`. Then the cache is complete up to
        `mark` of the same look."""
        if written != f"({len(self.rows)},0)":
            return False
        self._mark = mark
        return True

    def refresh(self) -> dict[Any, Row | None]:
        """Refresh the cache. Returns the changed keys with their old columns, or None for new rows."""
        with connection.cursor() as cursor:
            if self._mark:
                cursor.execute(self._changed, [self._mark])
            else:
                cursor.execute(self._all)
            found = cursor.fetchall()
            size, self._mark = found[0][:2]
            before: dict[Any, Row | None] = {}
            for _, _, is_kept, key, *columns in found:
                if is_kept is not None:
                    self._note_change(before, key, tuple(columns) if is_kept else None)
            if len(self.rows) != size:
                cursor.execute(self._keys)
                for key in self.rows.keys() - {key for (key,) in cursor.fetchall()}:
                    self._note_change(before, key, None)
        return before

    def _note_change(self, before: dict[Any, Row | None], key: Any, columns: Row | None) -> None:
        known = self.rows.get(key)
        if known == columns:
            return
        before[key] = known
        if columns is None:
            del self.rows[key]
        else:
            self.rows[key] = columns


class RowCaches:
    """Several tables that are refreshed together in this order, so references to later tables resolve. One query
    detects that nothing has changed; otherwise the changed table and all later ones are refreshed."""

    def __init__(self, *caches: RowCache) -> None:
        self._caches = caches
        parts = [_MARK, *(cache.written for cache in caches)]
        self._query = sql.SQL("SELECT {}").format(sql.SQL(", ").join(parts))

    def refresh(self) -> list[dict[Any, Row | None]]:
        """Returns the result of `RowCache.refresh` for each table."""
        current = self._current()
        return [{} if number < current else cache.refresh() for number, cache in enumerate(self._caches)]

    def _current(self) -> int:
        """Returns how many leading tables have not changed, by one query."""
        marks = [cache.mark for cache in self._caches]
        if not all(marks):
            return 0
        with connection.cursor() as cursor:
            cursor.execute(self._query, marks)
            mark, *written = cursor.fetchone()
        for number, (cache, counted) in enumerate(zip(self._caches, written, strict=True)):
            if not cache.is_current(counted, mark):
                return number
        return len(self._caches)
