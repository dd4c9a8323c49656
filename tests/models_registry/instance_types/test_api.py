"""Instance types over HTTP, as documents, and on their pages."""

from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client

from controlplane.cli.documents import document_of
from models_registry.instance_types.models import InstanceType
from models_registry.instance_types.services import instance_types_ship
from tests.controlplane.api.client import bearer
from tests.fleet import rows

pytestmark = [pytest.mark.django_db, pytest.mark.slow]
URL = "/api/v1/instance-types"
OWN = {"name": "own.2xh100", "accelerator": "h100", "chips": 2, "memory_gib": 160}


def test_a_type_is_created_changed_and_deleted() -> None:
    client = bearer("ada")
    made = client.post(URL, {**OWN, "why": "bought"}, format="json").json()
    assert (made["vendor"], made["cores"], made["origin"], made["changed_by"]) == ("nvidia", 2, "operator", "ada")
    assert client.post(URL, OWN, format="json").status_code == 409
    changed = client.patch(f"{URL}/own.2xh100", {"price_per_hour": 4.5, "cpu_arch": "arm64"}, format="json")
    assert (changed.json()["price_per_hour"], changed.json()["cpu_arch"]) == (4.5, "arm64")
    assert [row["name"] for row in client.get(f"{URL}?cpu_arch=arm64").json()["results"]] == ["own.2xh100"]
    assert client.delete(f"{URL}/own.2xh100").status_code == 428
    gone = client.delete(f"{URL}/own.2xh100", headers={"if-match": changed["ETag"]})
    assert gone.json()["name"] == "own.2xh100"
    assert client.get(f"{URL}/own.2xh100").status_code == 404


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"name": "own"}, "accelerator"),
        ({**OWN, "chips": "many"}, "chips"),
        ({**OWN, "chips": -1}, "chips"),
        ({**OWN, "memory_gib": "nan"}, "memory_gib"),
        ({**OWN, "tensor_parallel_degree": 3}, "tensor_parallel_degree"),
        ({**OWN, "origin": "shipped"}, "origin"),
        ({**OWN, "name": "a/b"}, "name"),
    ],
)
def test_a_bad_type_is_refused_by_field(body: dict[str, Any], field: str) -> None:
    refused = bearer("ada").post(URL, body, format="json")
    assert refused.status_code == 400
    assert [error["field"] for error in refused.json()["errors"]] == [field]


def test_hardware_in_use_is_a_conflict() -> None:
    rows.deployment()
    refused = bearer("ada").patch(f"{URL}/local.cpu", {"memory_gib": 8, "cores": 1}, format="json")
    assert refused.status_code == 409
    assert "deployment sim-70b" in refused.json()["detail"]


def document(name: str, **spec: Any) -> dict[str, Any]:
    return {"apiVersion": "switchyard/v1", "kind": "InstanceType", "metadata": {"name": name}, "spec": spec}


def applied(*documents: dict[str, Any]) -> Any:
    return bearer("ada").post("/api/v1/apply", {"documents": documents}, format="json")


def test_a_document_makes_a_type_and_the_exported_one_changes_nothing() -> None:
    made = applied(document("own.2xh100", accelerator="h100", chips=2, memory_gib=160, notes="ours")).json()
    assert [(step["name"], step["action"]) for step in made["steps"]] == [("own.2xh100", "create")]
    row = bearer().get(f"{URL}/own.2xh100").json()
    exported = document_of("instance-types", "own.2xh100", row)
    assert applied(exported).json()["unchanged"] == ["InstanceType own.2xh100"]
    changed = applied(document("own.2xh100", price_per_hour=3), document("g6.xlarge", price_per_hour=0.5)).json()
    assert [(step["name"], step["action"]) for step in changed["steps"]] == [
        ("own.2xh100", "change"), ("g6.xlarge", "change"),
    ]  # fmt: skip
    assert InstanceType.objects.get(name="g6.xlarge").price_per_hour == 0.5


def test_a_document_names_what_is_wrong() -> None:
    assert "spec.accelerator" in str(applied(document("own")).json())
    assert "begins with a letter or digit" in str(applied(document("-own", accelerator="h100")).json())
    assert "unknown field" in str(applied(document("own", accelerator="h100", origin="shipped")).json())


@pytest.fixture
def browser() -> Client:
    client = Client()
    client.force_login(User.objects.create_superuser("root"))
    return client


def test_the_pages_list_add_change_and_restore(browser: Client) -> None:
    instance_types_ship()
    listed = browser.get("/instance-types/?q=trn1").content.decode()
    assert "trn1.32xlarge" in listed
    assert "g6.xlarge" not in listed
    made = browser.post("/instance-types/new/", OWN | {"why": "bought"})
    assert made["Location"] == "/instance-types/own.2xh100/"
    page = browser.get(made["Location"]).content.decode()
    assert "2 x h100" in page
    assert "ask/delete/" in page
    refused = browser.post("/instance-types/own.2xh100/ask/change/", {"chips": "0"})
    assert (refused.status_code, "state the number of h100" in refused.content.decode()) == (409, True)
    browser.post("/instance-types/own.2xh100/ask/change/", {"price_per_hour": "4.5"})
    assert InstanceType.objects.get(name="own.2xh100").price_per_hour == 4.5
    browser.post("/instance-types/own.2xh100/ask/delete/", {"confirm": "own.2xh100"})
    assert not InstanceType.objects.filter(name="own.2xh100").exists()
    browser.post("/instance-types/g6.xlarge/ask/change/", {"price_per_hour": "0.5"})
    assert "ask/restore/" in browser.get("/instance-types/g6.xlarge/").content.decode()
    browser.post("/instance-types/g6.xlarge/ask/restore/")
    assert InstanceType.objects.get(name="g6.xlarge").origin == "shipped"
