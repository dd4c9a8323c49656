"""Refuses to migrate a database that an older layout of the tables made.

Until the first release each app has one migration, and a change of a table changes that file. Django compares only the
names of migrations, so it would take such a database for an up-to-date one. The digests of the migrations are therefore
stored in the comment of `django_migrations`, and `migrate` compares those of applied migrations before it starts."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from django.apps import AppConfig, apps
from django.core.management.base import CommandError
from django.db import connections
from django.db.migrations.recorder import MigrationRecorder

ROOT = Path(__file__).resolve().parent.parent
_OLDER = "An older layout of Switchyard made this database"
_START_AGAIN = (
    "Run `switchyard export > fleet.yaml` with the release that made it, start this release on an empty database "
    "(an empty SWITCHYARD_HOME, or another DATABASE_URL), and run `switchyard apply -f fleet.yaml`."
)


def older_layout(applied: Mapping[str, str], present: Mapping[str, str]) -> str:
    """Returns why a database cannot be migrated, "" if it can. `applied` and `present`: `app.name` of each migration ->
    its digest when it was applied ("" if none was stored), and in this release."""
    for name, digest in sorted(applied.items()):
        if name not in present:
            return f"{_OLDER}: this release has no migration {name}. {_START_AGAIN}"
        if digest != present[name]:
            return f"{_OLDER}: {name} has changed since. {_START_AGAIN}"
    return ""


def refuse_older_layout(using: str, **_: Any) -> None:
    """Receiver of `pre_migrate`. Stores the digests before the first migration, so that a `migrate` that is killed can
    be repeated.

    Raises:
        CommandError: `using` is a database of an older layout.
    """
    recorder, stored, present = MigrationRecorder(connections[using]), _stored(using), _present()
    ours = [f"{app}.{name}" for app, name in recorder.applied_migrations() if app in _our_apps()]
    if problem := older_layout({name: stored.get(name, "") for name in ours}, present):
        raise CommandError(problem)
    if stored == present:
        return
    recorder.ensure_schema()
    with connections[using].cursor() as cursor:
        cursor.execute("COMMENT ON TABLE django_migrations IS %s", [json.dumps(present)])


def _stored(using: str) -> dict[str, str]:
    with connections[using].cursor() as cursor:
        cursor.execute("SELECT obj_description(to_regclass('django_migrations'), 'pg_class')")
        (comment,) = cursor.fetchone()
    return json.loads(comment) if comment else {}


def _our_apps() -> dict[str, AppConfig]:
    return {config.label: config for config in apps.get_app_configs() if Path(config.path).is_relative_to(ROOT)}


def _present() -> dict[str, str]:
    return {
        f"{label}.{file.stem}": hashlib.sha256(file.read_bytes()).hexdigest()[:16]
        for label, config in _our_apps().items()
        for file in sorted(Path(config.path, "migrations").glob("[0-9]*.py"))
    }
