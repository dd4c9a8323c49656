"""The page that starts a rollout: its preview, the start, and errors."""

import re

import pytest
from django.contrib.auth.models import User
from django.test import Client

from fleet.cells.models import Cell
from fleet.rollouts.models import Rollout
from models_registry.versions.models import Model, ModelVersion, VersionState
from tests.controlplane.dashboard.clients import signed_in
from tests.fleet import rows
from tests.fleet.rows import NOW

pytestmark = [pytest.mark.django_db, pytest.mark.slow]
PAGE = "/rollouts/new/"
FORM = {"deployment": "sim-70b", "version": "sim-70b@2"}


@pytest.fixture(autouse=True)
def fleet() -> None:
    rows.version("2", state=VersionState.RELEASED)
    rows.version("3", state=VersionState.VALIDATED)
    rows.deployment(cells=2)
    rows.cell("a")


def test_the_stages_are_shown_and_nothing_is_started() -> None:
    shown = signed_in().get(PAGE, FORM).text
    for expected in ("us-east-1 canary", "1 of 2", "Roll sim-70b out to sim-70b@2"):
        assert expected in shown
    assert not Rollout.objects.exists()


def test_it_starts_and_leads_to_its_page() -> None:
    response = signed_in().post(PAGE, {**FORM, "why": "faster"})
    rollout = Rollout.objects.get()
    assert (response.status_code, response.headers["Location"]) == (302, f"/rollouts/{rollout.pk}/")
    assert (rollout.actor, rollout.why) == ("operator", "faster")


def selected(shown: str) -> list[str]:
    return re.findall(r'<option value="([^"]*)" selected>', shown)


def test_only_versions_of_the_deployments_model_are_offered_released_ones_first() -> None:
    rows.version("4", state=VersionState.RELEASED)
    other = Model.objects.create(name="other", created_at=NOW)
    ModelVersion.objects.create(model=other, version="9", engine="sim", state=VersionState.RELEASED, created_at=NOW)
    shown = signed_in().get(PAGE, {"deployment": "sim-70b"}).text
    offered = re.findall(r'<option value="([^"]*@[^"]*)"', shown)
    assert offered == ["sim-70b@4", "sim-70b@1", "sim-70b@2", "sim-70b@3"]
    assert "sim-70b@3 (validated)" in shown


def test_the_newest_released_version_of_the_deployments_own_model_is_preselected() -> None:
    rows.version("4", state=VersionState.RELEASED)
    rows.version("5", state=VersionState.VALIDATED)
    other = Model.objects.create(name="other", created_at=NOW)
    ModelVersion.objects.create(model=other, version="9", engine="sim", state=VersionState.RELEASED, created_at=NOW)
    assert selected(signed_in().get(PAGE).text) == ["", ""]
    shown = signed_in().get(PAGE, {"deployment": "sim-70b"}).text
    assert selected(shown) == ["sim-70b", "sim-70b@4"]
    assert "Roll sim-70b out to sim-70b@4" in shown
    shown = signed_in().get(PAGE, {"deployment": "sim-70b", "version": ""}).text
    assert "Roll sim-70b out to sim-70b@4" in shown
    assert signed_in().post(PAGE, {"deployment": "sim-70b"}).status_code == 302
    assert Rollout.objects.get().to_version.reference == "sim-70b@4"


def test_where_every_cell_runs_the_newest_version_no_start_is_offered() -> None:
    shown = signed_in().get(PAGE, {"deployment": "sim-70b"}).text
    assert "Every cell of sim-70b already runs sim-70b@1" in shown
    assert "Confirm" not in shown
    Cell.objects.update(model_version=ModelVersion.objects.get(version="2"))
    assert "Confirm" in signed_in().get(PAGE, {"deployment": "sim-70b"}).text


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        ({"deployment": "gone"}, "no deployment"),
        ({"version": "sim-70b@9"}, "sim-70b@9"),
        ({"version": "sim-70b@3"}, "released"),
    ],
)
def test_a_refusal_says_why(other: dict[str, str], expected: str) -> None:
    response = signed_in().post(PAGE, {**FORM, **other})
    assert response.status_code == 409
    assert expected in response.text
    assert not Rollout.objects.exists()


def test_an_unreleased_version_has_to_be_allowed() -> None:
    assert signed_in().post(PAGE, {**FORM, "version": "sim-70b@3", "unreleased": "yes"}).status_code == 302


def test_a_viewer_starts_nothing() -> None:
    viewer = Client()
    viewer.force_login(User.objects.create(username="viewer"))
    assert viewer.post(PAGE, FORM).status_code == 403
