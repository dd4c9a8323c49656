"""Reads the statements that Django writes: which table one changes, which columns it sets, which rows it means. Pure;
of a statement of another form it says nothing but that it writes."""

import re
from dataclasses import dataclass

_READS = re.compile(
    r"\s*(SELECT|SHOW|SET|EXPLAIN|DECLARE|FETCH|CLOSE|LOCK|SAVEPOINT|RELEASE|ROLLBACK|BEGIN|COMMIT)\b", re.I
)
_WRITES_IN_WITH = re.compile(r"\b(INSERT|UPDATE|DELETE|MERGE)\b", re.I)
_SAVEPOINT = re.compile(r'\s*(SAVEPOINT|ROLLBACK TO SAVEPOINT) "([^"]+)"')
_UPDATE = re.compile(r'UPDATE "(\w+)" SET ')
_DELETE = re.compile(r'DELETE FROM "(\w+)"')
_TABLE = re.compile(r'\s*(?:INSERT INTO|UPDATE|DELETE FROM) "?(\w+)"?', re.I)
_SET_COLUMN = re.compile(r'"(\w+)" = ')
_WHERE = " WHERE "


@dataclass(frozen=True, slots=True)
class Write:
    """`kind`: insert, update or delete. `where`: the condition of an update or delete, None where it is not plain.

    `columns` are those that an update sets; `skip` is how many parameters stand before the condition's.
    """

    kind: str
    table: str
    columns: tuple[str, ...] = ()
    where: str | None = None
    skip: int = 0


def savepoint(sql: str) -> tuple[str, str] | None:
    """`SAVEPOINT` or `ROLLBACK TO SAVEPOINT`, and its name."""
    found = _SAVEPOINT.match(sql)
    return (found[1], found[2]) if found else None


def write_of(sql: str) -> Write | None:
    """What a statement writes; None: nothing."""
    if _READS.match(sql):
        return None
    table = _TABLE.match(sql)
    if table is None:
        is_with = sql.lstrip()[:4].upper() == "WITH"
        return None if is_with and not _WRITES_IN_WITH.search(sql) else Write("write", "")
    if update := _UPDATE.match(sql):
        return _update(sql, update[1], update.end())
    if delete := _DELETE.match(sql):
        rest = sql[delete.end() :]
        return Write("delete", delete[1], where=rest.removeprefix(_WHERE) if rest.startswith(_WHERE) else None)
    return Write(sql.split(maxsplit=1)[0].lower(), table[1])


def _update(sql: str, table: str, begin: int) -> Write:
    end = _top_level(sql, _WHERE, begin)
    if end is None:
        return Write("update", table)
    settings, condition = sql[begin:end], sql[end + len(_WHERE) :]
    returning = _top_level(condition, " RETURNING ", 0)
    columns = tuple(found[1] for part in _split(settings) if (found := _SET_COLUMN.match(part.lstrip())) is not None)
    return Write("update", table, columns, condition[:returning], settings.count("%s"))


def _top_level(sql: str, word: str, begin: int) -> int | None:
    """Where `word` first stands outside all brackets."""
    depth = 0
    for index in range(begin, len(sql)):
        letter = sql[index]
        depth += (letter == "(") - (letter == ")")
        if depth == 0 and letter == " " and sql.startswith(word, index):
            return index
    return None


def _split(settings: str) -> list[str]:
    parts, depth, start = [], 0, 0
    for index, letter in enumerate(settings):
        depth += (letter == "(") - (letter == ")")
        if letter == "," and depth == 0:
            parts.append(settings[start:index])
            start = index + 1
    return [*parts, settings[start:]]
