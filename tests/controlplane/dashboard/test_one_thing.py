"""The pages about one cell, node or deployment."""

import re

import pytest

from fleet.cells.models import CellMember
from fleet.deployments.models import DeploymentRegion
from fleet.faults.models import Incident, Replacement
from kernel import clock
from tests.controlplane.dashboard.clients import fragment, signed_in
from tests.controlplane.dashboard.fleets import LOAD, one_more_of_everything
from tests.fleet import rows

pytestmark = [pytest.mark.django_db, pytest.mark.slow]

CELL = "sim-70b-us-east-1-1"


def part(url: str, name: str) -> str:
    return " ".join(fragment(signed_in(), url, name).split())


def test_a_cell_shows_its_members_in_rank_order_with_their_distance() -> None:
    leader = rows.node("n-000000ff", topology=["east", "spine-1", "rack-1"])
    rows.cell(CELL, leader, rows.node("n-00000001", topology=["east", "spine-1", "rack-2"]))
    text = part(f"/cells/{CELL}/", "cell")
    assert text.index("n-000000ff") < text.index("1 level apart") < text.index("n-00000001")


def test_a_cell_shows_its_load_and_version() -> None:
    rows.cell(CELL, rows.node("n-00000001", report={"load": LOAD, "last_seen_at": clock.now()}))
    text = part(f"/cells/{CELL}/", "cell")
    for word in ("<dd>7</dd>", "<dd>432</dd>", "410 ms", "sim-70b@1"):
        assert word in text


def test_a_ready_cell_without_fresh_load_says_so() -> None:
    rows.cell(CELL, rows.node("n-00000001"))
    assert "has not reported on this generation" in part(f"/cells/{CELL}/", "cell")


def test_members_with_different_stacks_are_bad() -> None:
    same, other = {"sim.engine": "sim 1", "driver": "1"}, {"sim.engine": "sim 1", "driver": "2"}
    rows.cell(CELL, rows.node("n-00000001", fingerprint=same), rows.node("n-00000002", fingerprint=other))
    text = part(f"/cells/{CELL}/", "cell-stack")
    assert text.count("same</span>") == 1
    assert text.count("differs</span>") == 2
    assert "rank 1 (n-00000002) differs from rank 0 (n-00000001): driver is 2 instead of 1" in text
    assert text.index(">driver<") < text.index(">engine<")


def test_members_with_the_same_stack_are_fine_whatever_other_engines_they_have() -> None:
    stack = {"sim.engine": "sim 1"}
    rows.cell(
        CELL,
        rows.node("n-00000001", fingerprint={**stack, "vllm.engine": "vllm 0.16.0"}),
        rows.node("n-00000002", fingerprint=stack),
        rows.node("n-00000003"),
    )
    text = part(f"/cells/{CELL}/", "cell-stack")
    assert "differs</span>" not in text
    assert text.count("same</span>") == 2
    assert "not reported" in text


def test_a_stopped_cell_keeps_its_page() -> None:
    rows.cell(CELL, state="stopped", reason="scaled down")
    text = part(f"/cells/{CELL}/", "cell")
    assert "scaled down" in text
    assert "This cell is stopped" in text


def test_a_node_shows_its_place_and_last_report() -> None:
    rows.cell(CELL, rows.node("n-00000001", report={"engine_pid": 4711, "telemetry": {"rss_bytes": 99}}))
    assert re.search(r"spine \S rack", part("/nodes/n-00000001/", "node"))
    assert CELL in part("/nodes/n-00000001/", "node")
    assert "pid 4711" in part("/nodes/n-00000001/", "node-report")
    assert "99 bytes" in part("/nodes/n-00000001/", "node-report")


def test_a_node_shows_its_accelerators_and_their_errors() -> None:
    device = {"index": 3, "kind": "neuron", "name": "trainium2", "cores": 4, "utilisation_percent": 42.0}
    device |= {"memory_used_bytes": 2**30, "memory_total_bytes": 96 * 2**30, "errors": {"sram_ecc_uncorrected": 4}}
    rows.node("n-00000001", report={"telemetry": {"accelerators": [device], "agent_rss_bytes": 7}})
    text = part("/nodes/n-00000001/", "node-report")
    for word in ("neuron 3", "trainium2, 4 cores", "sram_ecc_uncorrected 4", "96"):
        assert word in text
    assert "Accelerators" not in part(f"/nodes/{rows.node('n-00000002').pk}/", "node-report")


def test_a_node_shows_the_builds_that_it_holds_and_fetches() -> None:
    held = {"digest": "sha256:4b1d", "serves": "vllm", "version": "0.32.0", "unpacked_bytes": 2 * 2**30}
    coming = {"digest": "sha256:77ab", "serves": "vllm", "fetching": "build vllm-2: fetching 120 of 900 MB"}
    rows.node("n-00000001", report={"telemetry": {"builds": [held, coming]}})
    page = part("/nodes/n-00000001/", "node-report")
    assert "vllm 0.32.0" in page
    assert "build vllm-2: fetching 120 of 900 MB" in page


def test_a_node_shows_what_became_of_its_compile_cache() -> None:
    cache = {"key": "9f2c", "state": "fetched from the fleet", "digest": "77ab" * 16, "packed_bytes": 31_000_000}
    cache["peer_bytes"] = 31_000_000
    offered = ["77ab" * 16, "9f2c" * 16]
    rows.node("n-00000001", report={"telemetry": {"compile_caches": [cache], "offered_caches": offered}})
    page = part("/nodes/n-00000001/", "node-report")
    assert "fetched from the fleet" in page
    assert "77ab77ab77ab" in page
    assert "29.6 MB from other nodes" in page
    assert "It offers 2 archives to other nodes." in page
    assert "compile_caches" not in page


def test_a_node_shows_what_its_agent_found_in_it() -> None:
    node = rows.node("n-00000001", accelerators=["nvidia 0: H100, 80 GiB", "nvidia 1: H100, 80 GiB", "odd"])
    assert "<dd>2 x H100, 80 GiB, 1 x odd</dd>" in part(f"/nodes/{node.pk}/", "node")
    assert "none found" in part(f"/nodes/{rows.node('n-00000002').pk}/", "node")


def test_a_node_that_never_reported_names_its_log() -> None:
    node = rows.node("n-00000001")
    node.report.delete()
    assert "nodes/n-00000001/agent.log" in part("/nodes/n-00000001/", "node-report")


def test_a_deployment_shows_what_it_wants_and_has_by_region() -> None:
    one_more_of_everything(0)
    text = part("/deployments/deployment-0/", "deployment")
    assert "degraded" in text
    assert "1/2" in text


def test_a_region_that_left_a_deployment_still_shows_its_cells() -> None:
    one_more_of_everything(0)
    DeploymentRegion.objects.all().delete()
    assert "region-0" in part("/deployments/deployment-0/", "deployment")


def test_events_of_one_thing_are_its_own_only() -> None:
    one_more_of_everything(0)
    one_more_of_everything(1)
    text = part("/cells/deployment-0-region-0-1/", "cell-events")
    assert "Cell deployment-0-region-0-1 is ready" in text
    assert "deployment-1" not in text


def test_a_follower_alone_has_no_leader_to_be_far_from() -> None:
    cell = rows.cell(CELL, rows.node("n-00000001"), rows.node("n-00000002"))
    CellMember.objects.filter(cell=cell, rank=0).delete()
    assert "n-00000002" in part(f"/cells/{CELL}/", "cell")


def test_an_incident_shows_its_evidence_its_replacements_and_related_incidents() -> None:
    where = {"opened_at": clock.now(), "node": "n-00000001", "cell": CELL}
    evidence = {"waits": "frozen: 4 of 12", "score": 0.5, "windows": [{"window": 7, "z": 9.1}, {"window": 8, "z": 9.4}]}
    one = Incident.objects.create(kind="node-slow", subject="n-00000001", summary="slow", evidence=evidence, **where)
    Incident.objects.create(kind="cell-lost", subject=CELL, summary="the cell was lost", **where)
    Replacement.objects.create(
        node=rows.node("n-00000001"), rule="slow", reason="slow", incident=one, opened_at=clock.now()
    )
    url = f"/incidents/{one.pk}/"
    assert "No replacement yet: frozen: 4 of 12" in part(url, "incident")
    shown = part(url, "incident-evidence")
    assert '<th scope="col">Window</th>' in shown
    assert "<td>9.4</td>" in shown
    assert "frozen" not in shown
    story = part(url, "incident-story")
    assert "n-00000001 is to be replaced after its cell has drained: slow" in story
    assert "Nothing is recorded of" in story
    work = part(url, "incident-actions")
    assert "after its cell has drained" in work
    assert f"/incidents/{one.pk}/ask/dismiss/" in part(url, "incident")
    assert "the cell was lost" in part(url, "incident-related")


def test_a_closed_incident_cannot_be_dismissed() -> None:
    closed = {"state": "closed", "opened_at": clock.now(), "closed_at": clock.now()}
    one = Incident.objects.create(kind="node-slow", subject="n", summary="slow", **closed)
    assert "This incident is closed." in part(f"/incidents/{one.pk}/", "incident")
