"""Deployments over HTTP."""

from typing import Any

import pytest

from fleet.deployments.models import Deployment, DeploymentRegion
from kernel.models import Event
from models_registry.instance_types.models import InstanceType
from tests.controlplane.api.client import bearer, rules
from tests.fleet import rows

pytestmark = pytest.mark.django_db

URL = "/api/v1/deployments/sim-70b"
ALL: dict[str, Any] = {
    "pools": None,
    "role_plan": None,
    "by_type": {},
    "types": {},
    "granted": None,
    "grant_reason": "",
}


def scale(*places: Any, username: str = "operator") -> Any:
    return bearer(username).patch(URL, {"regions": list(places)}, format="json")


def wanted() -> dict[str, int]:
    return dict(DeploymentRegion.objects.values_list("region_id", "cells"))


def test_a_deployment_says_everything_about_itself() -> None:
    rows.deployment(cells=2)
    rows.deployment(cells=1, where="us-west-2")
    rows.cell("a")
    rows.cell("b", state="starting")
    assert bearer().get(URL).json() == {
        "name": "sim-70b",
        "model_version": "sim-70b@1",
        "serving_class": "realtime",
        "instance_types": ["local.cpu"],
        "drain_deadline_s": 60.0,
        "update_policy": {},
        "slo": {},
        "scaling": {},
        "markets": [],
        "team": "",
        "priority": None,
        "preemptible": None,
        "preempts": "min",
        "chain": {},
        "regions": [
            {"region": "us-east-1", "cells": 2, "range": None, "ready": 1, **ALL, "types": {"local.cpu": 2}},
            {"region": "us-west-2", "cells": 1, "range": None, "ready": 0, **ALL},
        ],
        "created_at": "2026-11-21T12:00:00Z",
    }


def test_deployments_are_found_by_what_they_are() -> None:
    rows.deployment()
    client = bearer()
    of_type = {"instance_type": "local.cpu"}
    for query in ({"region": "us-east-1"}, {"serving_class": "realtime"}, {"model": "sim-70b"}, of_type):
        assert [row["name"] for row in client.get("/api/v1/deployments", query).json()["results"]] == ["sim-70b"]
    for query in ({"region": "us-west-2"}, {"serving_class": "batch"}, {"instance_type": "other"}):
        assert client.get("/api/v1/deployments", query).json()["results"] == []


def test_scaling_changes_the_named_regions_only() -> None:
    rows.deployment(cells=2)
    rows.deployment(cells=1, where="us-west-2")
    response = scale({"region": "us-west-2", "cells": 3}, username="ada")
    assert response.status_code == 200
    assert [(place["region"], place["cells"]) for place in response.json()["regions"]] == [
        ("us-east-1", 2),
        ("us-west-2", 3),
    ]
    assert wanted() == {"us-east-1": 2, "us-west-2": 3}
    event = Event.objects.get()
    assert (event.kind, event.actor, event.region, event.deployment) == (
        "deployment.scaled",
        "ada",
        "us-west-2",
        "sim-70b",
    )
    assert event.detail == {"was": 1, "cells": 3}


def test_scaling_into_a_new_region_adds_it() -> None:
    rows.deployment(cells=2)
    rows.region("us-west-2")
    assert scale({"region": "us-west-2", "cells": 1}).status_code == 200
    assert wanted() == {"us-east-1": 2, "us-west-2": 1}


def test_scaling_to_nothing_keeps_the_region() -> None:
    rows.deployment(cells=2)
    assert scale({"region": "us-east-1", "cells": 0}).json()["regions"] == [
        {"region": "us-east-1", "cells": 0, "range": None, "ready": 0, **ALL}
    ]


@pytest.mark.parametrize(
    ("body", "broken"),
    [
        ({}, {"regions": "required"}),
        ({"regions": []}, {"regions": "min_length"}),
        ({"regions": None}, {"regions": "null"}),
        ({"regions": {"us-east-1": 3}}, {"regions": "not_a_list"}),
        ({"regions": [3]}, {"regions.0": "invalid"}),
        ({"regions": [{"region": "us-east-1"}]}, {"regions.0.cells": "required"}),
        ({"regions": [{"region": "us-east-1", "cells": -1}]}, {"regions.0.cells": "min_value"}),
        ({"regions": [{"region": "us-east-1", "cells": 1001}]}, {"regions.0.cells": "max_value"}),
        ({"regions": [{"region": "us-east-1", "cells": "many"}]}, {"regions.0.cells": "invalid"}),
        ({"regions": [{"region": "us-east-1", "cells": 3, "x": 1}]}, {"regions.0.x": "unknown"}),
        ({"regions": [{"region": "us-east-1", "cells": 3}, {"region": "mars", "cells": 1}]}, {"regions": "exists"}),
        ({"regions": 2 * [{"region": "us-east-1", "cells": 3}]}, {"regions": "unique"}),
        ({"regions": [{"region": "us-east-1", "cells": 3}], "model_version": "x"}, {"model_version": "unknown"}),
    ],
)
def test_a_bad_request_changes_nothing(body: Any, broken: dict[str, str]) -> None:
    rows.deployment(cells=2)
    assert rules(bearer().patch(URL, body, format="json")) == broken
    assert wanted() == {"us-east-1": 2}
    assert not Event.objects.exists()


def test_scaling_what_is_not_there_is_not_found() -> None:
    assert bearer().patch(URL, {"regions": [{"region": "r", "cells": 1}]}, format="json").status_code == 404


NEW = {
    "name": "chat",
    "model_version": "sim-70b@1",
    "instance_types": ["local.cpu"],
    "regions": [{"region": "us-east-1", "cells": 2}],
}


def create(**other: Any) -> Any:
    return bearer("ada").post("/api/v1/deployments", {**NEW, **other}, format="json")


def test_a_deployment_is_created_with_its_cells_and_policy() -> None:
    rows.deployment()
    response = create(update_policy={"bake_s": 5}, serving_class="batch")
    assert response.status_code == 200
    made = response.json()
    assert (made["name"], made["serving_class"], made["update_policy"]) == ("chat", "batch", {"bake_s": 5.0})
    assert made["regions"] == [{"region": "us-east-1", "cells": 2, "range": None, "ready": 0, **ALL}]
    assert Event.objects.get(kind="deployment.created").actor == "ada"


def test_a_name_that_is_taken_is_a_conflict() -> None:
    rows.deployment()
    assert create(name="sim-70b").status_code == 409


@pytest.mark.parametrize(
    ("wrong", "broken"),
    [
        ({"model_version": "sim-70b@9"}, {"model_version": "exists"}),
        ({"instance_types": ["none"]}, {"instance_types": "exists"}),
        ({"instance_types": []}, {"instance_types": "min_length"}),
        ({"instance_type": "local.cpu"}, {"instance_type": "unknown"}),
        ({"by_type": {"us-east-1": {"none": 1}}}, {"by_type.us-east-1": "listed"}),
        ({"by_type": {"us-east-1": {"local.cpu": -1}}}, {"by_type.us-east-1.local.cpu": "min_value"}),
        ({"regions": [{"region": "nowhere", "cells": 1}]}, {"regions": "exists"}),
        ({"update_policy": {"surge": -1}}, {"update_policy.surge": "policy"}),
        ({"name": "a/b"}, {"name": "invalid"}),
        ({"colour": "red"}, {"colour": "unknown"}),
    ],
)
def test_what_breaks_a_rule_is_named(wrong: dict[str, Any], broken: dict[str, str]) -> None:
    rows.deployment()
    assert rules(create(**wrong)) == broken
    assert Deployment.objects.count() == 1


def test_cells_and_policy_change_together_or_not_at_all() -> None:
    rows.deployment(cells=2)
    place = [{"region": "nowhere", "cells": 3}]
    body = {"drain_deadline_s": 5, "regions": place}
    assert rules(bearer().patch(URL, body, format="json")) == {"regions": "exists"}
    assert Deployment.objects.get().drain_deadline_s == 60.0
    place[0]["region"] = "us-east-1"
    assert bearer().patch(URL, body, format="json").json()["drain_deadline_s"] == 5.0
    assert wanted() == {"us-east-1": 3}


def test_a_change_of_nothing_is_refused() -> None:
    rows.deployment()
    assert rules(bearer().patch(URL, {}, format="json")) == {"regions": "required"}


def test_deleting_needs_what_was_looked_at() -> None:
    rows.deployment(cells=0)
    response = bearer().delete(URL)
    assert response.status_code == 428
    assert Deployment.objects.exists()


def test_what_serves_is_not_deleted_and_says_what_it_has() -> None:
    rows.cell("c-1")
    detail = bearer().delete(URL, headers={"if-match": "*"}).json()["detail"]
    assert "1 target cells in us-east-1" in detail
    assert "such as c-1" in detail
    assert Deployment.objects.exists()


def test_what_serves_no_longer_is_deleted_with_its_stopped_cells() -> None:
    rows.cell("c-1", state="stopped")
    DeploymentRegion.objects.update(cells=0)
    client = bearer("ada")
    response = client.delete(URL, headers={"if-match": client.get(URL)["ETag"]})
    assert (response.status_code, response.json()["name"]) == (200, "sim-70b")
    assert not Deployment.objects.exists()
    assert Event.objects.get(kind="deployment.deleted").actor == "ada"


def test_an_objective_is_stated_in_parts_and_checked() -> None:
    rows.deployment()
    client = bearer()
    assert client.patch(URL, {"slo": {"ttft_ms": 800}}, format="json").json()["slo"] == {"ttft_ms": 800}
    changed = client.patch(URL, {"slo": {"availability": 0.999}}, format="json").json()
    assert changed["slo"] == {"ttft_ms": 800, "availability": 0.999}
    assert rules(client.patch(URL, {"slo": {"availability": 2}}, format="json")) == {"slo.availability": "objective"}


def test_types_and_mix_of_a_deployment_are_changed_together() -> None:
    InstanceType.objects.create(name="local.big", accelerator="cpu")
    row = rows.deployment(cells=2, nodes=1)
    type(row.model_version).objects.update(parallelism={"local.cpu": {"nodes": 1}, "local.big": {"nodes": 1}})
    change = {"instance_types": ["local.big", "local.cpu"], "by_type": {"us-east-1": {"local.cpu": 1}}}
    changed = bearer("operator").patch(URL, change, format="json").json()
    assert changed["instance_types"] == ["local.big", "local.cpu"]
    assert changed["regions"][0]["by_type"] == {"local.cpu": 1}
