"""The list of rollouts, the page of one, and operators' actions."""

from datetime import timedelta

import msgspec
import pytest
from django.contrib.auth.models import User
from django.test import Client

from engine_agent.protocol.load_messages import Load
from fleet.cells.models import Cell, CellMember
from fleet.deployments.planner import GatePolicy
from fleet.load.planner import CellCounters
from fleet.nodes.models import NodeReport
from fleet.rollouts.models import Rollout
from fleet.rollouts.pages.data import gate_lines
from fleet.rollouts.services import rollout_propose, rollout_start
from kernel.events import event_record
from kernel.tones import Tone
from models_registry.versions.models import VersionState
from tests.controlplane.dashboard.clients import fragment, signed_in
from tests.fleet import rows
from tests.fleet.rows import NOW

pytestmark = [pytest.mark.django_db, pytest.mark.slow]


@pytest.fixture
def rollout() -> Rollout:
    rows.version("2", state=VersionState.RELEASED)
    rows.deployment(cells=2)
    rows.cell("a")
    proposal = rollout_propose(deployment="sim-70b", version="sim-70b@2", policy={})
    return rollout_start(proposal=proposal, actor="ada", now=NOW, why="faster")


def test_the_list_says_where_each_rollout_stands(rollout: Rollout) -> None:
    shown = fragment(signed_in(), "/rollouts/", "rollouts-table")
    for expected in ("sim-70b@1", "sim-70b@2", "us-east-1 canary", "running", "started by ada: faster"):
        assert expected in shown
    assert "No rollout matches" in fragment(signed_in(), "/rollouts/?state=succeeded", "rollouts-table")
    assert "sim-70b@2" in fragment(signed_in(), "/rollouts/?state=active&q=sim", "rollouts-table")


def test_a_rollout_shows_its_waves_its_gate_and_its_failures(rollout: Rollout) -> None:
    verdict = {"finding": "worse", "reason": "p95 is 2.00 times", "numbers": {"requests": 412.0}}
    failed = [{"cell": "a", "generation": 4, "reason": "killed"}]
    Rollout.objects.update(stage=4, verdict=verdict, failed=failed)
    shown = fragment(signed_in(), f"/rollouts/{rollout.pk}/", "rollout")
    for expected in (
        "us-east-1 100 %",
        "2 of 2 cells",
        "done",
        "p95 is 2.00 times",
        "412",
        "generation 4: killed",
        "0/1",
    ):
        assert expected in shown


def test_a_gate_shows_the_new_version_beside_the_old_one(rollout: Rollout) -> None:
    numbers = {"requests": 54, "control_requests": 1082, "time_between_tokens_p95_ms": 30.0}
    numbers |= {"time_between_tokens_p95_control_ms": 20.0}
    Rollout.objects.update(verdict={"finding": "worse", "reason": "slower", "numbers": numbers})
    shown = " ".join(fragment(signed_in(), f"/rollouts/{rollout.pk}/", "rollout").split())
    assert "Time between tokens, p95" in shown
    for expected in ("30.0 ms", "20.0 ms", "1.50", "54", "1 082"):
        assert f">{expected}</td>" in shown
    assert "Errors" not in shown


def test_a_gate_names_the_limit_and_the_samples_of_what_is_worse(rollout: Rollout) -> None:
    gate = GatePolicy(latency_ratio=1.25, error_ratio=2.0, significance=0.01, min_samples=50)
    key = "time_to_first_token"
    numbers: dict[str, float | None] = {"requests": 200, "errors": 10, "errors_chance": 0.0002}
    numbers |= {"control_requests": 400, "control_errors": 2}
    numbers |= {f"{key}_samples": 200, f"{key}_control_samples": 400}
    numbers |= {f"{key}_{each}_ms": 30.0 for each in ("median", "p95")}
    numbers |= {f"{key}_{each}_control_ms": 20.0 for each in ("median", "p95")}
    numbers |= {f"{key}_median_chance": 0.5, f"{key}_p95_chance": 0.001}
    lines = {line.name: line for line in gate_lines(numbers, gate)}
    assert [name for name, line in lines.items() if line.is_worse] == ["Failed requests", "Time to first token, p95"]
    assert lines["Failed requests"].ratio == pytest.approx(10.0)
    assert lines["Time to first token, median"].samples == (200.0, 400.0)
    assert lines["Requests"].limit == "at least 50 of each"


def test_a_bake_shows_what_the_gate_would_decide_now(rollout: Rollout) -> None:
    rows.cell("b", rows.node("n-b"), model_version=rollout.to_version)
    Cell.objects.update(state="ready")
    for name, node in (("a", "n-a"), ("b", "n-b")):
        if name == "a":
            CellMember.objects.create(cell_id="a", node=rows.node(node), rank=0)
        load = Load(requests_total=160 if name == "b" else 150, errors_total=60 if name == "b" else 0)
        NodeReport.objects.filter(node_id=node).update(generation=1, load=msgspec.to_builtins(load, str_keys=True))
    zero = msgspec.structs.asdict(CellCounters(generation=1))
    Rollout.objects.update(state="baking", counters=msgspec.to_builtins({"a": zero, "b": zero}))
    shown = " ".join(fragment(signed_in(), f"/rollouts/{rollout.pk}/", "rollout").split())
    assert "Gate, if the bake ended now" in shown
    assert "37.50 %" in shown
    assert "150" in shown
    Rollout.objects.update(state="running")
    assert "if the bake ended now" not in fragment(signed_in(), f"/rollouts/{rollout.pk}/", "rollout")


def test_the_headline_is_why_it_went_back(rollout: Rollout) -> None:
    Rollout.objects.update(state="rolled_back", cause="2 failures of updated cells", reason="every cell is at 1 again")
    for path, name in ((f"/rollouts/{rollout.pk}/", "rollout"), ("/rollouts/", "rollouts-table")):
        assert "2 failures of updated cells" in fragment(signed_in(), path, name)


def test_a_version_that_went_back_leaves_no_wave_done(rollout: Rollout) -> None:
    assert "pending" in fragment(signed_in(), f"/rollouts/{rollout.pk}/", "rollout")
    Rollout.objects.update(stage=4, state="rolled_back", ended_at=NOW)
    shown = fragment(signed_in(), f"/rollouts/{rollout.pk}/", "rollout")
    assert "rolled back" in shown
    assert "ended before its first gate" in shown
    assert "pending" not in shown
    assert ">done" not in shown


def test_only_what_happened_in_its_time_is_shown(rollout: Rollout) -> None:
    for at in (-1, 1):
        moment = rollout.created_at + timedelta(seconds=at)
        event_record(kind="cell.ready", message=f"at {at}", tone=Tone.OK, now=moment, deployment="sim-70b")
    shown = fragment(signed_in(), f"/rollouts/{rollout.pk}/", "rollout-events")
    assert "at 1" in shown
    assert "at -1" not in shown


def test_only_actions_that_fit_the_state_are_offered(rollout: Rollout) -> None:
    shown = fragment(signed_in(), f"/rollouts/{rollout.pk}/", "rollout")
    assert "ask/pause/" in shown
    assert "ask/resume/" not in shown
    Rollout.objects.update(state="succeeded")
    assert "Not for a rollout that is succeeded." in fragment(signed_in(), f"/rollouts/{rollout.pk}/", "rollout")


def test_an_action_leads_back_to_the_page(rollout: Rollout) -> None:
    response = signed_in().post(f"/rollouts/{rollout.pk}/ask/pause/", {"why": "lunch"})
    assert (response.status_code, response.headers["Location"]) == (302, f"/rollouts/{rollout.pk}/")
    rollout.refresh_from_db()
    assert (rollout.state, rollout.reason) == ("paused", "pause requested by operator: lunch")


def test_a_refusal_says_why(rollout: Rollout) -> None:
    response = signed_in().post(f"/rollouts/{rollout.pk}/ask/resume/")
    assert response.status_code == 409
    assert "resume needs one that is paused" in response.text


def test_only_signed_in_users_may_act_and_only_by_a_form(rollout: Rollout) -> None:
    path = f"/rollouts/{rollout.pk}/ask/pause/"
    assert Client().post(path).headers["Location"].startswith("/login/")
    assert signed_in().get(path).status_code == 200
    careful = Client(enforce_csrf_checks=True)
    careful.force_login(User.objects.get(username="operator"))
    assert careful.post(path).status_code == 403
    rollout.refresh_from_db()
    assert rollout.state == "running"


@pytest.mark.parametrize("path", ["/rollouts/0/", "/rollouts/x/", "/rollouts/99999999999999/"])
def test_an_unknown_rollout_is_not_found(path: str) -> None:
    assert signed_in().get(path).status_code == 404


def test_an_unknown_action_is_not_found(rollout: Rollout) -> None:
    assert signed_in().post(f"/rollouts/{rollout.pk}/ask/explode/").status_code == 404
