"""New homes are filled from a dump, with a real PostgreSQL."""

import os
import re
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from django.db.models.signals import post_migrate, pre_migrate
from psycopg import sql

from controlplane.embedded.configuration import CHECKOUT
from controlplane.embedded.layout import Found, Layout, count_tables, made_of
from controlplane.embedded.postgres import APPLICATION, binaries

pytestmark = [pytest.mark.processes]

ROWS_WITH_TIMES = {"public.kernel_looppass", "public.django_migrations"}


@pytest.fixture
def urls() -> Iterator[list[str]]:
    """Two empty databases."""
    names = ["layout_one", "layout_two"]
    with psycopg.connect(os.environ["DATABASE_URL"], autocommit=True) as server:
        for name in names:
            server.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        yield [_url(name) for name in names]
        for name in names:
            server.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


def _url(name: str) -> str:
    base, _, _ = os.environ["DATABASE_URL"].rpartition("/")
    return f"{base}/{name}"


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(tmp_path / "layouts")


def migrate(url: str) -> None:
    commands = [",", "migrate", "--no-input", "--skip-checks", ",", "grant_application", APPLICATION]
    subprocess.run(
        [sys.executable, "-m", "controlplane.management.in_order", *commands],
        check=True,
        cwd=CHECKOUT,
        env={**os.environ, "DATABASE_URL": url},
        capture_output=True,
    )


def everything(url: str) -> str:
    """Tables, rights and rows as SQL. The times of two tables and the records of commands differ between databases, and
    PostgreSQL writes the casts in a constraint in another way once it has been restored."""
    options = ["--inserts", "--exclude-table-data=audit_*"]
    done = subprocess.run([binaries() / "pg_dump", *options, url], check=True, capture_output=True, text=True)
    return re.sub(
        r"^\\.*$|::character varying|::text|\[\]|[()]|'\d{4}-\d\d-\d\d \d\d:\d\d:[\d.]+\+\d\d'",
        "",
        done.stdout,
        flags=re.MULTILINE,
    )


def tables_with_rows(url: str) -> set[str]:
    done = subprocess.run([binaries() / "pg_dump", "--inserts", url], check=True, capture_output=True, text=True)
    return set(re.findall(r"^INSERT INTO (\S+)", done.stdout, flags=re.MULTILINE))


@pytest.mark.long
def test_a_restored_database_equals_a_migrated_one(urls: list[str], layout: Layout) -> None:
    migrated, restored = urls
    assert (layout.look(migrated), layout.look(restored)) == (Found.EMPTY, Found.EMPTY)
    migrate(migrated)
    assert layout.look(migrated) is Found.OTHER
    layout.keep(migrated)
    layout.complete(migrated)
    assert layout.look(migrated) is Found.COMPLETE
    assert layout.look(restored) is Found.COMPLETE
    assert everything(restored) == everything(migrated)
    assert len(everything(restored)) > 100_000
    assert tables_with_rows(restored) == ROWS_WITH_TIMES | {"public.auth_permission", "public.django_content_type"}
    with psycopg.connect(restored) as database:
        passes = "SELECT bool_and(clock_timestamp() - passed_at < interval '1 minute') FROM kernel_looppass"
        assert database.execute(passes).fetchone() == (True,)


def test_a_home_of_other_files_is_migrated(urls: list[str], layout: Layout) -> None:
    with psycopg.connect(urls[0], autocommit=True) as database:
        database.execute("CREATE TABLE django_migrations (id int)")
        database.execute("COMMENT ON DATABASE layout_one IS 'of older files'")
    assert layout.look(urls[0]) is Found.OTHER


@pytest.mark.parametrize(
    "script",
    [
        "CREATE TABLE public.half (id int);\n",
        "CREATE TABLE public.half (id int);\nnonsense;\n-- PostgreSQL database dump complete\n",
        "CREATE TABLE public.half (id int);\n-- PostgreSQL database dump complete\n",
    ],
    ids=["cut", "damaged", "without-loops"],
)
def test_an_unusable_dump_is_removed_and_leaves_the_database_empty(
    urls: list[str], layout: Layout, script: str
) -> None:
    layout.dumps.mkdir()
    layout.dump.write_text(script)
    assert layout.look(urls[0]) is Found.EMPTY
    assert not layout.dump.exists()
    with psycopg.connect(urls[0]) as database:
        assert count_tables(database) == 0


def test_the_digest_covers_every_model_and_receiver_of_migrate() -> None:
    from django.apps import apps

    references = [entry[1] for signal in (pre_migrate, post_migrate) for entry in signal.receivers]
    receivers = [each() if isinstance(each, weakref.ReferenceType) else each for each in references]
    modules = {each.__module__ for each in (*receivers, *apps.get_models())}
    files = {Path(sys.modules[name].__file__ or "") for name in modules}
    ours = {file for file in files if file.is_relative_to(CHECKOUT) and ".venv" not in file.parts}
    assert len(ours) > 20
    assert ours <= set(made_of())
