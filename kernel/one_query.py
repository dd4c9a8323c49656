"""Asks about several tables in one query. Most of the time of a small query is that of building and sending it."""

from typing import Any

from django.db import connection
from django.db.models import QuerySet


def which_exist(*rows: QuerySet[Any]) -> tuple[bool, ...]:
    """Whether each of them has a row. Raises EmptyResultSet for one that can have none, as of an empty `in`."""
    return _ask("EXISTS ({})", [each.query.exists() for each in rows])


def counts(*rows: QuerySet[Any]) -> tuple[int, ...]:
    """The number of rows of each."""
    return _ask("(SELECT count(*) FROM ({}) AS found)", [each.query.exists(limit=False) for each in rows])


def _ask(form: str, queries: list[Any]) -> tuple[Any, ...]:
    built = [query.get_compiler(connection=connection).as_sql() for query in queries]
    text = "SELECT " + ", ".join(form.format(sql) for sql, _ in built)
    with connection.cursor() as cursor:
        cursor.execute(text, [value for _, values in built for value in values])
        found: tuple[Any, ...] = cursor.fetchone()
        return found
