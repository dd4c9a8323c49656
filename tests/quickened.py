"""Speeds tests up: fast password hashes, static files and methods of AWS made once, no unused certificate authorities,
small archives, and no truncation of empty tables."""

from functools import cache
from gzip import GzipFile
from typing import Any

import httpx._transports.default as httpx_transports
from botocore.client import ClientCreator
from botocore.loaders import JSONFileLoader
from django.contrib.auth.hashers import PBKDF2PasswordHasher
from django.db import connection, transaction
from django.test import TransactionTestCase
from psycopg import sql
from whitenoise.middleware import WhiteNoiseMiddleware

KEPT = frozenset({"django_migrations", "django_content_type", "auth_permission"})
"""What migrations leave, and no test writes."""
TRUNCATED = frozenset({"audit_auditrecord"})


def quicken() -> None:
    """Quicken this process, not those that it starts."""
    # The same algorithm as in production, so that a web process which a test starts knows these passwords.
    PBKDF2PasswordHasher.iterations = 1
    _find_static_files_once()
    _make_aws_methods_once()
    # Each client reads all of them, which takes longer than most of what one is asked for.
    httpx_transports.create_ssl_context = cache(httpx_transports.create_ssl_context)  # type: ignore[attr-defined]
    TransactionTestCase._fixture_teardown = empty_written_tables  # type: ignore[attr-defined]  # not public
    # What botocore knows of AWS: each of its sessions reads it anew, a tenth of a second for the endpoints alone.
    read = cache(JSONFileLoader().load_file)
    JSONFileLoader.load_file = lambda _, file_path: read(file_path)
    # Agents' archives, of which each worker packs some: seven seconds at the highest level, which is the default.
    GzipFile.__init__.__defaults__ = (None, None, 1, None, None)


def _find_static_files_once() -> None:
    """A client loads the middleware, and that reads the state of all files: longer than most pages take to answer."""
    find = WhiteNoiseMiddleware.add_files_from_finders
    found: dict[str, Any] = {}

    def find_or_remember(middleware: WhiteNoiseMiddleware) -> None:
        if not found:
            find(middleware)
            found.update(middleware.files)
        middleware.files.update(found)

    WhiteNoiseMiddleware.add_files_from_finders = find_or_remember


def _make_aws_methods_once() -> None:
    """Each client of AWS makes a method for all that its service can do, seven hundred for EC2. They are the same: what
    they call is a method of the client."""
    make = ClientCreator._create_methods
    made: dict[str, dict[str, Any]] = {}

    def make_or_remember(creator: ClientCreator, service_model: Any) -> dict[str, Any]:
        name = service_model.service_name
        if name not in made:
            made[name] = make(creator, service_model)
        return {**made[name]}

    ClientCreator._create_methods = make_or_remember


def empty_written_tables(_: TransactionTestCase) -> None:
    """After a test that commits. Django would truncate all tables and then migrate's signal would fill them again."""
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(_written_tables_query())
        for (table,) in cursor.fetchall():
            statement = "TRUNCATE {}" if table in TRUNCATED else "DELETE FROM {}"
            cursor.execute(sql.SQL(statement).format(sql.Identifier(table)))


@cache
def _written_tables_query() -> sql.Composed:
    tables = set(connection.introspection.django_table_names(only_existing=True, include_views=False)) - KEPT
    one = sql.SQL("SELECT {} WHERE EXISTS (SELECT FROM {})")
    return sql.SQL(" UNION ALL ").join(one.format(table, sql.Identifier(table)) for table in sorted(tables))
