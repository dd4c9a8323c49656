"""The pages of engine builds: what a build needs and which versions name it; admins add and delete builds there, and
abort uploads."""

from pathlib import Path
from typing import Any

import pytest
from django.test import Client

from engine_agent.engines.artifacts import read_manifest
from engine_agent.protocol.engine_builds import BUILD_FILE
from kernel import clock
from kernel.access import Role
from models_registry.builds.models import EngineBuild, EngineBuildUpload
from models_registry.builds.services.uploads import upload_part_store, upload_start
from models_registry.versions.models import ModelVersion
from tests.controlplane.access.callers import make_user
from tests.engine_agent.engines.builds.packed import small_build
from tests.models_registry.rows import draft

pytestmark = pytest.mark.django_db


def browser(role: Role) -> Client:
    client = Client()
    client.force_login(make_user(role.value, role))
    return client


@pytest.fixture
def folder(tmp_path: Path, settings: Any) -> Path:
    settings.ARTIFACT_SOURCES = [tmp_path.as_uri()]
    return small_build(tmp_path / "small", least_driver="580")


def test_an_admin_adds_a_build_sees_what_it_needs_and_deletes_it(folder: Path) -> None:
    ada = browser(Role.ADMIN)
    added = ada.post("/builds/new/", {"name": "llama-1", "uri": folder.as_uri()})
    assert (added.status_code, added.headers["Location"]) == (302, "/builds/llama-1/")
    page = ada.get("/builds/llama-1/").content.decode()
    assert "generic/llama-cpp 1" in page
    assert "580 or newer" in page
    assert ">llama-1</a>" in ada.get("/models/").content.decode()
    assert ada.post("/builds/llama-1/ask/delete/", {"confirm": "other"}).status_code != 302
    assert ada.post("/builds/llama-1/ask/delete/", {"confirm": "llama-1"}).status_code == 302
    assert not EngineBuild.objects.exists()
    assert ada.get("/builds/llama-1/").status_code == 404


def test_a_build_of_machines_images_shows_its_release_and_no_size(folder: Path) -> None:
    ada = browser(Role.ADMIN)
    assert ada.post("/builds/new/", {"name": "neuron-2.29", "uri": "external://neuron-2.29"}).status_code == 302
    page = ada.get("/builds/neuron-2.29/").content.decode()
    assert "neuron 2.29" in page
    assert "<dt>Size</dt>" not in page
    assert "x86_64, Neuron&#x27;s image" in ada.get("/models/").content.decode()
    unknown = ada.post("/builds/new/", {"name": "neuron-1", "uri": "external://neuron-1.0"})
    assert "there are external://neuron-2.28, external://neuron-2.29" in unknown.content.decode()


def test_a_wrong_place_says_why(folder: Path) -> None:
    answer = browser(Role.ADMIN).post("/builds/new/", {"name": "llama-1", "uri": f"{folder.as_uri()}-gone"})
    assert answer.status_code == 409
    assert "is not a folder on the control plane" in answer.content.decode()


def test_a_build_that_a_version_names_says_so_and_offers_no_deletion(folder: Path) -> None:
    ada = browser(Role.ADMIN)
    ada.post("/builds/new/", {"name": "llama-1", "uri": folder.as_uri()})
    ModelVersion.objects.filter(pk=draft("1").pk).update(engine_build="llama-1")
    page = ada.get("/builds/llama-1/").content.decode()
    assert "Named by toy@1, so it cannot be deleted." in page
    assert "/builds/llama-1/" in ada.get("/models/toy@1/").content.decode()
    assert "ask/delete/" not in page
    ModelVersion.objects.update(engine_build="")
    oscar = browser(Role.OPERATOR)
    assert "Read-only. It needs the admin role." in oscar.get("/builds/llama-1/").content.decode()
    assert "Add an engine build" not in oscar.get("/models/").content.decode()
    assert oscar.post("/builds/llama-1/ask/delete/", {"confirm": "llama-1"}).status_code == 403


def test_uploads_in_progress_are_shown_and_admins_abort_them(folder: Path, settings: Any, tmp_path: Path) -> None:
    settings.IMPORT_STORE = tmp_path.as_uri()
    ada, oscar, vera = browser(Role.ADMIN), browser(Role.OPERATOR), browser(Role.VIEWER)
    assert "No uploads in progress." in vera.get("/build-uploads/").content.decode()
    listed = read_manifest(folder).files
    row = upload_start(
        name="llama-1",
        facts=(folder / BUILD_FILE).read_text(),
        digests=[listed[name] for name in sorted(listed) if name != BUILD_FILE],
        actor="ada",
        now=clock.now(),
    )
    upload_part_store(name="llama-1", number=0, chunks=[(folder / "part-0000").read_bytes()], now=clock.now())
    page = vera.get("/build-uploads/").content.decode()
    for shown in (
        "llama-1",
        "generic/llama-cpp 1 for cpu",
        "1 of 4",
        "12.4 kB of 40.4 kB",
        ">ada<",
    ):
        assert shown in page, shown
    assert "switchyard --server http://testserver engine add" in page
    assert ": 1 in progress" in oscar.get("/models/").content.decode()
    abort = "/build-uploads/llama-1/ask/abort/"
    assert abort not in oscar.get("/build-uploads/").content.decode()
    assert oscar.post(abort).status_code == 403
    assert abort in ada.get("/build-uploads/").content.decode()
    assert "The 12.4 kB that arrived are deleted." in ada.get(abort).content.decode()
    assert ada.post(abort).headers["Location"] == "/build-uploads/"
    assert not EngineBuildUpload.objects.filter(pk=row.pk).exists()
    assert ada.post(abort).status_code == 404
