"""The wizard of versions: a draft is made or changed in the browser; proposals fill the split, and errors are shown at
their fields and change nothing."""

import re
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client

from kernel.access import Role
from models_registry.instance_types.services import instance_types_ship
from models_registry.versions.models import Model, ModelVersion, Validation, VersionState
from tests.controlplane.access.callers import make_user
from tests.controlplane.dashboard.clients import signed_in
from tests.fleet import rows
from tests.models_registry.rows import of_checkpoint, validated

pytestmark = [pytest.mark.django_db, pytest.mark.slow]
NEW, EDIT = "/new/version/", "/models/sim-70b@9/edit/"
RICH: dict[str, Any] = {
    "engine": "vllm",
    "artifact_uri": "file:///models/x",
    "engine_options": {"enforce_eager": True, "dtype": "8", "seed": 7},
    "engine_env": {"OMP_NUM_THREADS": "4"},
    "speculation": {"method": "ngram", "tokens": 3, "tokens_per_batch_size": [[1, 4, 3]]},
    "quantization": {"method": "fp8"},
    "golden_prompts": [{"prompt": "two\nlines", "expect": "2"}],
    "layers": 32,
}


@pytest.fixture
def draft() -> ModelVersion:
    return rows.version("9", state=VersionState.DRAFT, **RICH)


def form(url: str, **changed: str) -> dict[str, str]:
    """The form as a browser submits it when only `changed` was typed."""
    page = signed_in().get(url).text.partition('<form id="wizard"')[2].partition("</form>")[0]
    page = re.sub(r"<template>.*?</template>", "", page, flags=re.DOTALL)
    fields: dict[str, str] = {}
    for tag in re.findall(r"<input [^>]*>", page):
        if 'type="checkbox"' not in tag or " checked" in tag:
            fields[_attribute(tag, "name")] = _attribute(tag, "value")
    for name, text in re.findall(r'<textarea[^>]* name="([^"]+)"[^>]*>(.*?)</textarea>', page, flags=re.DOTALL):
        fields[name] = _unescaped(text)
    for name, options in re.findall(r'<select[^>]* name="([^"]+)"[^>]*>(.*?)</select>', page, flags=re.DOTALL):
        fields[name] = next(iter(re.findall(r'value="([^"]*)" selected', options)), "")
    return {name: text for name, text in fields.items() if name not in {"csrfmiddlewaretoken", ""}} | changed


def _attribute(tag: str, name: str) -> str:
    found = re.search(rf' {name}="([^"]*)"', tag)
    return _unescaped(found[1]) if found else ""


def _unescaped(text: str) -> str:
    return text.replace("&quot;", '"').replace("&#x27;", "'").replace("&lt;", "<").replace("&amp;", "&")


@pytest.mark.long
def test_the_form_shows_the_draft(draft: ModelVersion) -> None:
    shown = signed_in().get(EDIT).text
    for expected in ("Context length", "Split of a cell", 'value="local.cpu"', 'value="ngram" selected', "two\nlines"):
        assert expected in shown


def test_an_untouched_form_changes_nothing(draft: ModelVersion) -> None:
    typed = form(EDIT)
    typed.pop("validate")
    assert signed_in().post(EDIT, {**typed, "go": "apply"}).status_code == 302
    same = ModelVersion.objects.get(pk=draft.pk)
    assert (same.revision, same.reason) == (draft.revision, draft.reason)


def test_changed_and_emptied_fields_are_saved_and_validated(draft: ModelVersion) -> None:
    changed = {
        "context_length": "4096", "layers": "", "speculation.method": "", "speculation.tokens": "",
        "speculation.more": "", "engine_options-2-option": "", "engine_options-2-value": "", "parallelism-0-tp": "2",
        "modalities.image": "on",
    }  # fmt: skip
    response = signed_in().post(EDIT, {**form(EDIT, **changed), "go": "apply"})
    assert (response.status_code, response.headers["Location"]) == (302, "/models/sim-70b@9/")
    saved = ModelVersion.objects.get(pk=draft.pk)
    assert (saved.context_length, saved.layers, saved.speculation) == (4096, None, {})
    assert (saved.parallelism["local.cpu"]["tp"], "enforce_eager" in saved.engine_options) == (2, False)
    assert (saved.engine_options["dtype"], saved.modalities) == ("8", ["image"])
    assert form(EDIT)["modalities.image"] == "on"
    assert Validation.objects.get().version == saved


@pytest.mark.long
@pytest.mark.parametrize(
    ("field", "text", "at", "expected"),
    [
        ("parallelism-0-nodes", "0", "parallelism", "local.cpu"),
        ("parallelism-0-nodes", "x", "parallelism", "is not a number"),
        ("context_length", "many", "context_length", "valid integer"),
        ("artifact_digest", "md5:1", "artifact_digest", "sha256"),
        ("engine_build", "none-such", "engine_build", "none-such"),
        ("speculation.more", "[1]", "speculation-more", "must be an object"),
        ("roles", "{", "roles", "not valid JSON"),
        ("engine_options-9-option", "no-such-option", "engine_options", "no-such-option"),
    ],
)
def test_an_invalid_field_says_why_and_the_form_keeps_its_values(
    draft: ModelVersion, field: str, text: str, at: str, expected: str
) -> None:
    response = signed_in().post(EDIT, {**form(EDIT), "max_concurrency": "77", field: text, "go": "apply"})
    assert response.status_code == 409
    assert expected in response.text.partition(f'<p id="error-{at}"')[2].partition("</p>")[0]
    assert 'value="77"' in response.text
    assert ModelVersion.objects.get(pk=draft.pk).max_concurrency == draft.max_concurrency


def test_a_version_is_copied_under_the_next_number() -> None:
    rows.version("9", state=VersionState.RELEASED, **RICH)
    url = f"{NEW}?based_on=sim-70b@9"
    assert signed_in().post(NEW, {**form(url, context_length="64"), "go": "apply"}).headers["Location"] == (
        "/models/sim-70b@10/"
    )
    made = ModelVersion.objects.get(version="10")
    assert (made.context_length, made.state) == (64, VersionState.DRAFT)
    for name, value in RICH.items():
        assert getattr(made, name) == value


def test_a_first_version_makes_its_model() -> None:
    typed = {"model": "toy", "version": "1", "engine": "sim", "golden_waiver": "a simulation", "go": "apply"}
    assert signed_in().post(NEW, typed).status_code == 302
    assert (Model.objects.get().name, ModelVersion.objects.get().golden_waiver) == ("toy", "a simulation")


def test_proposals_fill_the_split(tmp_path: Path) -> None:
    instance_types_ship()
    version = of_checkpoint(tmp_path / "model", parallelism={"local.cpu": {}})
    validated(version, tmp_path / "model")
    ModelVersion.objects.filter(pk=version.pk).update(state=VersionState.DRAFT, parallelism={})
    url = f"/models/{version.reference}/edit/"
    first = form(url)
    assert first["parallelism-0-type"]
    kind = "g6.12xlarge"
    picked = signed_in().post(url, {**first, "pick": kind, "context_length": "123"}).text
    assert f'value="{kind}"' in picked
    assert 'value="123"' in picked
    ModelVersion.objects.filter(pk=version.pk).update(engine="sglang")
    assert form(url)["engine"] == "sglang"


def test_the_check_says_what_validation_would_refuse(draft: ModelVersion) -> None:
    typed = form(EDIT, **{"golden_prompts-0-prompt": "", "golden_prompts-0-expect": ""})
    shown = signed_in().post(EDIT, typed, headers={"HX-Request": "true"}).text
    assert "add some, or state the reason" in shown or "impossible" in shown


@pytest.mark.long
def test_only_drafts_change_and_viewers_see_why_not() -> None:
    rows.version("9", state=VersionState.RELEASED)
    response = signed_in().post(EDIT, {**form(EDIT), "context_length": "64", "go": "apply"})
    assert "only drafts may change" in response.text
    assert signed_in().get("/models/sim-70b@8/edit/").status_code == 404
    viewer = Client()
    viewer.force_login(make_user("vera", Role.VIEWER))
    for url in (NEW, EDIT):
        assert viewer.post(url, {"go": "apply"}).status_code == 403
    assert "This needs the operator role." in viewer.get("/models/sim-70b@9/").text
    assert User.objects.filter(username="vera").exists()
