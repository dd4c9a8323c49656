"""The page of a deployment: its error budget, its load, and scaling it after a prediction."""

from datetime import timedelta

import pytest

from fleet.models import DeploymentRegion, NodeReport
from fleet.services.history import load_sample
from kernel import clock
from tests.controlplane.dashboard.clients import fragment, signed_in
from tests.controlplane.dashboard.fleets import LOAD
from tests.fleet import rows

pytestmark = pytest.mark.django_db

URL = "/deployments/sim-70b/"
SCALE = f"{URL}scale/"


@pytest.fixture(autouse=True)
def cell() -> None:
    report = {"load": LOAD, "last_seen_at": clock.now()}
    rows.cell("sim-70b-us-east-1-1", rows.node("n-00000001", report=report), rows.node("n-00000002"))


def part(name: str, url: str = URL) -> str:
    return " ".join(fragment(signed_in(), url, name).split())


def failing() -> None:
    now = clock.now()
    load_sample(now=now - timedelta(seconds=30))
    NodeReport.objects.update(load={**LOAD, "requests_total": 100, "errors_total": 20, "ttft_counts": {"90": 80}})
    load_sample(now=now - timedelta(seconds=10))


def test_a_budget_that_burns_is_bad() -> None:
    failing()
    text = part("deployment-slo")
    assert "99.5" in text
    assert "burns 40.0 times too fast over the last hour and still does" in text


def test_without_requests_no_budget_is_judged() -> None:
    assert part("deployment-slo").count("no request to judge by") == 2


def test_the_objective_is_a_line_across_its_chart() -> None:
    failing()
    assert "&quot;y0&quot;:2000.0" in part("deployment-load")


def test_the_overview_says_what_users_get() -> None:
    failing()
    text = part("rates", "/")
    assert "<dd>20 %</dd>" in text.replace("\u202f", " ")


def test_the_effect_of_scaling_is_shown_first() -> None:
    text = " ".join(signed_in().get(SCALE, {"cells-us-east-1": "0"}).text.split())
    assert "1 ready now, at least 0 on the way, 0 at the end" in text
    assert DeploymentRegion.objects.get().cells == 1


def test_a_deployment_is_scaled_when_its_name_is_typed() -> None:
    form = {"cells-us-east-1": "3"}
    assert signed_in().post(SCALE, {**form, "confirm": "sim"}).status_code == 409
    assert DeploymentRegion.objects.get().cells == 1
    assert signed_in().post(SCALE, {**form, "confirm": "sim-70b"}).headers["Location"] == URL
    assert DeploymentRegion.objects.get().cells == 3


@pytest.mark.parametrize("number", ["-1", "x", "1001", "9" * 40, ""])
def test_an_impossible_number_is_named(number: str) -> None:
    response = signed_in().get(SCALE, {"cells-us-east-1": number})
    assert response.status_code == 409
    assert "the number must be from 0 to 1000" in response.text
