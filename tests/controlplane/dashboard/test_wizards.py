"""Wizards: who may use them, what checks say, that nothing typed is lost, and that a repeated submit creates once. The
wizard of models stands for all; those of nouns are tested with them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from django.contrib.auth.models import User
from django.test import Client

from audit.models import AuditRecord
from controlplane.cli.documents import read_documents
from kernel.access import Role
from models_registry.imports.models import ModelImport
from models_registry.versions.models import Model, ModelVersion
from tests.controlplane.access.callers import make_user
from tests.controlplane.dashboard.clients import signed_in
from tests.fleet import rows
from tests.models_registry.imports.hub import LocalHub
from tests.models_registry.imports.jobs import configured_hub

pytestmark = [pytest.mark.django_db, pytest.mark.slow]
URL = "/new/model/"
TYPED = {"source": "org/Model-1B", "version": "1"}
CHECK = {"HX-Request": "true", "HX-Target": "wizard-check"}


@pytest.fixture
def hub(tmp_path: Path, settings: Any) -> Iterator[LocalHub]:
    with configured_hub(settings, tmp_path) as served:
        yield served


def checked(client: Client, **typed: str) -> str:
    response = client.post(URL, typed, headers=CHECK)
    assert response.status_code == 200
    return response.text


def applied(client: Client, **typed: str) -> Any:
    return client.post(URL, {**typed, "go": "apply"})


def test_the_form_shows_labels_help_and_bounds_of_the_api(hub: LocalHub) -> None:
    shown = signed_in().get(URL).text
    assert "Glob for the weights" in shown
    assert 'maxlength="330"' in shown
    assert "Still needed: Name or address" in shown


def test_a_check_shows_the_document_and_the_command_and_writes_nothing(hub: LocalHub) -> None:
    shown = checked(signed_in(), **TYPED)
    assert "kind: ModelImport" in shown
    assert "switchyard model import hf://org/Model-1B --draft model-1b@1" in shown
    assert "possible" in shown
    assert "kind: ModelImport" in checked(signed_in(), **TYPED, go="apply")
    assert not ModelImport.objects.exists()
    assert not Model.objects.exists()
    assert not AuditRecord.objects.exists()


def test_a_name_of_a_model_becomes_an_import_once(hub: LocalHub) -> None:
    client = signed_in()
    review = client.post(URL, {**TYPED, "go": "review"}).text
    assert "ModelImport model-1b@1 does not exist" in review
    assert ">Apply</button>" in review
    response = applied(client, **TYPED)
    row = ModelImport.objects.get()
    assert (row.source, row.draft, row.actor) == ("hf://org/Model-1B@main", "model-1b@1", "operator")
    assert response.headers["Location"] == f"/imports/{row.pk}/"
    assert applied(client, **TYPED).headers["Location"] == f"/imports/{row.pk}/"
    stale = applied(client, **TYPED, revision="of the first plan")
    assert stale.headers["Location"] == f"/imports/{row.pk}/"
    assert ModelImport.objects.count() == 1


def test_the_document_and_the_file_say_the_same(hub: LocalHub, tmp_path: Path) -> None:
    response = signed_in().post(URL, {**TYPED, "description": "on: yes, no, 1e3 <b>", "go": "download"})
    assert response.headers["Content-Disposition"] == 'attachment; filename="model-1b-1.yaml"'
    (tmp_path / "model.yaml").write_bytes(response.content)
    documents = read_documents([str(tmp_path / "model.yaml")]).documents
    assert list(documents) == list(yaml.safe_load_all(response.content))
    assert documents[0]["spec"] == {"description": "on: yes, no, 1e3 <b>"}
    assert documents[1]["metadata"] == {"name": "model-1b@1"}


def test_a_file_of_a_folder_becomes_a_draft(hub: LocalHub) -> None:
    response = applied(signed_in(), source="file:///models/toy", model="toy", engine="sim")
    assert response.headers["Location"] == "/models/toy@1/edit/"
    made = ModelVersion.objects.get()
    assert (made.reference, made.engine, made.artifact_uri) == ("toy@1", "sim", "file:///models/toy")


@pytest.mark.parametrize(
    ("field", "text", "error"),
    [
        ("source", "ftp://x", "must be hf://org/name"),
        ("source", "x" * 331, "no more than 330 characters"),
        ("description", "x" * 100_001, "the limit is 100000"),
        ("model", "a b", "letters, digits, - and _"),
        ("version", "<b>1</b>", "that of the version to draft, model@version"),
        ("engine", "<script>alert(1)</script>", "must be one of generic"),
    ],
)
def test_a_mistake_is_named_at_its_field_and_keeps_what_was_typed(
    hub: LocalHub, field: str, text: str, error: str
) -> None:
    response = signed_in().post(URL, {**TYPED, "description": "kept as typed", field: text, "go": "apply"})
    assert response.status_code == 409
    at_field = response.text.partition(f'<p id="error-{field}"')[2].partition("</p>")[0]
    assert error in at_field.casefold()
    assert "<b>" not in response.text
    assert "<script>alert" not in response.text
    assert 'value="org/Model-1B"' in response.text or field == "source"
    assert 'value="kept as typed"' in response.text or field == "description"
    assert not Model.objects.exists()


def test_an_object_that_exists_is_never_changed_by_a_wizard_that_creates(hub: LocalHub) -> None:
    rows.version("1")
    response = signed_in().post(URL, {"source": "org/x", "model": "sim-70b", "go": "apply"})
    assert response.status_code == 409
    assert "sim-70b@1 exists already" in response.text
    assert not ModelImport.objects.exists()
    rows.version("2", state="draft")
    taken = signed_in().post(URL, {"source": "file:///other", "model": "sim-70b", "version": "2", "go": "apply"})
    assert "choose another name" in taken.text
    assert not ModelVersion.objects.exclude(artifact_uri="").exists()


RAW = '[{"apiVersion": "switchyard/v1", "kind": "ModelImport", "metadata": {"name": "toy@1"}, "spec": {"source": %s}}]'


def test_documents_are_edited_as_json_behind_a_switch(hub: LocalHub) -> None:
    client = signed_in()
    assert "&quot;kind&quot;: &quot;ModelImport&quot;" in checked(client, **TYPED, raw="on")
    response = client.post(URL, {**TYPED, "raw": "on", "raw-documents": RAW % '"hf://org/toy"', "go": "apply"})
    assert response.status_code == 302
    assert ModelImport.objects.get().draft == "toy@1"


@pytest.mark.long
@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("[", "not valid JSON"),
        ("{}", "a list of documents"),
        ("[[]]", "a list of documents"),
        ('[{"kind": "Region"}]', "kind is &#x27;Region&#x27;; here it must be Model or ModelImport or ModelVersion"),
        ('[{"kind": "Model", "kind": "Region"}]', "not valid JSON"),
        (RAW % ("[" * 300 + "]" * 300), "not valid JSON"),
        (RAW % '7, "sourc": 1', "unknown field"),
        ('[{"kind": "Model", "metadata": "x"}]', "Model"),
    ],
)
def test_wrong_json_is_named_and_stays(hub: LocalHub, text: str, error: str) -> None:
    response = signed_in().post(URL, {"raw": "on", "raw-documents": text, "go": "apply"})
    assert response.status_code == 409
    assert error.casefold() in response.text.casefold()
    assert not ModelImport.objects.exists()


@pytest.mark.long
def test_fields_survive_the_end_of_the_session(hub: LocalHub) -> None:
    response = Client().post(URL, {**TYPED, "description": "a & b", "go": "apply", "revision": "1"})
    login = response.headers["Location"]
    User.objects.create_superuser("operator", password="let me in")
    client = Client()
    back = client.post(login, {"username": "operator", "password": "let me in"}).headers["Location"]
    assert 'value="a &amp; b"' in client.get(back).text
    long = Client().post(URL, {**TYPED, "description": "x" * 5000, "go": "apply"}).headers["Location"]
    assert long == "/login/?next=/new/model/%3Fkept%3D1"


def test_a_check_without_a_session_says_so_in_place() -> None:
    assert "this page keeps what you typed" in checked(Client(), **TYPED)


def test_the_navigation_refreshes_and_never_leads_away(hub: LocalHub) -> None:
    headers = {"HX-Request": "true", "HX-Target": "navigation"}
    shown = signed_in().get(URL, headers=headers).text
    assert 'id="navigation"' in shown
    assert "wizard-check" not in shown
    assert Client().get(URL, headers=headers).status_code == 204


def test_viewers_see_why_not(hub: LocalHub) -> None:
    viewer = Client()
    viewer.force_login(make_user("vera", Role.VIEWER))
    for page in ("/models/", "/imports/"):
        shown = viewer.get(page).text
        assert "This needs the operator role." in shown
        assert 'href="/new/model/"' not in shown
        assert 'href="/new/model/"' in signed_in().get(page).text
    for response in (
        viewer.get(URL),
        viewer.post(URL, {**TYPED, "go": "apply"}),
        viewer.post(URL, TYPED, headers=CHECK),
    ):
        assert response.status_code == 403
    assert not ModelImport.objects.exists()


def test_a_failed_import_starts_again_and_another_source_needs_another_name(hub: LocalHub) -> None:
    client = signed_in()
    applied(client, **TYPED)
    other = client.post(URL, {"source": "org/other", "model": "model-1b", "go": "apply"})
    assert "choose another name" in other.text or "import it under another version" in other.text
    ModelImport.objects.update(state="failed")
    assert applied(client, **TYPED).status_code == 302
    assert ModelImport.objects.count() == 2


def test_a_plan_of_another_state_is_reviewed_again(hub: LocalHub) -> None:
    review = signed_in().post(URL, {**TYPED, "description": "mine", "go": "review"}).text
    revision = review.partition('name="revision" value="')[2].partition('"')[0]
    rows.version("1")
    Model.objects.create(name="model-1b", description="theirs", created_at=rows.NOW)
    response = applied(signed_in(), **TYPED, description="mine", revision=revision)
    assert response.status_code == 409
    assert "have changed since the plan was made" in response.text
    assert Model.objects.get(name="model-1b").description == "theirs"
