"""A draft is created from a version and edited in the browser; errors are shown at their fields and change nothing."""

import json
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client

from models_registry.versions.models import ModelVersion, VersionState
from models_registry.versions.pages.drafts import draft_fields
from tests.controlplane.dashboard.clients import signed_in
from tests.fleet import rows

pytestmark = [pytest.mark.django_db, pytest.mark.slow]
EDIT = "/models/sim-70b@9/edit/"


@pytest.fixture
def draft() -> ModelVersion:
    rows.version("1", state=VersionState.RELEASED)
    response = signed_in().post("/models/sim-70b@1/draft/", {"version": "9"})
    assert (response.status_code, response.headers["Location"]) == (302, EDIT)
    return ModelVersion.objects.get(version="9")


def form(draft: ModelVersion, **other: str) -> dict[str, Any]:
    """The form as a browser submits it when only `other` was changed."""
    return {field.name: field.text for field in draft_fields(draft)} | {"revision": str(draft.revision)} | other


def test_the_form_shows_the_draft(draft: ModelVersion) -> None:
    shown = signed_in().get(EDIT).text
    for expected in ("Context length", "Parallelism", "&quot;nodes&quot;", "Save draft"):
        assert expected in shown


def test_an_untouched_form_changes_nothing(draft: ModelVersion) -> None:
    assert signed_in().post(EDIT, form(draft)).status_code == 302
    assert ModelVersion.objects.get(pk=draft.pk).revision == draft.revision


def test_a_changed_field_is_saved(draft: ModelVersion) -> None:
    prompts = json.dumps([{"prompt": "1 + 1 =", "expect": "2"}])
    response = signed_in().post(EDIT, form(draft, context_length="4096", golden_prompts=prompts, layers=""))
    assert (response.status_code, response.headers["Location"]) == (302, "/models/sim-70b@9/")
    saved = ModelVersion.objects.get(pk=draft.pk)
    assert (saved.context_length, saved.golden_prompts[0]["expect"], saved.layers) == (4096, "2", None)


@pytest.mark.parametrize(
    ("field", "text", "expected"),
    [
        ("parallelism", "{", "not valid JSON"),
        ("parallelism", '{"local.cpu": {"nodes": 0}}', "local.cpu"),
        ("context_length", "many", "valid integer"),
        ("artifact_digest", "md5:1", "sha256"),
        ("revision", "7", "is at revision 1, not 7"),
    ],
)
def test_an_invalid_field_says_why_and_the_form_keeps_its_values(
    draft: ModelVersion, field: str, text: str, expected: str
) -> None:
    response = signed_in().post(EDIT, form(draft, max_concurrency="77", **{field: text}))
    assert response.status_code == 409
    assert expected in response.text
    assert 'value="77"' in response.text
    assert ModelVersion.objects.get(pk=draft.pk).max_concurrency == draft.max_concurrency


def test_only_a_draft_is_edited(draft: ModelVersion) -> None:
    assert signed_in().get("/models/sim-70b@1/edit/").headers["Location"] == "/models/sim-70b@1/"
    released = ModelVersion.objects.get(version="1")
    response = signed_in().post("/models/sim-70b@1/edit/", form(released, context_length="1"))
    assert "only a draft can be changed" in response.text


def test_a_taken_or_impossible_name_is_refused(draft: ModelVersion) -> None:
    for name, expected in (("9", "already"), ("a b", "required pattern"), ("", "blank")):
        response = signed_in().post("/models/sim-70b@1/draft/", {"version": name})
        assert response.status_code == 409
        assert expected in response.text


def test_a_viewer_edits_nothing(draft: ModelVersion) -> None:
    viewer = Client()
    viewer.force_login(User.objects.create(username="viewer"))
    assert viewer.get(EDIT).status_code == 403
    assert "Edit draft" not in viewer.get("/models/sim-70b@9/").text
