"""Array literals that PostgreSQL reads back unchanged."""

from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from django.db import connection

from kernel.array_text import array_text

TEXTS = [
    "",
    "plain",
    'a "quoted" one',
    "back\\slash",
    "a,b",
    "{a}",
    "NULL",
    "null",
    " blanks ",
    "it's %s",
    "tab\tline\n",
    "ä😀",
    None,
]
JUST_NOW = datetime(2026, 11, 30, 15, 55, 1, 123456, tzinfo=UTC)


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("text", TEXTS),
        ("text", []),
        ("int", [0, -1, 2**31 - 1, None]),
        ("bigint", [2**63 - 1, None]),
        ("bytea", [b"", bytes(range(256)), b'{"a": "\\x41"}', None]),
        ("timestamptz", [JUST_NOW, JUST_NOW.astimezone(timezone(timedelta(hours=-5, minutes=-30))), None]),
    ],
)
def test_the_server_reads_each_element_unchanged(kind: str, values: list[Any]) -> None:
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT value FROM unnest(%s::{kind}[]) AS value", [array_text(kind, values)])  # noqa: S608
        read = [value for (value,) in cursor.fetchall()]
    assert [bytes(value) if isinstance(value, memoryview) else value for value in read] == values


@pytest.mark.django_db
def test_documents_stay_documents() -> None:
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT value->>'a' FROM unnest(%s::jsonb[]) AS value", [array_text("jsonb", ['{"a": "x\\"y"}'])]
        )
        assert cursor.fetchall() == [('x"y',)]


def test_an_unknown_type_is_refused() -> None:
    with pytest.raises(KeyError):
        array_text("box", [])
