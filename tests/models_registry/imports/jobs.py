"""Imports for tests: a hub of this machine as the configured one, and single leases of the job."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from threading import Event
from typing import Any

from models_registry.imports.models import ModelImport
from models_registry.imports.services.imports import import_claim, import_start
from models_registry.imports.services.runner import ImportWork
from tests.fleet.rows import NOW
from tests.models_registry.imports.hub import LocalHub, local_hub


@contextmanager
def configured_hub(settings: Any, folder: Path) -> Iterator[LocalHub]:
    """Imports go into `folder`/models."""
    with local_hub() as served:
        settings.HF_ENDPOINT = settings.MODELSCOPE_ENDPOINT = served.url
        settings.HF_TOKEN = settings.MODELSCOPE_TOKEN = ""
        settings.IMPORT_STORE = (folder / "models").as_uri()
        settings.ARTIFACT_SOURCES = [settings.IMPORT_STORE]
        settings.SWITCHYARD_HOME = folder / "home"
        yield served


def start(source: str = "hf://org/model@main", **fields: Any) -> ModelImport:
    return import_start(source=source, actor="ada", now=NOW, **fields)


def run(row: ModelImport, *, halt: Event | None = None) -> ModelImport:
    """The next lease of the import, when it is due."""
    row.refresh_from_db()
    now = row.due_at + timedelta(seconds=1)
    leased = import_claim(now=now)
    assert leased is not None
    assert leased.pk == row.pk
    ImportWork(leased, halt or Event(), lambda: now).run()
    row.refresh_from_db()
    return row
