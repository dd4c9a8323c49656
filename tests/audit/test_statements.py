"""Statements as Django writes them, read for what they change."""

import pytest

from audit.statements import Write, savepoint, write_of


@pytest.mark.parametrize(
    "sql",
    [
        'SELECT "a"."id" FROM "a" WHERE "a"."x" = %s FOR UPDATE',
        "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY",
        "WITH t AS (SELECT 1) SELECT * FROM t",
        'RELEASE SAVEPOINT "s1"',
    ],
)
def test_what_only_reads_writes_nothing(sql: str) -> None:
    assert write_of(sql) is None


def test_an_update_tells_its_columns_and_whom_it_means() -> None:
    sql = 'UPDATE "fleet_node" SET "cordoned" = %s, "reason" = CONCAT(%s, "x") WHERE ("fleet_node"."id" = %s)'
    assert write_of(sql) == Write("update", "fleet_node", ("cordoned", "reason"), '("fleet_node"."id" = %s)', 2)


def test_conditions_inside_values_are_not_the_updates_own() -> None:
    sql = 'UPDATE "a" SET "x" = (SELECT 1 WHERE %s), "y" = CASE WHEN "id" = %s THEN %s END WHERE "a"."id" IN (%s, %s)'
    assert write_of(sql) == Write("update", "a", ("x", "y"), '"a"."id" IN (%s, %s)', 3)


def test_what_an_update_returns_is_no_condition() -> None:
    sql = 'UPDATE "a" SET "x" = %s WHERE "a"."id" = %s RETURNING "a"."x"'
    assert write_of(sql) == Write("update", "a", ("x",), '"a"."id" = %s', 1)


def test_deletes_and_inserts() -> None:
    assert write_of('DELETE FROM "a" WHERE "a"."id" IN (%s)') == Write("delete", "a", where='"a"."id" IN (%s)')
    assert write_of('DELETE FROM "a"') == Write("delete", "a")
    assert write_of('INSERT INTO "a" ("x") VALUES (%s) RETURNING "a"."id"') == Write("insert", "a")


@pytest.mark.parametrize("sql", ["WITH x AS (DELETE FROM a RETURNING 1) SELECT 1", "TRUNCATE a", "COPY a FROM STDIN"])
def test_what_cannot_be_read_counts_as_a_write(sql: str) -> None:
    assert write_of(sql) == Write("write", "")


def test_savepoints_are_told_apart() -> None:
    assert savepoint('SAVEPOINT "s1"') == ("SAVEPOINT", "s1")
    assert savepoint('ROLLBACK TO SAVEPOINT "s1"') == ("ROLLBACK TO SAVEPOINT", "s1")
    assert savepoint('RELEASE SAVEPOINT "s1"') is None
