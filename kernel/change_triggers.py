"""Migration operations by which PostgreSQL records every change of a table, from the ORM, bulk statements, COPY or
psql.

A trigger writes a row of `kernel_change` in the transaction of the change, so each one is recorded. Tables or columns
that reports rewrite every second are not watched."""

from collections.abc import Sequence

from django.db.migrations.operations import RunSQL

_FUNCTION = """
CREATE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP <> 'DELETE' AND NEW.{thing} IS NOT NULL THEN
        INSERT INTO kernel_change (kind, thing, key, xid, at)
        VALUES ('{kind}', NEW.{thing}::text, {new_key}, pg_current_xact_id(), clock_timestamp());
    END IF;
    IF TG_OP <> 'INSERT' AND OLD.{thing} IS NOT NULL AND (TG_OP = 'DELETE' OR OLD.{thing} IS DISTINCT FROM NEW.{thing})
    THEN
        INSERT INTO kernel_change (kind, thing, key, xid, at)
        VALUES ('{kind}', OLD.{thing}::text, {old_key}, pg_current_xact_id(), clock_timestamp());
    END IF;
    RETURN NULL;
END $$;
"""
_ENDS = "CREATE TRIGGER {name}_ends AFTER {ends} ON {table} FOR EACH ROW EXECUTE FUNCTION {name}();\n"
_UPDATE = """
CREATE TRIGGER {name}_update AFTER UPDATE ON {table} FOR EACH ROW
WHEN ({before} IS DISTINCT FROM {after}) EXECUTE FUNCTION {name}();
"""
_DROP = "DROP FUNCTION IF EXISTS {name}() CASCADE;"


class RecordChanges(RunSQL):
    """Records changes of `table` as changes of the API's `kind`, the noun of its view set.

    `thing`: the column with the primary key of the changed object: the row's own, or that of the object it belongs to.
    `key`: SQL of its key in the API, with `{row}` for the row; "" if the row lacks it.
    `columns`: watched columns; default: all. `only_new`: only inserts are recorded."""

    def __init__(
        self,
        *,
        table: str,
        kind: str,
        thing: str,
        key: str = "",
        columns: Sequence[str] = (),
        only_new: bool = False,
    ) -> None:
        name = f"note_{table}_{kind.replace('-', '_').replace('/', '_')}"
        key_sql = key or "''"
        sql = _FUNCTION.format(
            name=name, kind=kind, thing=thing, new_key=key_sql.format(row="NEW"), old_key=key_sql.format(row="OLD")
        )
        sql += _ENDS.format(name=name, table=table, ends="INSERT" if only_new else "INSERT OR DELETE")
        if not only_new:
            sql += _UPDATE.format(
                name=name, table=table, before=_row_expression("OLD", columns), after=_row_expression("NEW", columns)
            )
        super().__init__(sql, _DROP.format(name=name))


def _row_expression(row: str, columns: Sequence[str]) -> str:
    return (
        f"({', '.join(f'{row}.{column}' for column in columns)})" if len(columns) > 1 else f"{row}.{[*columns, '*'][0]}"
    )
