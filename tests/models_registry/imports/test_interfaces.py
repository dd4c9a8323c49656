"""Imports over HTTP and on pages: who may, what is refused, what is shown."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.test import Client
from rest_framework.test import APIClient

from kernel.access import Role
from models_registry.imports.models import ModelImport
from models_registry.versions.models import ModelVersion
from tests.controlplane.access.callers import calls, make_user
from tests.controlplane.api.client import rules
from tests.controlplane.dashboard.clients import signed_in
from tests.models_registry.imports.hub import COMMIT, LocalHub
from tests.models_registry.imports.jobs import configured_hub, run, start

pytestmark = [pytest.mark.django_db, pytest.mark.slow]

URL = "/api/v1/model-imports"


@pytest.fixture
def server(tmp_path: Path, settings: Any) -> Iterator[LocalHub]:
    with configured_hub(settings, tmp_path) as served:
        yield served


@pytest.fixture
def oscar() -> APIClient:
    return calls(make_user("oscar", Role.OPERATOR))


def test_an_operator_imports_and_drafts(server: LocalHub, oscar: APIClient) -> None:
    made = oscar.post(URL, {"source": "hf://org/model"}, format="json").json()
    assert (made["source"], made["state"], made["actor"]) == ("hf://org/model@main", "queued", "oscar")
    run(ModelImport.objects.get())
    done = oscar.get(f"{URL}/{made['id']}").json()
    assert (done["state"], done["revision"], done["license"]) == ("done", COMMIT, "apache-2.0")
    assert done["artifact_digest"].startswith("sha256:")
    drafted = oscar.post(f"{URL}/{made['id']}/draft", {"draft": "smol@1"}, format="json")
    assert (drafted.status_code, drafted.json()["reason"].endswith("drafted as smol@1")) == (200, True)
    assert ModelVersion.objects.get().layers == 30
    assert oscar.post(f"{URL}/{made['id']}/draft", {"draft": "smol@1"}, format="json").status_code == 409
    assert oscar.post(f"{URL}/{made['id']}/cancel").status_code == 409


def test_a_viewer_only_looks(server: LocalHub) -> None:
    row = start()
    vera = calls(make_user("vera", Role.VIEWER))
    assert vera.post(URL, {"source": "hf://org/model"}, format="json").status_code == 403
    for action in ("cancel", "retry", "draft"):
        assert vera.post(f"{URL}/{row.pk}/{action}", {}, format="json").status_code == 403
    assert [one["id"] for one in vera.get(URL, {"source": "hf://org"}).json()["results"]] == [row.pk]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({}, "source"),
        ({"source": "llama"}, "source"),
        ({"source": "hf://org/model", "draft": "x"}, "draft"),
        ({"source": "hf://org/model", "engine": "vlm"}, "engine"),
        ({"source": "hf://org/model", "state": "done"}, "state"),
        ({"source": "hf://org/model", "pattern": "x" * 201}, "pattern"),
    ],
)
def test_bad_fields_are_named(server: LocalHub, oscar: APIClient, fields: dict[str, str], field: str) -> None:
    response = oscar.post(URL, fields, format="json")
    assert set(rules(response)) == {field}
    assert ModelImport.objects.count() == 0


def test_pages_show_progress_and_offer_what_fits(server: LocalHub) -> None:
    client: Client = signed_in()
    row = start(engine="vllm")
    ModelImport.objects.update(
        state="running", bytes_total=4 * 2**30, bytes_done=2**30, bytes_per_s=2**28, files_total=2
    )
    shown = client.get(f"/imports/{row.pk}/").content.decode()
    assert "0 of 2 files, 1.1 GB of 4.3 GB, 268.4 MB/s, 0:00:12 left" in shown
    assert f"/imports/{row.pk}/ask/cancel/" in shown
    ModelImport.objects.update(state="queued", bytes_total=0)
    run(row)
    shown = client.get(f"/imports/{row.pk}/").content.decode()
    assert (row.artifact_uri in shown, "verified" in shown, COMMIT in shown) == (True, True, True)
    drafted = client.post(f"/imports/{row.pk}/ask/draft/", {"draft": "smol@1", "engine": ""})
    assert drafted.headers["Location"] == f"/imports/{row.pk}/"
    assert "/models/smol@1/" in client.get(f"/imports/{row.pk}/").content.decode()
    for key in ("0", "x", "9" * 30):
        assert client.get(f"/imports/{key}/").status_code == 404
