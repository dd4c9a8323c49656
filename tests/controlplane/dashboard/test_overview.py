"""The overview, in this order: what is broken, what is moving, are users fine, every cell."""

import pytest

from controlplane.dashboard.overview import fleet_map
from fleet.deployments.models import DeploymentRegion
from fleet.deployments.pages.data import deployments_placed
from fleet.faults.models import Incident
from fleet.nodes.models import NodeReport
from fleet.nodes.pages import nodes_by_urgency
from kernel import clock
from tests.controlplane.dashboard.clients import fragment, signed_in
from tests.controlplane.dashboard.fleets import LOAD, one_more_of_everything
from tests.fleet import rows
from tests.fleet.rows import NOW

pytestmark = pytest.mark.django_db


def part(name: str) -> str:
    return " ".join(fragment(signed_in(), "/", name).split())


def test_a_healthy_fleet_says_so_in_one_sentence() -> None:
    rows.cell("sim-70b-us-east-1-1", rows.node("n-00000001"))
    assert "Nothing is broken. 1 of 1 cells ready on 1 node." in part("broken")
    assert "Nothing is moving." in part("moving")
    assert "<title>Overview · Switchyard</title>" in signed_in().get("/").text


def test_an_open_incident_is_named_and_counted_in_the_title() -> None:
    rows.cell("sim-70b-us-east-1-1", rows.node("n-00000001"), state="failed")
    Incident.objects.create(
        kind="node-lost", subject="n", summary="Node n is lost", cell="sim-70b-us-east-1-1", opened_at=NOW
    )
    assert "Node n is lost" in part("broken")
    assert "is failed" not in part("broken"), "the incident explains the cell already"
    assert "<title>✕ 1 · Overview · Switchyard</title>" in signed_in().get("/").text
    assert 'data-problems="1"' in part("navigation")


def test_a_broken_cell_without_an_incident_is_a_problem_too() -> None:
    rows.cell("sim-70b-us-east-1-1", rows.node("n-00000001"), state="lost", reason="both nodes are silent")
    assert "both nodes are silent" in part("broken")
    assert 'data-problems="1"' in part("navigation")


@pytest.mark.parametrize("state", ["pending", "starting", "draining"])
def test_a_cell_on_its_way_is_moving_with_its_reason(state: str) -> None:
    rows.cell("sim-70b-us-east-1-1", rows.node("n-00000001"), state=state, reason="weights are loading")
    text = part("moving")
    assert state in text
    assert "weights are loading" in text


@pytest.mark.parametrize("state", ["joining", "suspect"])
def test_a_node_on_its_way_is_moving(state: str) -> None:
    rows.node("n-00000001", state=state)
    assert state in part("moving")


def test_users_see_the_sum_of_what_the_leaders_report() -> None:
    for number in (1, 2):
        node = rows.node(f"n-0000000{number}", report={"load": LOAD, "last_seen_at": clock.now()})
        rows.cell(f"sim-70b-us-east-1-{number}", node)
    text = part("users")
    assert '<td class="wide number">14</td>' in text
    assert '<td class="wide number">863</td>' in text
    assert '<td class="number">410 ms</td>' in text


def test_a_leader_that_went_silent_is_left_out_and_mentioned() -> None:
    rows.cell("sim-70b-us-east-1-1", rows.node("n-00000001", report={"load": LOAD, "last_seen_at": NOW}))
    NodeReport.objects.update(last_seen_at=NOW.replace(year=2020))
    assert "1 ready cell of sim-70b reported no load in the last 15 s" in part("users")


def test_the_map_has_one_square_per_cell_and_one_per_missing_cell() -> None:
    rows.cell("sim-70b-us-east-1-1", rows.node("n-00000001"))
    rows.cell("sim-70b-us-east-1-2", rows.node("n-00000002"), state="failed")
    DeploymentRegion.objects.update(cells=4)
    text = part("map")
    assert 'class="square tone-ok" href="/cells/sim-70b-us-east-1-1/"' in text
    assert 'class="square tone-bad" href="/cells/sim-70b-us-east-1-2/"' in text
    assert text.count("wanted, not placed yet</span>") == 2
    assert "1/4" in text


def test_nodes_stand_by_region_with_role_state_and_cell() -> None:
    one_more_of_everything(0)
    text = part("nodes")
    for word in ("region-0", "leader", "follower", "spare", "cordoned", "joining", "deployment-0-region-0-1"):
        assert word in text


def test_a_stopped_cell_and_a_retired_node_are_history() -> None:
    rows.cell("sim-70b-us-east-1-1", state="stopped")
    rows.node("n-00000001", state="retired")
    assert "sim-70b-us-east-1-1" not in part("map")
    assert "n-00000001" not in part("nodes")


def test_an_incident_of_a_shadow_rule_is_no_problem() -> None:
    Incident.objects.create(kind="node-slow", subject="n", summary="would have", shadow=True, opened_at=NOW)
    assert "would have" not in part("broken")
    assert "Nothing is broken" in part("broken")


def test_a_large_fleet_is_bars_of_its_states(monkeypatch: pytest.MonkeyPatch) -> None:
    for number, state in enumerate(("ready", "ready", "failed")):
        rows.cell(f"sim-70b-us-east-1-{number}", state=state)
    DeploymentRegion.objects.update(cells=4)
    (region,) = fleet_map(deployments_placed(), squares=2)
    (line,) = region.lines
    assert [(each.state, each.cells, each.start, each.width) for each in line.segments] == [
        ("ready", 2, 0.0, 50.0),
        ("failed", 1, 50.0, 25.0),
    ]
    monkeypatch.setattr("controlplane.dashboard.overview.fleet_map", lambda _: (region,))
    text = part("map")
    assert '<rect class="tone-bad" x="50.0" width="25.0" height="8"></rect>' in text
    assert "1 failed" in text
    assert "2/4" in text


def test_nodes_that_need_attention_come_first() -> None:
    for number, state in enumerate(("ready", "ready", "faulty")):
        rows.node(f"n-0000000{number}", state=state)
    found = nodes_by_urgency(now=NOW, limit=2)
    assert {row.node.pk for row in found.rows} == {"n-00000000", "n-00000002"}
    assert found.more
