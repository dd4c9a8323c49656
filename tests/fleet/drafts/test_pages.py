"""Plan drafts: who may use them, what a review shows, that mistakes keep what was typed, and that a repeated apply
applies once."""

from typing import Any

import pytest
import yaml
from django.contrib.auth.models import User
from django.core.files.uploadedfile import SimpleUploadedFile
from django.test import Client

from controlplane.dashboard.wizards import documents_as_yaml
from fleet.deployments.models import Deployment, DeploymentRegion
from fleet.drafts import services
from fleet.drafts.models import PlanDraft
from fleet.faults.planning.views import SETTABLE_RULES, RuleMode
from kernel import clock
from kernel.access import Role
from kernel.models import Event
from kernel.refusals import InvalidInput
from models_registry.versions.models import Model
from tests.controlplane.access.callers import make_user
from tests.controlplane.dashboard.clients import signed_in
from tests.fleet import rows
from tests.traffic.rows import EAST

pytestmark = [pytest.mark.django_db, pytest.mark.slow]
NEW = "/plan/drafts/new/"
TOY: dict[str, Any] = {"apiVersion": "switchyard/v1", "kind": "Model", "metadata": {"name": "toy"}, "spec": {}}
CELLS: dict[str, Any] = {
    "apiVersion": "switchyard/v1",
    "kind": "Deployment",
    "metadata": {"name": "sim-70b"},
    "spec": {"regions": [{"region": "us-east-1", "cells": 3}]},
}


def described(text: str) -> dict[str, Any]:
    return {**TOY, "spec": {"description": text}}


def draft(*documents: dict[str, Any], owner: str = "operator") -> PlanDraft:
    return services.draft_create(owner=owner, name="Campaign", documents=list(documents), bases={}, now=clock.now())


def url(row: PlanDraft, *more: str) -> str:
    return "".join((f"/plan/drafts/{row.key}/", *more))


def reviewed(client: Client, row: PlanDraft, *form: str) -> dict[str, str]:
    """The hidden fields of the form that applies."""
    text = client.get(url(row, *form)).text
    return {name: text.partition(f'name="{name}" value="')[2].partition('"')[0] for name in ("digest", "revision")}


def other(name: str = "ada") -> Client:
    client = Client()
    client.force_login(make_user(name, Role.OPERATOR))
    return client


def test_a_pasted_text_and_a_file_become_one_draft() -> None:
    typed = documents_as_yaml([TOY, CELLS])
    file = SimpleUploadedFile("more.yaml", documents_as_yaml([described("from the file")]).encode())
    response = signed_in().post(NEW, {"name": "Campaign", "yaml": typed, "file": file})
    row = PlanDraft.objects.get()
    assert response.headers["Location"] == url(row)
    assert row.documents == [described("from the file"), CELLS]
    assert not Event.objects.exists()


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("kind: [", "line 3"),
        ("kind: Model\nkind: Model", "line 2: kind is a duplicate"),
        (documents_as_yaml([TOY, TOY]), "model toy is listed twice"),
        (documents_as_yaml([{**TOY, "kind": "Secret"}]), "kind"),
        (documents_as_yaml([{**TOY, "spec": {"colour": "red"}}]), "colour"),
        ("a: &a [x, x]\nb: *a", "line 2: links (*a) are not read"),
        ("[" * 5000, "nested deeper than 30 levels"),
        (f"a: [{'1,' * 20_000}]", "more than 20,000 values"),
        ("x" * 200_001, "the limit is 200,000 bytes"),
        ('kind: "\\0"', "is not text"),
        ("kind: !!binary aGVsbG8=", "not json serializable"),
        ("kind: !!python/object:os.system x", "line 1"),
        ("just a word", "must be an object"),
        ("kind: Region\nmetadata: {name: eu}\nspec: {}", "region eu: apiversion: write switchyard/v1"),
    ],
)
def test_a_mistake_is_named_and_keeps_what_was_typed(text: str, error: str) -> None:
    response = signed_in().post(NEW, {"name": "<b>mine</b>", "yaml": f"{text}\n# kept as typed"})
    assert response.status_code == 409
    problem = response.text.partition('<p class="refusal"')[2].partition("</p>")[0]
    assert error in problem.casefold()
    assert "# kept as typed" in response.text
    assert "&lt;b&gt;mine" in response.text
    assert "<b>" not in response.text
    assert not PlanDraft.objects.exists()


def test_a_file_that_is_refused_stays_in_the_form() -> None:
    file = SimpleUploadedFile("wrong.yaml", b"kind: Wrong of the file")
    assert "kind: Wrong of the file" in signed_in().post(NEW, {"file": file}).text
    not_text = SimpleUploadedFile("image.png", b"\xff\xfe\x00")
    assert "not UTF-8 text" in signed_in().post(NEW, {"file": not_text}).text


def test_size_and_number_of_drafts_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "DRAFTS_MOST", 2)
    many = [{**TOY, "metadata": {"name": f"toy-{number}"}} for number in range(101)]
    with pytest.raises(InvalidInput, match="101 documents; the limit is 100"):
        draft(*many)
    with pytest.raises(InvalidInput, match="bytes; the limit is 200,000"):
        draft(described("x" * 200_000))
    draft()
    draft()
    with pytest.raises(InvalidInput, match="apply or delete one first"):
        draft()
    draft(owner="ada")
    PlanDraft.objects.update(applied_at=clock.now())
    draft()
    assert PlanDraft.objects.filter(owner="operator", applied_at__isnull=False).count() == 1


def test_a_review_shows_steps_and_changes_nothing() -> None:
    rows.deployment()
    client, row = signed_in(), draft(CELLS, described("<b>new</b>"))
    text = client.get(url(row)).text
    assert "sim-70b should have 3 cells in us-east-1, not 1" in text
    assert "&lt;b&gt;new" in text
    assert "2 steps" in text
    assert "Cost per hour" in text
    assert not Model.objects.filter(name="toy").exists()
    assert DeploymentRegion.objects.get().cells == 1


def test_predictions_show_the_time_line() -> None:
    rows.deployment()
    text = signed_in().get(url(draft(CELLS), "?predict=1")).text
    assert "sim-70b in us-east-1" in text
    assert "sim-70b-us-east-1-1: " in text
    assert "What if" in text


def test_problems_are_listed_and_such_a_draft_cannot_be_applied() -> None:
    lost = {**CELLS, "spec": {"regions": [{"region": "nowhere", "cells": 1}]}}
    rows.deployment()
    client, row = signed_in(), draft(lost, TOY)
    text = client.get(url(row)).text
    assert "Deployment sim-70b" in text
    assert "nowhere" in text
    assert "Apply all" not in text
    form = {**reviewed(client, row, "ask/apply/"), "why": "kept as typed"}
    refused = client.post(url(row, "ask/apply/"), form)
    assert refused.status_code == 409
    assert "nowhere" in refused.text
    assert "kept as typed" in refused.text
    assert not Model.objects.filter(name="toy").exists()
    row.refresh_from_db()
    assert row.applied_at is None


def test_a_repeated_apply_applies_once() -> None:
    rows.deployment()
    client, row = signed_in(), draft(CELLS, TOY)
    form = {**reviewed(client, row), "why": "a campaign"}
    assert client.post(url(row, "ask/apply/"), form).headers["Location"] == url(row)
    assert DeploymentRegion.objects.get().cells == 3
    events = Event.objects.count()
    DeploymentRegion.objects.update(cells=1)
    assert client.post(url(row, "ask/apply/"), form).headers["Location"] == url(row)
    assert DeploymentRegion.objects.get().cells == 1
    assert Event.objects.count() == events
    row.refresh_from_db()
    assert row.applied_by == "operator"
    assert "applied" in client.get(url(row)).text
    assert client.post(url(row, "edit/"), {"digest": form["digest"], "yaml": ""}).status_code == 409


def test_a_stale_review_applies_nothing() -> None:
    client, row = signed_in(), draft(TOY)
    form = {**reviewed(client, row), "why": "late"}
    services.draft_add(owner="operator", documents=[described("more")], bases={}, now=clock.now())
    assert "draft has changed" in client.post(url(row, "ask/apply/"), form).text
    fresh = {**reviewed(client, row), "why": "late"}
    rows.version("1")
    Model.objects.create(name="toy", created_at=clock.now())
    stale = client.post(url(row, "ask/apply/"), fresh)
    assert stale.status_code == 409
    assert "have changed since the plan was made" in stale.text
    assert "review it first" in client.post(url(row, "ask/apply/"), {"why": "none"}).text
    assert Model.objects.get(name="toy").description == ""
    assert PlanDraft.objects.get().applied_at is None


def test_the_edit_form_has_the_documents_and_refuses_a_second_tab() -> None:
    client, row = signed_in(), draft(TOY)
    assert "name: toy" in client.get(url(row, "edit/")).text
    digest = services.digest_of(row)
    changed = {"name": "Renamed", "yaml": documents_as_yaml([described("first")]), "digest": digest}
    assert client.post(url(row, "edit/"), changed).status_code == 302
    second = client.post(url(row, "edit/"), {**changed, "yaml": documents_as_yaml([described("second tab")])})
    assert second.status_code == 409
    assert "second tab" in second.text
    row.refresh_from_db()
    assert (row.name, row.documents) == ("Renamed", [described("first")])


def test_documents_are_removed_and_downloaded() -> None:
    client, row = signed_in(), draft(CELLS, TOY)
    for _ in range(2):
        client.post(url(row, "ask/remove/"), {"kind": "Model", "name": "toy"})
    response = client.get(url(row, "download/"))
    assert list(yaml.safe_load_all(response.content)) == [CELLS]
    assert response.text.startswith("apiVersion: switchyard/v1\nkind: Deployment\nmetadata:")
    assert response.headers["Content-Disposition"] == 'attachment; filename="Campaign.yaml"'


def test_another_operator_with_the_link_reads_and_applies_but_never_edits() -> None:
    row, ada = draft(TOY), other()
    assert row.name not in ada.get("/plan/drafts/").text
    assert "Apply all" in ada.get(url(row)).text
    assert ada.get(url(row, "edit/")).status_code == 403
    for action in ("remove", "delete"):
        assert ada.post(url(row, f"ask/{action}/"), {"kind": "Model", "name": "toy"}).status_code == 403
    assert ada.post(url(row, "edit/"), {"digest": services.digest_of(row), "yaml": ""}).status_code == 403
    row.refresh_from_db()
    assert row.documents == [TOY]
    ada.post(url(row, "ask/apply/"), {**reviewed(ada, row), "why": "agreed"})
    row.refresh_from_db()
    assert row.applied_by == "ada"
    assert Model.objects.get().name == "toy"


def test_an_operator_applies_no_document_that_needs_an_admin() -> None:
    rule = {
        **TOY,
        "kind": "FaultRule",
        "metadata": {"name": SETTABLE_RULES[0].value},
        "spec": {"mode": RuleMode.OFF.value},
    }
    row, ada = draft(rule, TOY), other()
    assert "needs the admin role" in ada.get(url(row)).text
    form = {**reviewed(ada, row, "ask/apply/"), "why": "quiet"}
    assert ada.post(url(row, "ask/apply/"), form).status_code == 403
    row.refresh_from_db()
    assert row.applied_at is None
    assert not Model.objects.exists()
    assert signed_in().post(url(row, "ask/apply/"), form).headers["Location"] == url(row)
    assert Model.objects.exists()


def test_viewers_open_no_draft() -> None:
    viewer = Client()
    viewer.force_login(make_user("viewer"))
    row = draft(TOY)
    for path in ("/plan/drafts/", NEW, url(row), url(row, "edit/"), url(row, "download/")):
        assert viewer.get(path).status_code == 403, path
    assert "Plan drafts" not in viewer.get("/").text


def test_a_wizard_adds_to_the_latest_draft_and_replaces_the_same_object() -> None:
    region = {"name": "us-west-2", "provider": "local"}
    client = signed_in()
    first = client.post("/new/region/", {**region, "go": "draft"})
    row = PlanDraft.objects.get()
    assert first.headers["Location"] == url(row)
    again = client.post("/new/region/", {**region, "position": "7", "go": "draft"})
    assert again.headers["Location"] == url(row)
    row.refresh_from_db()
    assert [one["kind"] for one in row.documents] == ["Region"]
    assert row.documents[0]["spec"]["position"] == 7


def test_an_owner_deletes_the_draft() -> None:
    row = draft(TOY)
    assert signed_in().post(url(row, "ask/delete/")).headers["Location"] == "/plan/drafts/"
    assert not PlanDraft.objects.exists()
    assert User.objects.filter(username="operator").exists()


def test_an_object_that_changed_after_it_was_added_is_named() -> None:
    rows.deployment()
    client = signed_in()
    client.post(NEW, {"name": "Campaign", "yaml": documents_as_yaml([CELLS, TOY])})
    row = PlanDraft.objects.get()
    assert "has changed since" not in client.get(url(row)).text
    DeploymentRegion.objects.update(cells=5)
    text = client.get(url(row)).text
    assert "Deployment sim-70b has changed since it was added" in text
    assert "sim-70b should have 3 cells in us-east-1, not 5" in text
    services.draft_add(owner="operator", documents=[described("more")], bases={"Model toy": "x"}, now=clock.now())
    assert "Deployment sim-70b has changed since" in client.get(url(row)).text, "other documents do not hide it"
    row.refresh_from_db()
    again = {"yaml": documents_as_yaml([{**CELLS, "spec": {"regions": [{"region": EAST, "cells": 4}]}}])}
    assert client.post(url(row, "edit/"), {**again, "digest": services.digest_of(row)}).status_code == 302
    assert "has changed since" not in client.get(url(row)).text, "its document is a new one"


def test_an_object_that_was_deleted_meanwhile_is_named_and_its_document_stays() -> None:
    rows.deployment()
    client = signed_in()
    client.post(NEW, {"name": "Campaign", "yaml": documents_as_yaml([CELLS])})
    row = PlanDraft.objects.get()
    Deployment.objects.all().delete()
    text = client.get(url(row)).text
    assert "Deployment sim-70b was deleted after it was added" in text
    assert "s required, because Deployment sim-70b does not exist" in text
    assert client.post(url(row, "ask/apply/"), {**reviewed(client, row), "why": "late"}).status_code == 409
    row.refresh_from_db()
    assert (row.documents, row.applied_at) == ([CELLS], None)


def test_another_open_draft_of_the_same_object_is_named_without_its_key() -> None:
    rows.deployment()
    mine, second, theirs = draft(CELLS), draft(CELLS, TOY), draft(CELLS, owner="ada")
    PlanDraft.objects.filter(key=second.key).update(name="Second")
    draft(TOY, owner="eve")
    client = signed_in()
    text = client.get(url(mine)).text
    assert "Deployment sim-70b is also in" in text
    assert f'your draft <a href="{url(second)}">Second</a>' in text
    assert "a draft of ada" in text
    assert theirs.key not in text
    assert "draft of eve" not in text
    client.post(url(second, "ask/delete/"))
    client.post(url(mine, "ask/apply/"), {**reviewed(client, mine), "why": "first"})
    text = other().get(url(theirs)).text
    assert "The fleet already matches all documents" in text
    assert "is also in" not in text


def test_two_drafts_of_the_same_object_never_overwrite_each_other_unseen() -> None:
    rows.deployment()
    client = signed_in()
    first, second = draft(CELLS), draft({**CELLS, "spec": {"regions": [{"region": EAST, "cells": 7}]}})
    forms = [{**reviewed(client, row), "why": "go"} for row in (first, second)]
    assert client.post(url(first, "ask/apply/"), forms[0]).status_code == 302
    refused = client.post(url(second, "ask/apply/"), forms[1])
    assert refused.status_code == 409
    assert "have changed since the plan was made" in refused.text
    assert DeploymentRegion.objects.get().cells == 3


def test_documents_that_an_upgrade_made_invalid_are_named_and_kept() -> None:
    old = [{**TOY, "spec": {"colour": "red"}}, {**TOY, "kind": "Fleet"}, CELLS]
    rows.deployment()
    client, row = signed_in(), draft(*old)
    text = client.get(url(row)).text
    assert "Model toy: spec.colour: " in text
    assert "Fleet toy: kind: " in text
    assert "Nothing is lost" in text
    assert "Apply all" not in text
    refused = client.post(url(row, "ask/apply/"), {"digest": services.digest_of(row), "revision": "x", "why": "kept"})
    assert refused.status_code == 409
    assert "spec.colour" in refused.text
    assert "colour: red" in client.get(url(row, "edit/")).text
    assert client.get(url(row, "download/")).status_code == 200
    services.draft_add(owner="operator", documents=[described("new")], bases={}, now=clock.now())
    client.post(url(row, "ask/remove/"), {"kind": "Fleet", "name": "toy"})
    row.refresh_from_db()
    assert row.documents == [described("new"), CELLS]
    assert "Apply all" in client.get(url(row)).text
