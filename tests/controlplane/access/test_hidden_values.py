"""Viewers see names of an engine's variables and no values, in every representation of a version."""

from typing import Any

import pytest
from django.test import Client
from rest_framework.test import APIClient

from kernel.access import Role
from models_registry.versions.models import EngineAllowance, ModelVersion
from tests.controlplane.access.callers import calls, make_user
from tests.fleet import rows
from tests.fleet.rows import NOW

pytestmark = [pytest.mark.django_db, pytest.mark.slow]

SECRET = "hf_0123456789abcdef"
OTHER = "hf_fedcba9876543210"
DOCUMENT = {
    "apiVersion": "switchyard/v1",
    "kind": "ModelVersion",
    "metadata": {"name": "sim-70b@3"},
    "spec": {"engine_env": {"HF_TOKEN": "guess"}, "by_type": {"local.cpu": {"engine_env": {"HF_TOKEN": "guess"}}}},
}


@pytest.fixture(params=[Role.VIEWER, Role.OPERATOR])
def role(request: pytest.FixtureRequest) -> Role:
    return Role(request.param)


@pytest.fixture
def caller(role: Role) -> APIClient:
    return calls(make_user("somebody", role))


@pytest.fixture
def browser(role: Role) -> Client:
    client = Client()
    client.force_login(make_user("somebody", role))
    return client


@pytest.fixture(autouse=True)
def _versions() -> None:
    rows.deployment()
    variables = {"HF_TOKEN": SECRET}
    ModelVersion.objects.filter(version="1").update(
        engine_env=variables, by_type={"local.cpu": {"engine_env": variables}}, state="draft"
    )
    rows.version("2", engine_env={"HF_TOKEN": OTHER})
    EngineAllowance.objects.create(engine="sim", name="HF_TOKEN", why="weights", actor="ada", created_at=NOW)
    rows.version(
        "3", engine_env={"HF_TOKEN": OTHER}, by_type={"local.cpu": {"engine_env": {"HF_TOKEN": OTHER}}}, state="draft"
    )


def is_shown(text: str) -> bool:
    return SECRET in text or OTHER in text


@pytest.mark.parametrize(
    "path", ["model-versions", "model-versions/sim-70b@1", "model-versions/sim-70b@1/diff?against=sim-70b@2"]
)
def test_the_api_shows_values_to_operators_only(path: str, role: Role, caller: APIClient) -> None:
    text = caller.get(f"/api/v1/{path}").content.decode()
    assert "HF_TOKEN" in text
    assert is_shown(text) == (role is Role.OPERATOR)


def test_a_preview_shows_values_to_operators_only(role: Role, caller: APIClient) -> None:
    response: Any = caller.post("/api/v1/apply/preview", {"documents": [DOCUMENT]}, format="json")
    assert response.status_code == 200, response.content
    assert "HF_TOKEN" in response.content.decode()
    assert is_shown(response.content.decode()) == (role is Role.OPERATOR)


@pytest.mark.parametrize("path", ["models/sim-70b@1/", "models/sim-70b@1/diff/?against=sim-70b@2"])
def test_pages_show_values_to_operators_only(path: str, role: Role, browser: Client) -> None:
    response = browser.get(f"/{path}")
    assert response.status_code == 200
    assert is_shown(response.text) == (role is Role.OPERATOR)
