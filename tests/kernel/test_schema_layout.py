from io import StringIO

import pytest
from django.apps import apps
from django.core.management import CommandError, call_command
from django.db import connection
from django.db.migrations.recorder import MigrationRecorder

from kernel.schema_layout import older_layout, refuse_older_layout


@pytest.mark.parametrize(
    ("applied", "said"),
    [
        ({}, ""),
        ({"fleet.0001_initial": "d1"}, ""),
        ({"fleet.0001_initial": "d0"}, "fleet.0001_initial has changed since"),
        ({"fleet.0001_initial": ""}, "fleet.0001_initial has changed since"),
        ({"fleet.0001_initial": "d1", "fleet.0052_home": "d9"}, "no migration fleet.0052_home"),
    ],
)
def test_only_a_database_of_this_layout_is_migrated(applied: dict[str, str], said: str) -> None:
    problem = older_layout(applied, {"fleet.0001_initial": "d1", "fleet.0002_more": "d2"})
    assert said in problem
    assert bool(problem) == bool(said) == ("switchyard export > fleet.yaml" in problem)


@pytest.mark.django_db
def test_a_migrated_database_is_migrated_again_without_a_change() -> None:
    out = StringIO()
    call_command("migrate", stdout=out)
    assert "No migrations to apply" in out.getvalue()


@pytest.mark.django_db
def test_a_home_with_migrations_of_before_is_refused_in_one_sentence() -> None:
    MigrationRecorder(connection).record_applied("fleet", "0052_home")
    with pytest.raises(CommandError, match=r"no migration fleet\.0052_home\. Run `switchyard export > fleet\.yaml`"):
        call_command("migrate", stdout=StringIO())


@pytest.mark.django_db
def test_a_home_whose_migration_was_another_is_refused() -> None:
    with connection.cursor() as cursor:
        cursor.execute("COMMENT ON TABLE django_migrations IS '{}'")
    with pytest.raises(CommandError, match="has changed since"):
        call_command("migrate", stdout=StringIO())


@pytest.mark.django_db
def test_a_migrate_that_was_killed_after_its_first_migration_can_be_repeated() -> None:
    recorder = MigrationRecorder(connection)
    recorder.flush()
    with connection.cursor() as cursor:
        cursor.execute("COMMENT ON TABLE django_migrations IS NULL")
    refuse_older_layout(using="default")
    recorder.record_applied("kernel", "0001_initial")
    refuse_older_layout(using="default")


@pytest.mark.django_db
def test_models_and_migrations_agree() -> None:
    call_command("makemigrations", check=True, dry_run=True, verbosity=0)


def test_each_app_has_one_migration_until_the_first_release() -> None:
    from kernel.schema_layout import ROOT

    counts = {
        config.label: len([*(ROOT / config.label / "migrations").glob("0*.py")])
        for config in apps.get_app_configs()
        if (ROOT / config.label / "migrations").is_dir()
    }
    assert len(counts) >= 6
    assert set(counts.values()) == {1}, counts


def test_checks_of_django_find_nothing() -> None:
    call_command("check", fail_level="WARNING")
