"""The overview, in this order: state, numbers, every cell, what waits for a person, what is under way."""

from datetime import timedelta

import pytest
from django.test import Client

from accounts.models import Approval
from controlplane.dashboard.templatetags.switchyard import sparkline
from controlplane.dashboard.yard_map import Shade, YardMap, yard_cells, yard_map
from fleet.agents.models import ApplicationCertificate
from fleet.autoscaling.models import ScalingSwitch
from fleet.deployments.models import DeploymentRegion
from fleet.deployments.pages.data import deployments_placed
from fleet.faults.models import Incident
from fleet.load.models import LoadSubject, LoadWindow, NodeWindow
from fleet.machines.models import ProviderCall
from fleet.nodes.models import NodeReport
from fleet.regions.models import Rate
from fleet.releases.models import AgentMove, AgentRelease, AgentRollout
from fleet.rollouts.models import Rollout
from kernel import clock
from kernel.loop_passes import loop_passed
from kernel.models import LoopPass
from models_registry.imports.models import ModelImport
from tests.controlplane.access.callers import make_user
from tests.controlplane.api.client import bearer
from tests.controlplane.dashboard.clients import fragment, signed_in
from tests.controlplane.dashboard.fleets import LOAD, one_more_of_everything
from tests.fleet import rows
from tests.fleet.rows import NOW
from traffic.region_shares.models import TrafficMatrix, TrafficOverride, TrafficShift
from traffic.usage.models import Budget

pytestmark = pytest.mark.django_db

HOUR = timedelta(hours=1)


def part(name: str, url: str = "/") -> str:
    return " ".join(fragment(signed_in(), url, name).split())


def window(subject: str, **columns: float) -> None:
    row, _ = LoadSubject.objects.get_or_create(name=subject, defaults={"seen_at": NOW})
    counts = {"requests": 0, "errors": 0, "slow": 0, "cells": 1, "in_flight": 0, "queued": 0, "tokens_per_s": 0}
    at = clock.now() - timedelta(seconds=20)
    LoadWindow.objects.create(subject=row, step_s=15, at=at, covered_s=15, **{**counts, **columns})


def the_map(shade: str = "", *, tiles: int = 500) -> YardMap:
    return yard_map(deployments_placed(), yard_cells(clock.now()), shade, clock.now(), tiles=tiles)


def test_a_healthy_fleet_says_so_in_one_sentence() -> None:
    LoopPass.objects.all().delete()
    loop_passed("fleet.reconcile")
    rows.cell("sim-70b-us-east-1-1", rows.node("n-00000001"))
    assert "Nothing is broken. 1 of 1 cells ready on 1 node." in part("status")
    assert "Nothing is moving." in part("moving")
    assert "Nothing waits for a person." in part("waiting")
    assert "<title>Overview · Switchyard</title>" in signed_in().get("/").text


def test_without_fresh_passes_nothing_is_called_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    rows.cell("sim-70b-us-east-1-1", rows.node("n-00000001"))
    LoopPass.objects.all().delete()
    assert "No planner has reported a pass" in part("status")
    monkeypatch.setattr("kernel.loop_passes._AGES", "SELECT 'fleet.reconcile', 47.0::float8, 0.0, 0.0")
    text = part("status")
    assert "the control plane is behind: last pass 47 s ago" in text
    assert "Nothing is broken" not in text


def test_an_open_incident_is_named_and_counted_in_the_title() -> None:
    rows.cell("sim-70b-us-east-1-1", rows.node("n-00000001"), state="failed")
    row = Incident.objects.create(
        kind="node-lost", subject="n", summary="Node n is lost", cell="sim-70b-us-east-1-1", opened_at=clock.now()
    )
    text = part("status")
    assert f'href="/incidents/{row.pk}/">Node n is lost' in text
    assert "1 problem." in text
    assert "1 incident in the last hour" in text
    assert "is failed" not in text, "the incident explains the cell already"
    assert "<title>✕ 1 · Overview · Switchyard</title>" in signed_in().get("/").text
    assert 'data-problems="1"' in part("navigation")


def test_a_broken_cell_without_an_incident_is_a_problem_too() -> None:
    rows.cell("sim-70b-us-east-1-1", rows.node("n-00000001"), state="lost", reason="both nodes are silent")
    assert "both nodes are silent" in part("status")
    assert 'data-problems="1"' in part("navigation")


def test_an_incident_of_a_shadow_rule_is_no_problem() -> None:
    LoopPass.objects.all().delete()
    loop_passed("fleet.reconcile")
    Incident.objects.create(kind="node-slow", subject="n", summary="would have", shadow=True, opened_at=NOW)
    assert "would have" not in part("status")
    assert "Nothing is broken" in part("status")


def test_six_numbers_with_their_last_hour() -> None:
    node = rows.node("n-00000001")
    rows.cell("sim-70b-us-east-1-1", node, model_version=rows.version("2", max_concurrency=10))
    Rate.objects.create(kind="machine_price", subject=rows.KIND, value=3, valid_from=NOW, actor="a", created_at=NOW)
    window("fleet", requests=30, errors=3, in_flight=4, tokens_per_s=431, ttft_p50_ms=80, ttft_p99_ms=410)
    text = part("numbers")
    for shown in ("2.0", "10 %", "80 ms, 410 ms", "431", "40 %", "$3.00"):
        assert f"<dd>{shown}<svg" in text, shown
    assert text.count('<svg class="spark"') == 6
    assert "No load was collected" not in text
    assert 'aria-label="Tokens/s in the last hour: 431 to 431"' in text


def test_an_unknown_price_is_named_and_is_not_zero() -> None:
    rows.node("n-00000001")
    text = part("numbers")
    assert "No price is known for local.cpu." in text
    assert "No load was collected in the last minute." in text
    assert "$0" not in text


def test_a_sparkline_has_gaps_and_a_range() -> None:
    line = sparkline([1.0, None, 3.0, 2.0], "Errors <b>")
    assert line.count("M") == 2
    assert "Errors &lt;b&gt; in the last hour: 1.00 to 3.00" in line
    assert sparkline([None], "Errors") == ""
    assert len(sparkline([float(n) for n in range(240)], "Errors").split("L")) == 60


@pytest.mark.parametrize("state", ["pending", "starting", "draining"])
def test_a_cell_on_its_way_is_moving_with_its_reason(state: str) -> None:
    rows.cell("sim-70b-us-east-1-1", rows.node("n-00000001"), state=state, reason="weights are loading")
    text = part("moving")
    assert state in text
    assert "weights are loading" in text
    assert 'href="/cells/sim-70b-us-east-1-1/"' in text


def test_several_cells_of_a_place_are_one_row() -> None:
    for number in range(3):
        rows.cell(f"sim-70b-us-east-1-{number}", state="starting" if number else "pending")
    text = part("moving")
    assert text.count('<li class="row"') == 1
    assert "1 pending, 2 starting" in text
    assert "1 in progress" in part("status")


@pytest.mark.parametrize("state", ["joining", "suspect"])
def test_a_node_on_its_way_is_moving(state: str) -> None:
    rows.node("n-00000001", state=state)
    assert state in part("moving")


def test_an_evacuation_moves_until_it_ends() -> None:
    rows.cell("sim-70b-us-east-1-1", rows.node("n-00000001"))
    TrafficMatrix.objects.create(
        deployment_id="sim-70b",
        shares={"us-east-1": {"us-east-1": 0.25, "us-west-2": 0.75}},
        figures={"regions": {"us-east-1": {"demand": 8.0}}},
    )
    now = clock.now()
    order = TrafficOverride.objects.create(
        kind="evacuation", mode="real", region_id="us-east-1", why="storm", actor="ada", created_at=now,
        expires_at=now + timedelta(hours=1),
    )  # fmt: skip
    text = part("moving")
    assert "Nothing is moving" not in text
    assert "75 % of its requests are served elsewhere" in text
    assert "storm" in text
    TrafficOverride.objects.filter(pk=order.pk).update(ended_at=now)
    TrafficShift.objects.create(
        deployment_id="sim-70b", revision=1, kind="return", shares={}, moved=0.1, reason="it is back", at=now
    )
    text = part("moving")
    assert "Return of requests" in text
    TrafficShift.objects.update(at=now - timedelta(minutes=2))
    assert "Nothing is moving" in part("moving")


def test_a_paused_rollout_waits_for_a_person_and_a_running_one_moves() -> None:
    cell = rows.cell("sim-70b-us-east-1-1", rows.node("n-00000001"))
    row = Rollout.objects.create(
        deployment=cell.deployment, from_version=rows.version(), to_version=rows.version("2"), reason="too few",
        region_order=["us-east-1"], policy={}, actor="ada", created_at=NOW, state_since=NOW, state="paused",
    )  # fmt: skip
    assert "Paused rollout" in part("waiting")
    assert "too few" in part("waiting")
    assert "Nothing is moving" in part("moving")
    Rollout.objects.filter(pk=row.pk).update(state="running")
    assert "Nothing waits" in part("waiting")
    assert "sim-70b to sim-70b@2" in part("moving")
    assert "0 of 1 cells" in part("moving")


@pytest.mark.slow
def test_every_kind_of_operation_is_a_row() -> None:
    one_more_of_everything(1)
    ProviderCall.objects.create(
        node=rows.node("n-00000009"), action="reboot", reason="it hangs", requested_at=NOW, due_at=NOW
    )
    rows.machine("m-1", layout_changes=True, next_layout="4x2")
    rows.machine("m-2", state="wiping")
    rows.machine("m-3", state="joining")
    rows.machine("m-4", state="taken", leaving=True)
    target = AgentRelease.objects.create(id="b" * 16, version="2", protocol=2, created_at=NOW)
    upgrade = AgentRollout.objects.create(
        source=AgentRelease.objects.get(version="0.1.0"), target=target, state="running", rings=3, soak_s=5,
        actor="ada", created_at=NOW, ring_since=NOW,
    )  # fmt: skip
    AgentMove.objects.create(agent="n-1", rollout=upgrade, release=target.id, settled_at=NOW)
    AgentMove.objects.create(agent="n-2", rollout=upgrade, release=target.id)
    text = part("moving")
    for kind, shown in (
        ("Evacuation drill", "region-1 of all deployments"),
        ("Rollout", "deployment-1 to model-1@1"),
        ("Start", "deployment-1-region-1-1"),
        ("Launch", "n-000001bb"),
        ("Reboot", "it hangs"),
        ("Re-slicing", "its layout becomes 4x2"),
        ("Wipe", "m-2"),
        ("Join", "enrolled, not connected yet"),
        ("Removal", "its nodes leave first"),
        ("Change of image", "0 nodes are ready on it"),
        ("Upgrade of agents", "ring 1 of 3: 1 of 2 agents are healthy"),
        ("Import", "hf://org/model-1@main"),
    ):
        assert f"<span>{kind}</span>" in text, kind
        assert shown in text, shown
    assert "12 in progress" in part("status")
    served = bearer().get("/api/v1/operations").json()["in_progress"]
    assert [row["kind"] for row in served][:2] == ["Evacuation drill", "Rollout"]
    assert (len(served), round(served[0]["percent"])) == (12, 30)


def test_everything_that_waits_for_a_person_is_a_row() -> None:
    now = clock.now()
    Approval.objects.create(
        action="x",
        summary="Evacuate a region",
        requested_by="bob",
        requested_at=now,
        expires_at=now + timedelta(hours=1),
    )
    ScalingSwitch.objects.create(paused=True, why="a test of load", actor="ada", changed_at=now)
    Incident.objects.create(
        kind="node-slow", subject="n", summary="Node n is slow", opened_at=now, evidence={"waits": "no spare is left"}
    )
    one_more_of_everything(0)
    ApplicationCertificate.objects.update(not_after=now + timedelta(days=3))
    Budget.objects.filter(tenant="tenant-0").update(month=now.date().replace(day=1), level=80)
    rows.machine("m-1", broken={"nvidia 3": "XID 79"})
    failed = ModelImport.objects.create(
        source="hf://org/gone@main", state="failed", reason="404", actor="a", created_at=now, due_at=now, ended_at=now
    )
    text = part("waiting")
    for kind, shown in (
        ("Approval", "Evacuate a region"),
        ("Autoscaler", "a test of load"),
        ("Incident", "no spare is left"),
        ("Certificate", "certificate-0"),
        ("Budget", "80 % are used"),
        ("Repair", "XID 79"),
        ("Failed import", f'href="/imports/{failed.pk}/"'),
    ):
        assert f"<span>{kind}</span>" in text, kind
        assert shown in text, shown
    ModelImport.objects.create(source=failed.source, actor="a", created_at=now, due_at=now)
    assert "Failed import" not in part("waiting"), "a later import of the same source replaces it"


def test_a_viewer_sees_no_certificates() -> None:
    one_more_of_everything(0)
    ApplicationCertificate.objects.update(not_after=NOW)
    client = Client()
    client.force_login(make_user("viewer"))
    assert "certificate-0" not in fragment(client, "/", "waiting")
    assert "certificate-0" in part("waiting")


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


def test_the_map_has_one_tile_per_cell_and_one_per_missing_cell() -> None:
    rows.cell("sim-70b-us-east-1-1", rows.node("n-00000001"))
    rows.cell("sim-70b-us-east-1-2", rows.node("n-00000002"), state="failed")
    DeploymentRegion.objects.update(cells=4)
    text = part("map")
    assert 'class="square tile tone-ok level-0" href="/cells/sim-70b-us-east-1-1/"' in text
    assert 'class="square tile tone-bad level-0" href="/cells/sim-70b-us-east-1-2/"' in text
    assert text.count("wanted, not placed yet</span>") == 2
    assert "1/4" in text


def test_a_tile_is_as_full_as_its_cell_against_tested_capacity() -> None:
    for number, in_flight in ((1, 3.0), (2, 12.0)):
        name = f"sim-70b-us-east-1-{number}"
        rows.cell(name, rows.node(f"n-0000000{number}"), model_version=rows.version("2", max_concurrency=10))
        window(f"cell:{name}", in_flight=in_flight, ttft_p95_ms=100 * number)
    text = part("map")
    assert 'class="square tile tone-ok level-3" href="/cells/sim-70b-us-east-1-1/"' in text
    assert 'class="square tile tone-warn level-10" href="/cells/sim-70b-us-east-1-2/"' in text, "above its capacity"
    (line,) = the_map().regions[0].lines
    assert (line.text, line.worst and line.worst.cell.id) == ("120\u202f%", "sim-70b-us-east-1-2")


@pytest.mark.parametrize(
    ("shade", "label", "text"),
    [
        ("ttft", "TTFT", "200 ms"),
        ("kv", "KV cache", "62 %"),
        ("version", "Version", "sim-70b@2"),
        ("temperature", "Temperature", "71 °C"),
        ("cost", "Cost", "$6.00/h"),
    ],
)
def test_the_url_chooses_the_figure(shade: str, label: str, text: str) -> None:
    name = "sim-70b-us-east-1-1"
    rows.cell(name, rows.node("n-00000001"), model_version=rows.version("2", max_concurrency=10))
    window(f"cell:{name}", in_flight=3, ttft_p95_ms=200, kv_percent=62)
    heated = LoadSubject.objects.create(name="node:n-00000001", seen_at=NOW)
    NodeWindow.objects.create(subject=heated, step_s=60, at=clock.now() - timedelta(seconds=90), temperature_c=71.4)
    Rate.objects.create(kind="machine_price", subject=rows.KIND, value=3, valid_from=NOW, actor="a", created_at=NOW)
    shown = part("map", f"/?map={shade}")
    assert f'aria-label="{name} ready, {text}"' in shown
    assert f'aria-current="true">{label}</a>' in shown


def test_an_unknown_figure_is_the_load() -> None:
    assert the_map("<script>").shade is Shade.LOAD


def test_a_stopped_cell_is_history() -> None:
    rows.cell("sim-70b-us-east-1-1", state="stopped")
    assert "sim-70b-us-east-1-1" not in part("map")


def test_a_large_fleet_is_bars_of_its_fills(monkeypatch: pytest.MonkeyPatch) -> None:
    for number, state in enumerate(("ready", "ready", "failed")):
        rows.cell(f"sim-70b-us-east-1-{number}", state=state)
    DeploymentRegion.objects.update(cells=4)
    (line,) = the_map(tiles=2).regions[0].lines
    assert [(each.tone, each.level, each.start, each.width) for each in line.segments] == [
        ("ok", 0, 0.0, 50.0),
        ("bad", 0, 50.0, 25.0),
    ]
    monkeypatch.setattr("controlplane.dashboard.yard_map.TILES", 2)
    text = part("map")
    assert '<rect class="tone-bad level-0" x="50.0" width="25.0" height="8"></rect>' in text
    assert "1 failed" in text
    assert "2/4" in text
