"""Cells over HTTP."""

from typing import Any

import msgspec
import pytest

from engine_agent.protocol.load_messages import CacheLoad
from fleet.cells.models import Cell
from kernel.models import Event
from tests.controlplane.api.client import bearer, rules
from tests.fleet import rows

pytestmark = [pytest.mark.django_db, pytest.mark.slow]

LOAD = {"in_flight": 3, "queued": 1, "tokens_per_s": 41.5, "ttft_p50_ms": 48.0, "ttft_p99_ms": 131.0}
BATCH = {"running": 2, "waiting": 1, "window": 12, "baseline_ttft_ms": 80.0}
NO_BATCH = {
    "running": 0,
    "waiting": 0,
    "window": 0,
    "is_alone": False,
    "is_over_budget": False,
    "baseline_ttft_ms": None,
    "baseline_itl_ms": None,
    "recent_ttft_ms": None,
    "recent_itl_ms": None,
}
NO_LOAD = {
    "in_flight": 0,
    "queued": 0,
    "tokens_per_s": 0.0,
    "ttft_p50_ms": None,
    "ttft_p99_ms": None,
    "itl_p50_ms": None,
    "itl_p99_ms": None,
    "batch": None,
    "cache": None,
    "handovers": None,
    "speculation": None,
    "engine": None,
    "reported_at": None,
}


def ids(**query: Any) -> list[str]:
    return [row["id"] for row in bearer().get("/api/v1/cells", query).json()["results"]]


def test_a_cell_says_everything_about_itself() -> None:
    leader, follower = rows.node("n-00000001", report={"load": LOAD}), rows.node("n-00000002")
    cell = rows.cell("sim-70b-us-east-1-1", leader, follower, reason="all 2 ranks are ready")
    assert bearer().get(f"/api/v1/cells/{cell.id}").json() == {
        "id": "sim-70b-us-east-1-1",
        "deployment": "sim-70b",
        "region": "us-east-1",
        "instance_type": "local.cpu",
        "model_version": "sim-70b@1",
        "serving_class": "realtime",
        "role": "mixed",
        "state": "ready",
        "reason": "all 2 ranks are ready",
        "tone": "ok",
        "generation": 1,
        "restarts": 0,
        "nodes": [
            {"id": "n-00000001", "rank": 0, "role": "leader", "state": "ready"},
            {"id": "n-00000002", "rank": 1, "role": "follower", "state": "ready"},
        ],
        "fingerprints": {"groups": [], "differing": []},
        "load": {**NO_LOAD, **LOAD, "reported_at": "2026-11-21T12:00:00Z"},
        "unrouted_at": None,
        "state_since": "2026-11-21T12:00:00Z",
        "created_at": "2026-11-21T12:00:00Z",
    }


def test_a_cell_says_what_it_does_of_batch_work() -> None:
    cell = rows.cell("c", rows.node("n-00000001", report={"load": {**LOAD, "batch": BATCH}}))
    assert bearer().get(f"/api/v1/cells/{cell.id}").json()["load"]["batch"] == {**NO_BATCH, **BATCH}


def test_a_cell_says_what_is_in_its_cache_and_how_well_that_is_predicted() -> None:
    cache = msgspec.to_builtins(CacheLoad(True, 18_204, 16, 2_911, 100, 60, 58))
    cell = rows.cell("c", rows.node("n-00000001", report={"load": {**LOAD, "cache": cache}}))
    shown = bearer().get(f"/api/v1/cells/{cell.id}").json()["load"]["cache"]
    assert shown == {"other_tokens_total": 0, "other_found_tokens_total": 0, **cache}


def test_a_cell_shows_the_batch_of_its_engine() -> None:
    batch = {"running": 8, "waiting": 2, "kv_percent": 37.5, "preemptions_total": 7}
    cell = rows.cell("c", rows.node("n-00000001", report={"load": {**LOAD, "engine": batch}}))
    assert bearer().get(f"/api/v1/cells/{cell.id}").json()["load"]["engine"] == batch


def test_a_cell_says_what_it_guessed_and_how_much_of_that_was_right() -> None:
    guesses = {"covered_s": 3600.0, "drafts": 500, "guessed_tokens": 1000, "accepted_tokens": 700}
    cell = rows.cell("c", rows.node("n-00000001", report={"load": {**LOAD, "speculation": guesses}}))
    assert bearer().get(f"/api/v1/cells/{cell.id}").json()["load"]["speculation"] == guesses


def test_a_cell_shows_which_nodes_run_the_same_and_in_what_the_others_differ() -> None:
    same = {"kernel": "6.8", "sim.engine": "sim 1", "vllm.engine": "vllm 0.16.0"}
    nodes = [
        rows.node("n-00000001", fingerprint=same),
        rows.node("n-00000002", fingerprint={**same, "kernel": "6.9", "driver": "2"}),
        rows.node("n-00000003", fingerprint={**same, "vllm.engine": "vllm 0.17.0"}),
        rows.node("n-00000004"),
    ]
    cell = rows.cell("sim-70b-us-east-1-1", *nodes)
    seen = bearer().get(f"/api/v1/cells/{cell.id}").json()["fingerprints"]
    assert [group["nodes"] for group in seen["groups"]] == [["n-00000001", "n-00000003"], ["n-00000002"]]
    assert len({group["digest"] for group in seen["groups"]}) == 2
    assert seen["differing"] == [
        {"field": "driver", "values": {"n-00000001": None, "n-00000002": "2", "n-00000003": None}},
        {"field": "kernel", "values": {"n-00000001": "6.8", "n-00000002": "6.9", "n-00000003": "6.8"}},
    ]


def test_a_cell_without_nodes_has_no_load() -> None:
    cell = rows.cell(state="pending", generation=0)
    body = bearer().get(f"/api/v1/cells/{cell.id}").json()
    assert (body["nodes"], body["load"]) == ([], NO_LOAD)


def test_load_of_an_earlier_generation_is_not_shown() -> None:
    leader = rows.node("n-00000001", report={"load": LOAD})
    cell = rows.cell("sim-70b-us-east-1-1", leader)
    Cell.objects.update(generation=2)
    assert bearer().get(f"/api/v1/cells/{cell.id}").json()["load"] == NO_LOAD


def test_load_of_a_follower_is_not_shown() -> None:
    cell = rows.cell("c", rows.node("n-00000001"), rows.node("n-00000002", report={"load": LOAD}))
    assert bearer().get(f"/api/v1/cells/{cell.id}").json()["load"] == NO_LOAD


def test_stopped_cells_are_left_out_unless_asked_for() -> None:
    rows.cell("a-1")
    rows.cell("a-2", state="stopped")
    assert ids() == ["a-1"]
    assert ids(include="all") == ["a-1", "a-2"]
    assert ids(state="stopped") == ["a-2"]
    assert bearer().get("/api/v1/cells/a-2").json()["state"] == "stopped"


def test_several_states_may_be_asked_for() -> None:
    for state in ("ready", "failed", "lost"):
        rows.cell(state, state=state)
    assert ids(state=["failed", "lost"]) == ["failed", "lost"]


def test_cells_are_found_by_what_they_belong_to() -> None:
    node = rows.node("n-00000001")
    rows.cell("east", node)
    rows.cell("west", region=rows.region("us-west-2"), model_version=rows.version("2"))
    assert ids(region="us-west-2") == ["west"]
    assert ids(deployment="sim-70b") == ["east", "west"]
    assert ids(deployment="other") == []
    assert ids(node="n-00000001") == ["east"]
    assert ids(model="sim-70b") == ["east", "west"]
    assert ids(model_version="sim-70b@2") == ["west"]
    assert ids(serving_class="batch") == []


def test_draining_takes_a_ready_cell_out_of_service() -> None:
    rows.cell("c", rows.node("n-00000001"))
    body = bearer("ada").post("/api/v1/cells/c/drain", {"why": "new disk"}, format="json").json()
    assert (body["state"], body["reason"], body["generation"]) == ("draining", "drain requested by ada: new disk", 1)


def test_restarting_fails_a_cell_so_that_it_starts_again() -> None:
    rows.cell("c", rows.node("n-00000001"))
    body = bearer("ada").post("/api/v1/cells/c/restart").json()
    assert (body["state"], body["reason"]) == ("failed", "restart requested by ada")


@pytest.mark.parametrize("action", ["drain", "restart"])
def test_an_action_on_a_cell_in_another_state_is_a_conflict(action: str) -> None:
    rows.cell("c", state="draining")
    assert bearer().post(f"/api/v1/cells/c/{action}").status_code == 409
    assert Cell.objects.get().state == "draining"
    assert not Event.objects.exists()


@pytest.mark.parametrize("action", ["drain", "restart"])
def test_an_action_on_no_cell_is_not_found(action: str) -> None:
    assert bearer().post(f"/api/v1/cells/c/{action}").status_code == 404


@pytest.mark.parametrize(
    ("body", "broken"),
    [
        ({"why": 201 * "x"}, {"why": "max_length"}),
        ({"why": ["x"]}, {"why": "invalid"}),
        ({"force": True}, {"force": "unknown"}),
        (["x"], {"": "invalid"}),
        ({"why": "\0"}, {"why": "storable"}),
    ],
)
def test_a_bad_request_changes_nothing(body: Any, broken: dict[str, str]) -> None:
    rows.cell("c")
    assert rules(bearer().post("/api/v1/cells/c/drain", body, format="json")) == broken
    assert Cell.objects.get().state == "ready"


def test_half_a_character_is_refused() -> None:
    rows.cell("c")
    response = bearer().post("/api/v1/cells/c/drain", '{"why": "\\ud800"}', content_type="application/json")
    assert rules(response) == {"why": "storable"}


def test_a_long_user_name_fits_into_the_event() -> None:
    rows.cell("c")
    assert bearer(150 * "a").post("/api/v1/cells/c/drain").status_code == 200
    assert Event.objects.get().actor == 64 * "a"
