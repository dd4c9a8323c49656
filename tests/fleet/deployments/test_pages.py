"""The page of a deployment: error budget, load, and scaling after a forecast."""

import re
from datetime import timedelta

import pytest

from fleet.autoscaling.models import RoleState, ScalingDecision, ScalingState
from fleet.autoscaling.planning.role_split import RoleSplit
from fleet.autoscaling.services import autoscaling_pause
from fleet.cells.models import Cell
from fleet.deployments.models import Deployment, DeploymentRegion
from fleet.load.services import load_sample
from fleet.nodes.models import NodeReport
from fleet.quotas.services import quota_set
from kernel import clock
from models_registry.versions.models import ModelVersion
from tests.controlplane.dashboard.clients import fragment, signed_in
from tests.controlplane.dashboard.fleets import LOAD
from tests.fleet import rows
from tests.traffic.rows import MADE, demand_days, forecast_row
from traffic.demand.models import DemandForecast, ForecastRecord

pytestmark = [pytest.mark.django_db, pytest.mark.slow]

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
    assert part("deployment-slo").count("no requests") == 2


def test_the_objective_stands_beside_its_chart() -> None:
    failing()
    assert "objective 2 000" in part("deployment-load")


def test_roles_are_offered_where_cells_are_of_one_type() -> None:
    assert "REGION=1p+3d" in part("deployment-roles")
    kinds = Deployment.objects.get().instance_types
    Deployment.objects.update(instance_types=[*kinds, "trn1.32xlarge"])
    text = part("deployment-roles")
    assert "REGION=1p+3d" not in text
    assert "Cells by role need a single instance type" in text


def test_the_overview_says_what_users_get() -> None:
    failing()
    text = part("numbers", "/")
    assert "<dd>20 %<svg" in text.replace("\u202f", " ")


def test_the_page_says_why_machines_do_not_arrive() -> None:
    why = "the last launch did not start: TaskFailedToStart: <CannotPullContainerError>"
    for name in ("n-00000003", "n-00000004"):
        rows.node(name, state="joining", reason=f"it waits for its machine: {why}; next try at 12:00:{name[-1]}0 UTC")
    rows.node("n-00000005", state="lost", reason="its task ended before it joined: x")
    NodeReport.objects.filter(node_id="n-00000005").delete()
    text = part("deployment")
    kind = Deployment.objects.get().instance_types[0]
    assert f"2 nodes of {kind} in us-east-1: the last launch did not start: TaskFailedToStart: &lt;Cannot" in text
    assert f"1 node of {kind} in us-east-1: its task ended before it joined: x" in text
    assert "next try" not in text


def test_the_effect_of_scaling_is_shown_first() -> None:
    text = " ".join(signed_in().get(SCALE, {"cells-us-east-1": "0"}).text.split())
    assert re.search(r"1 ready now, at least 0 on the way \([\d.]+ \w+ from now\), 0 at the end", text)
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


def test_a_range_is_set_where_a_number_was_and_a_number_ends_it() -> None:
    assert signed_in().post(SCALE, {"cells-us-east-1": "2 - 8", "confirm": "sim-70b"}).headers["Location"] == URL
    row = DeploymentRegion.objects.get()
    assert (row.cells, str(row.range)) == (2, "2 to 8")
    assert 'value="2-8"' in signed_in().get(SCALE).text
    assert signed_in().post(SCALE, {"cells-us-east-1": "2", "confirm": "sim-70b"}).headers["Location"] == URL
    assert DeploymentRegion.objects.get().range is None


@pytest.mark.parametrize(("text", "why"), [("0-0", "0 to 0"), ("4-2", "4 to 2"), ("2-", "such as 2-8")])
def test_an_impossible_range_is_named(text: str, why: str) -> None:
    response = signed_in().get(SCALE, {"cells-us-east-1": text})
    assert response.status_code == 409
    assert why in response.text


def test_without_a_range_the_page_says_how_there_would_be_one() -> None:
    assert 'href="/deployments/sim-70b/autoscaling/"' in part("deployment-autoscaling")


def test_what_is_wanted_stands_beside_the_range_with_its_reason_and_what_became_of_it() -> None:
    DeploymentRegion.objects.update(cells=2, cells_min=2, cells_max=8)
    assert "Not evaluated yet" in part("deployment-autoscaling")
    load = {"in_flight": 12.0, "queued": 4.0, "per_cell": 10.0}
    ScalingState.objects.create(
        place=DeploymentRegion.objects.get(),
        wanted=3,
        rule="utilisation",
        reason="16.0 requests at once take 3 cells",
        acting=False,
        load=load,
        looked_at=clock.now(),
    )
    ScalingDecision.objects.create(
        deployment_id="sim-70b",
        region_id="us-east-1",
        at=clock.now(),
        was=2,
        wanted=3,
        acted=False,
        rule="queue",
        reason="many wait",
        observed_s=7200.0,
        too_few_cell_s=5400.0,
    )
    text = part("deployment-autoscaling").replace("\u202f", " ")
    for shown in (
        "2\u20138",
        "16.0 requests at once take 3 cells",
        "80 %",
        "2 → 3 (shadow)",
        "90 min of cells too few, 0 s too many",
    ):
        assert shown in text
    assert "Shadow: decisions are recorded and not applied" in text
    autoscaling_pause(actor="ada", now=clock.now(), why="a load test")
    assert "a load test" in part("deployment-autoscaling")


def test_a_stored_policy_that_cannot_be_read_is_said_so() -> None:
    DeploymentRegion.objects.update(cells=2, cells_min=2, cells_max=8)
    Deployment.objects.update(scaling={"mode": 3})
    assert "its policy cannot be read: mode is 3" in part("deployment-autoscaling")


def test_a_share_of_machines_says_how_to_state_one() -> None:
    text = part("deployment-shares")
    assert "Priority 6, from its serving class" in text
    assert "switchyard quota assign sim-70b --team TEAM --priority 7" in text


def test_what_is_withheld_is_shown_with_its_reason() -> None:
    Deployment.objects.update(team="search", priority=3, preemptible=True, preempts="need")
    DeploymentRegion.objects.update(
        cells=4, cells_granted=3, granted_at=clock.now(), grant_rule="priority", grant_reason="chat goes before"
    )
    text = part("deployment-shares")
    for expected in ("Priority 3; team search", "All of its cells may be preempted", "chat goes before"):
        assert expected in text, expected


def test_quotas_show_who_has_and_borrows_what() -> None:
    assert 'href="/new/quota/"' in part("quotas", "/deployments/")
    Deployment.objects.update(team="search")
    quota_set(team="search", instance_type=rows.KIND, machines=1, actor="ada", now=clock.now())
    text = part("quotas", "/deployments/")
    for expected in ("search", rows.KIND, "borrows", "sim-70b"):
        assert expected in text, expected


def test_without_a_forecast_the_page_says_what_makes_one() -> None:
    assert "switchyard chat sim-70b" in part("deployment-forecast")


def test_what_is_expected_stands_beside_what_was_with_its_errors() -> None:
    demand_days(1)
    one = forecast_row()
    scores = {"blend": [{"count": 40, "wape": 0.104, "held": 0.92, "factors": [1.2, 1.4]}]}
    DemandForecast.objects.update(ledger={"chosen": ["blend"], "scores": scores})
    said = {"blend": [21.0] * 8}
    ForecastRecord.objects.create(series=one, made_at=MADE - timedelta(hours=2), p50=said, p90=said)

    text = part("deployment-forecast").replace("\u202f", " ")

    for shown in ("From us-east-1, realtime", "p50, an hour before", "21.0", "20.0", "36.0", "92 %"):
        assert shown in text
    assert "the autoscaler ignores it" in text


def test_cells_by_role_are_set_and_shown_with_their_pairs() -> None:
    assert "switchyard scale sim-70b REGION=1p+3d" in part("deployment-roles")
    ModelVersion.objects.update(parallelism={"local.cpu": {"nodes": 1}})
    response = signed_in().post(SCALE, {"cells-us-east-1": "1p + 3d", "confirm": "sim-70b"})
    assert response.headers["Location"] == URL
    assert DeploymentRegion.objects.get().split == RoleSplit(prefill=1, decode=3)
    assert 'value="1p+3d"' in signed_in().get(SCALE).text

    load = {"handovers": {"handovers_total": 5, "alone": {"short": 7}, "fallbacks": {"unreachable": 2}}}
    rows.cell("prefill-1", rows.node("n-p"), role="prefill")
    rows.cell("decode-1", rows.node("n-d"), role="decode")
    NodeReport.objects.filter(node="n-d").update(load=load, last_seen_at=clock.now())
    text = " ".join(part("deployment-roles").split())
    for shown in ("1/1", "1/3", "prefill-1", "2 requests", "unreachable", "7 requests", "And 5 handed over"):
        assert shown in text

    Cell.objects.filter(pk="prefill-1").update(state="failed")
    assert "no prefill cell with its layout is serving" in part("deployment-roles")


def test_planned_roles_stand_with_their_reason() -> None:
    ModelVersion.objects.update(parallelism={"local.cpu": {"nodes": 1}})
    Deployment.objects.update(scaling={"roles": "planned"})
    assert "Not evaluated yet" in part("deployment-roles")
    RoleState.objects.create(
        place=DeploymentRegion.objects.get(),
        mixed=0,
        prefill=3,
        decode=1,
        carries=5.0,
        mixed_carries=0.9,
        from_tokens=128,
        rule="demand",
        reason="2.60 requests a second take 3 prefill",
        acting=False,
        looked_at=clock.now(),
    )
    text = part("deployment-roles")
    assert "Shadow, would have 3 prefill, 1 decode: 2.60 requests a second take 3 prefill" in text
    assert "Prompts of 128 uncached tokens or more are handed over" in text
