"""Ranges, policies, latest checks, decisions and the switch over HTTP."""

from typing import Any

import pytest

from audit.models import AuditRecord
from fleet.autoscaling.models import ScalingDecision, ScalingState
from fleet.deployments.models import Deployment, DeploymentRegion
from kernel.models import Event
from tests.controlplane.api.client import bearer, rules
from tests.fleet import rows
from tests.fleet.rows import KIND, NOW

pytestmark = [pytest.mark.django_db, pytest.mark.slow]

URL = "/api/v1/deployments/sim-70b"
WEST_RANGE = {"region": "us-west-2", "cells": {"min": 2, "max": 8}}


@pytest.fixture(autouse=True)
def deployment() -> None:
    rows.deployment(cells=2)
    rows.region("us-west-2")


ALL_GRANTED: dict[str, Any] = {
    "pools": None,
    "role_plan": None,
    "by_type": {},
    "types": {},
    "granted": None,
    "grant_reason": "",
}


def change(**body: Any) -> Any:
    return bearer("operator").patch(URL, body, format="json")


def messages(response: Any) -> str:
    assert response.status_code == 400
    return " ".join(error["message"] for error in response.json()["errors"])


def test_cells_may_be_a_range_and_a_number_ends_it() -> None:
    shown = change(regions=[WEST_RANGE]).json()["regions"]
    assert shown == [
        {"region": "us-east-1", "cells": 2, "range": None, "ready": 0, **ALL_GRANTED},
        {"region": "us-west-2", "cells": 2, "range": {"min": 2, "max": 8}, "ready": 0, **ALL_GRANTED},
    ]
    assert change(regions=[WEST_RANGE]).status_code == 200
    assert Event.objects.filter(kind="deployment.scaled").count() == 1, "that is so already"
    assert change(regions=[{"region": "us-west-2", "cells": 3}]).json()["regions"][1]["range"] is None


def test_a_deployment_is_created_with_a_range_and_a_policy() -> None:
    new = {"name": "chat", "model_version": "sim-70b@1", "instance_types": [KIND], "scaling": {"mode": "act"}}
    response = bearer("ada").post("/api/v1/deployments", {**new, "regions": [WEST_RANGE]}, format="json")
    assert response.status_code == 200, response.content
    assert (response.json()["regions"][0]["cells"], response.json()["scaling"]) == (2, {"mode": "act"})
    bad = {**new, "name": "other", "scaling": {"target": 1}, "regions": [WEST_RANGE]}
    assert rules(bearer("ada").post("/api/v1/deployments", bad, format="json")) == {"scaling.target": "policy"}


@pytest.mark.parametrize(
    ("cells", "text"),
    [
        ({"min": 0, "max": 0}, "1 <= max"),
        ({"min": 3, "max": 2}, "0 <= min <= max <= 1000"),
        ({"min": 1}, "an object with min and max"),
        ({"min": 1, "max": 2, "mode": "act"}, "an object with min and max"),
        ("2-8", "A valid integer is required, or an object with min and max"),
        (True, "A valid integer is required"),
        (1001, "less than or equal to 1000"),
        (None, "may not be null"),
    ],
)
def test_what_is_neither_number_nor_range_is_refused(cells: Any, text: str) -> None:
    assert text in messages(change(regions=[{"region": "us-west-2", "cells": cells}]))
    assert DeploymentRegion.objects.count() == 1


def test_a_policy_is_stated_in_parts() -> None:
    window = {"cron": "0 8 * * MON-FRI", "time_zone": "Europe/Berlin", "for_s": 3600, "cells": 4}
    assert change(scaling={"schedule": [window]}).status_code == 200
    shown = change(scaling={"mode": "act"}).json()["scaling"]
    assert (shown["mode"], shown["schedule"][0]["cells"], sorted(shown)) == ("act", 4, ["mode", "schedule"])
    assert change(scaling={"mode": "shadow"}).json()["scaling"].keys() == {"schedule"}
    assert rules(change(scaling={"mode": "on"})) == {"scaling.mode": "policy"}
    refused = change(scaling={"schedule": [{**window, "region": "mars"}]})
    assert "unknown region 'mars'; known: us-east-1, us-west-2" in messages(refused)


def test_places_show_the_last_look_and_how_they_are_left_while_there_was_none() -> None:
    change(regions=[WEST_RANGE])
    (place,) = bearer("viewer").get("/api/v1/autoscaling/places").json()["results"]
    assert (place["min"], place["max"], place["cells"], place["mode"]) == (2, 8, 2, "shadow")
    assert (place["wanted"], place["rule"], place["load"], place["looked_at"]) == (None, None, {}, None)
    row = DeploymentRegion.objects.get(region="us-west-2")
    ScalingState.objects.create(
        place=row,
        wanted=5,
        needed=4,
        rule="queue",
        reason="many wait",
        acting=False,
        load={"queued": 3.0},
        looked_at=NOW,
    )
    shown = bearer("viewer").get(f"/api/v1/autoscaling/places/{row.pk}").json()
    assert (shown["wanted"], shown["needed"], shown["rule"], shown["reason"]) == (5, 4, "queue", "many wait")
    for query, found in (({"deployment": "sim-70b"}, 1), ({"region": "us-east-1"}, 0), ({"rule": "max"}, 0)):
        assert len(bearer().get("/api/v1/autoscaling/places", query).json()["results"]) == found


def test_decisions_are_found_by_place_newest_first() -> None:
    for wanted in (3, 4):
        ScalingDecision.objects.create(
            deployment_id="sim-70b",
            region_id="us-east-1",
            at=NOW,
            was=2,
            wanted=wanted,
            acted=True,
            rule="min",
            reason="",
        )
    listed = bearer("viewer").get("/api/v1/autoscaling/decisions", {"deployment": "sim-70b"}).json()["results"]
    assert [row["wanted"] for row in listed] == [4, 3]
    assert bearer().get("/api/v1/autoscaling/decisions", {"acted": "false"}).json()["results"] == []


def test_an_operator_pauses_the_whole_fleet_and_that_is_audited() -> None:
    assert bearer("viewer").get("/api/v1/autoscaling").json() == {
        "paused": False, "why": "", "actor": "", "changed_at": None,
    }  # fmt: skip
    paused = bearer("operator").post("/api/v1/autoscaling/pause", {"why": "a load test"}, format="json").json()
    assert (paused["paused"], paused["why"], paused["actor"]) == (True, "a load test", "operator")
    assert AuditRecord.objects.latest("number").action == "autoscaling.pause"
    assert bearer("operator").post("/api/v1/autoscaling/resume", {}, format="json").json()["paused"] is False


def test_whoever_watches_hears_of_ranges_looks_and_decisions() -> None:
    change(regions=[WEST_RANGE])
    begun = bearer().get("/api/v1/autoscaling/places", {"since": "r0"}).json()
    Deployment.objects.update(drain_deadline_s=61.0)
    row = DeploymentRegion.objects.get(region="us-west-2")
    ScalingState.objects.create(place=row, wanted=5, rule="queue", reason="", acting=False, looked_at=NOW)
    changed = bearer().get("/api/v1/autoscaling/places", {"since": begun["revision"], "timeout": "0"}).json()
    assert [one["wanted"] for one in changed["results"]] == [5]
