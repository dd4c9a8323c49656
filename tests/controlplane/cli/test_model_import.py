"""`switchyard model import` against a hub of this machine."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from controlplane.cli.commands import rollouts
from models_registry.imports.models import ModelImport
from models_registry.versions.models import ModelVersion
from tests.controlplane.cli.conftest import Switchyard
from tests.models_registry.imports.hub import COMMIT, LocalHub
from tests.models_registry.imports.jobs import configured_hub, run

pytestmark = [pytest.mark.django_db, pytest.mark.slow]


@pytest.fixture
def server(tmp_path: Path, settings: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    """The job runs whenever the command waits."""
    monkeypatch.setattr(rollouts, "time", SimpleNamespace(sleep=lambda _: run(ModelImport.objects.get())))
    with configured_hub(settings, tmp_path) as served:
        yield served


def test_a_model_is_imported_and_drafted_by_one_command(server: LocalHub, switchyard: Switchyard) -> None:
    ended = switchyard("model", "import", "hf://org/model@v1.0", "--draft", "smol@1")
    row, draft = ModelImport.objects.get(), ModelVersion.objects.get()
    assert ended.code == 0
    assert f"import {row.pk} is done: verified and stored; drafted as smol@1" in ended.out
    assert f"{row.artifact_uri}  {row.artifact_digest}\ncommit {COMMIT}, licence apache-2.0\n" in ended.out
    assert "queued: waits for a process" in ended.err
    assert (draft.reference, draft.artifact_digest) == ("smol@1", row.artifact_digest)


def test_a_failure_is_named_and_retried(server: LocalHub, switchyard: Switchyard) -> None:
    server.gated = True
    ended = switchyard("model", "import", "hf://org/model")
    assert (ended.code, "the repository is gated" in ended.out) == (10, True)
    server.gated = False
    number = str(ModelImport.objects.get().pk)
    assert switchyard("model", "retry-import", number).code == 0
    assert switchyard("model", "cancel-import", number).code == 6
    listed = json.loads(switchyard("get", "model-imports", "-o", "json").out)
    assert [(one["state"], one["revision"]) for one in listed] == [("done", COMMIT)]


def test_a_detached_import_is_cancelled(server: LocalHub, switchyard: Switchyard) -> None:
    assert "is queued" in switchyard("model", "import", "hf://org/model", "--pattern", "*.gguf", "--detach").out
    assert switchyard("model", "cancel-import", str(ModelImport.objects.get().pk)).out.endswith("is cancelled\n")
    wrong = switchyard("model", "import", "llama")
    assert (wrong.code, "it must be hf://ORG/NAME@REVISION" in wrong.err) == (3, True)
