"""Plan drafts over HTTP: whose are listed, who reads one by its key, and filters."""

from typing import Any

import pytest

from fleet.drafts.models import PlanDraft
from fleet.drafts.services import digest_of, draft_create
from kernel import clock
from kernel.access import Role
from tests.controlplane.access.callers import calls, make_user
from tests.controlplane.api.client import bearer

pytestmark = pytest.mark.django_db
PATH = "/api/v1/drafts"


def document(kind: str, name: str) -> dict[str, Any]:
    return {"apiVersion": "switchyard/v1", "kind": kind, "metadata": {"name": name}, "spec": {}}


def draft(name: str, *documents: dict[str, Any], owner: str = "operator") -> PlanDraft:
    return draft_create(owner=owner, name=name, documents=list(documents), bases={}, now=clock.now())


def test_a_list_has_the_callers_drafts_and_filters_them() -> None:
    toy = draft("Toy", document("Model", "toy"))
    done = draft("Done", document("Deployment", "sim-70b"), document("Model", "toy"))
    PlanDraft.objects.filter(key=done.key).update(applied_at=clock.now(), applied_by="ada")
    draft("Hers", document("Model", "toy"), owner="ada")
    client = bearer()

    def names(**query: str) -> list[str]:
        return [row["name"] for row in client.get(PATH, query).json()["results"]]

    assert names() == ["Done", "Toy"]
    assert (names(state="open"), names(state="applied")) == (["Toy"], ["Done"])
    assert (names(kind="Deployment"), names(object="toy"), names(object="nothing")) == (["Done"], ["Done", "Toy"], [])
    assert names(ordering="name", page_size="1") == ["Done"]
    assert client.get(PATH, {"state": "lost"}).status_code == 400
    (first, _) = client.get(PATH).json()["results"]
    assert (first["state"], first["applied_by"]) == ("applied", "ada")
    assert first["objects"] == [{"kind": "Deployment", "name": "sim-70b"}, {"kind": "Model", "name": "toy"}]
    assert "documents" not in first, "they may be 200 kB each"
    assert client.get(f"{PATH}/{toy.key}").json()["digest"] == digest_of(toy)


def test_operators_with_the_key_read_a_draft_and_viewers_read_none() -> None:
    key = draft("Campaign", document("Model", "toy")).key
    ada, viewer = calls(make_user("ada", Role.OPERATOR)), calls(make_user("viewer"))
    assert ada.get(f"{PATH}/{key}").json()["documents"] == [document("Model", "toy")]
    assert ada.get(PATH).json()["results"] == []
    assert ada.get(f"{PATH}/unknown").status_code == 404
    assert ada.get(f"{PATH}/{'x' * 33}").status_code == 404
    assert {viewer.get(path).status_code for path in (PATH, f"{PATH}/{key}", f"{PATH}/unknown")} == {403}
