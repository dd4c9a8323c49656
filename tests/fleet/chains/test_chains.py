"""Chains on rows: who may be a planner, what the page and the API show, and who may change a chain."""

from datetime import timedelta
from typing import Any

import pytest

from fleet.chains.selectors import chain_view
from fleet.deployments.models import Deployment
from fleet.deployments.services.deployments import deployment_change, deployment_delete
from fleet.requests.models import RequestSample
from kernel import clock
from kernel.access import Role
from kernel.models import Event
from kernel.refusals import Conflict, InvalidInput
from tests.controlplane.access.callers import make_user
from tests.controlplane.api.client import bearer
from tests.controlplane.dashboard.clients import fragment, signed_in
from tests.fleet import rows
from tests.fleet.rows import NOW

pytestmark = pytest.mark.django_db

CHAIN: dict[str, Any] = {"planner": "planner", "ttft_ms": 1000, "planner_ms": 300}


@pytest.fixture
def main() -> Deployment:
    rows.deployment("planner")
    return rows.deployment("main")


def change(name: str = "main", **chain: Any) -> Deployment:
    return deployment_change(name=name, actor="ada", now=NOW, chain=chain)


def sampled(deployment: str, age_s: float, trace: str, **columns: Any) -> None:
    own = {"kind": "linked", "status": 200, "region": "us-east-1", "generation": 1, "cell": f"{deployment}-1"}
    times = {"ingress_ms": 10.0, "total_ms": 190.0, "first_ms": None, "tenant": "acme"}
    at = clock.now().replace(microsecond=0) - timedelta(seconds=age_s)
    RequestSample.objects.create(
        **{**own, **times, "request": f"{deployment}-{trace[0]}", "deployment": deployment, "at": at, "trace": trace},
        **columns,
    )


def chained(*, first_ms: float = 390.0) -> None:
    for letter in "abc":
        sampled("planner", 60.0, letter * 32)
        sampled("main", 59.7, letter * 32)
    planner = RequestSample.objects.filter(deployment="planner").earliest("at")
    RequestSample.objects.filter(deployment="planner").update(at=planner.at)
    RequestSample.objects.filter(deployment="main").update(at=planner.at + timedelta(seconds=0.3))
    RequestSample.objects.filter(deployment="main").update(first_ms=first_ms, total_ms=5000.0)


def test_a_chain_is_stored_audited_and_removed(main: Deployment) -> None:
    assert change(**CHAIN).chain == CHAIN
    assert Event.objects.get(kind="deployment.changed").detail == {"chain": CHAIN}
    assert change().chain == {}


@pytest.mark.parametrize(
    ("chain", "field", "text"),
    [
        ({"planner": "main", "ttft_ms": 1}, "chain.planner", "cannot plan its own"),
        ({"planner": "nobody", "ttft_ms": 1}, "chain.planner", "there is no deployment 'nobody'"),
        ({"planner": "planner"}, "chain.ttft_ms", "needs ttft_ms"),
        ({"planner": "away", "ttft_ms": 1}, "chain.planner", "has no cells in us-east-1"),
    ],
)
def test_an_impossible_chain_is_refused(main: Deployment, chain: dict[str, Any], field: str, text: str) -> None:
    rows.deployment("away", where="us-west-2")
    with pytest.raises(InvalidInput, match=text) as error:
        change(**chain)
    assert error.value.field == field


def test_deployments_cannot_plan_each_other(main: Deployment) -> None:
    change(**CHAIN)
    with pytest.raises(InvalidInput, match="planner → main → planner"):
        change("planner", planner="main", ttft_ms=1)


def test_a_planner_is_not_deleted_while_a_chain_names_it(main: Deployment) -> None:
    change(**CHAIN)
    with pytest.raises(Conflict, match="plans the requests of main"):
        deployment_delete(name="planner", actor="ada", now=NOW)


def test_the_sum_and_its_parts_are_those_of_joined_samples(main: Deployment) -> None:
    change(**CHAIN)
    chained()
    sampled("main", 50.0, "d" * 32)
    sampled("planner", 30.0, "e" * 32)
    main.refresh_from_db()
    view = chain_view(main, clock.now())
    assert view.figures is not None
    assert view.figures.count == 3
    parts = {part.name: round(part.p50_ms) for part in view.figures.parts}
    assert parts == {"planner": 200, "application": 100, "deployment": 400, "sum": 700}
    assert round(sum(part.percent for part in view.figures.parts)) == 200, "the sum is all of its parts"
    assert view.burn is not None
    assert view.burn.rates[300] == 0.0
    planner = chain_view(Deployment.objects.get(name="planner"), clock.now())
    assert (planner.chain, planner.plans) == (None, ("main",))


@pytest.mark.slow
def test_the_page_and_the_api_show_the_sum(main: Deployment) -> None:
    change(**CHAIN)
    chained(first_ms=900.0)
    text = " ".join(fragment(signed_in(), "/deployments/main/", "deployment-chain").split())
    assert "3 sampled chains" in text
    assert "main-a" in text
    assert "a" * 32 in text
    assert "Plans the requests of" in fragment(signed_in(), "/deployments/planner/", "deployment-chain")
    answer = bearer().get("/api/v1/deployments/main/chain").json()
    assert (answer["planner"], answer["ttft_share"], answer["figures"]["count"]) == ("planner", 0.99, 3)
    assert answer["figures"]["late_percent"] == 100.0
    assert answer["figures"]["slowest"][0]["planner_request"].startswith("planner-")
    planner = bearer().get("/api/v1/deployments/planner/chain").json()
    assert (planner["planner"], planner["plans"], planner["figures"]) == (None, ["main"], None)
    assert bearer().get("/api/v1/deployments/nobody/chain").status_code == 404


@pytest.mark.slow
def test_the_page_of_a_trace_shows_its_chain_next_to_the_objective(main: Deployment) -> None:
    change(**CHAIN)
    chained(first_ms=900.0)
    sampled("planner", 10.0, "d" * 32)
    shown = " ".join(fragment(signed_in(), f"/requests/?trace={'a' * 32}", "requests-trace").split())
    assert "1 210 ms" in shown, "200 of the planner, 100 between, 910 to the first token"
    assert "late" in shown
    listed = fragment(signed_in(), f"/requests/?trace={'a' * 32}", "requests-table")
    assert ("main-a" in listed, "planner-a" in listed, "main-b" in listed) == (True, True, False)
    assert "late" not in fragment(signed_in(), f"/requests/?trace={'d' * 32}", "requests-trace")
    assert "Sampled" not in fragment(signed_in(), "/requests/", "requests-trace")
    found = bearer().get("/api/v1/requests", {"trace": "a" * 32}).json()["results"]
    assert {row["deployment"] for row in found} == {"main", "planner"}


@pytest.mark.slow
def test_a_chain_is_changed_by_operators_only(main: Deployment) -> None:
    body = {"chain": CHAIN}
    make_user("vic", Role.VIEWER)
    make_user("opal", Role.OPERATOR)
    viewer = bearer("vic")
    assert viewer.patch("/api/v1/deployments/main", body, format="json").status_code == 403
    assert viewer.get("/api/v1/deployments/main").json()["chain"] == {}
    changed = bearer("opal").patch("/api/v1/deployments/main", body, format="json")
    assert changed.json()["chain"] == CHAIN
    refused = bearer().patch("/api/v1/deployments/main", {"chain": {"planner": 1}}, format="json")
    assert refused.status_code == 400
    assert "chain.planner" in refused.text
