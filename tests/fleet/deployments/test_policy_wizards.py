"""The wizards of a deployment's policies: they begin with the values in force, change only what was typed, and keep
mistakes."""

import re
from html import unescape
from typing import Any

import pytest
from django.test import Client

from fleet.deployments.models import Deployment, DeploymentRegion
from kernel.access import Role
from tests.controlplane.access.callers import make_user
from tests.controlplane.dashboard.clients import signed_in
from tests.fleet import rows
from traffic.region_shares.models import TrafficRule

pytestmark = [pytest.mark.django_db, pytest.mark.slow]

PAGES = ("autoscaling", "updates", "traffic", "chain")


def url(page: str) -> str:
    return f"/deployments/sim-70b/{page}/"


def form(page: str) -> dict[str, str]:
    """The fields that a browser sends if nothing was typed."""
    shown = signed_in().get(url(page)).text.partition('<form id="wizard"')[2].partition("</form>")[0]
    shown = re.sub(r"<template>.*?</template>", "", shown, flags=re.S)
    fields: dict[str, str] = {}
    for tag in re.findall(r"<input [^>]*>", shown):
        said = dict(re.findall(r'([\w-]+)="([^"]*)"', tag))
        if said.get("type") in {"text", "number", "hidden"} or " checked" in tag:
            fields[said["name"]] = unescape(said.get("value", "on"))
    for name, options in re.findall(r'<select [^>]*name="([^"]+)"[^>]*>(.*?)</select>', shown, flags=re.S):
        chosen = re.search(r'value="([^"]*)" selected', options) or re.search(r'value="([^"]*)"', options)
        fields[name] = chosen[1] if chosen else ""
    return {name: text for name, text in fields.items() if name not in {"csrfmiddlewaretoken", "raw"}}


def send(page: str, **changed: str) -> Any:
    return signed_in().post(url(page), {**form(page), **changed, "go": "apply"})


@pytest.fixture(autouse=True)
def deployment() -> Deployment:
    made = rows.deployment("sim-70b")
    made.scaling = {"schedule": [{"cron": "0 8 * * MON", "for_s": 3600, "cells": 2}], "slo_burn": None}
    made.update_policy = {"waves_percent": [50, 100], "canary": False}
    made.save()
    rows.region("us-west-2")
    return made


@pytest.mark.parametrize("page", PAGES)
def test_the_form_as_it_opens_changes_nothing(page: str) -> None:
    shown = signed_in().post(url(page), {**form(page), "go": "review"})
    assert "Everything is as stated already." in shown.text


def test_range_mode_target_cool_down_and_schedule_are_set_once() -> None:
    typed = {
        "regions-0-cells": "2-8", "mode": "act", "target_utilisation": "0.6", "down_after_s": "900",
        "schedule-1-cron": "0 8 * * MON", "schedule-1-for_s": "600", "schedule-1-cells": "3",
        "schedule-1-region": "us-east-1",
    }  # fmt: skip
    for _ in range(2):
        assert send("autoscaling", **typed).headers["Location"] == "/deployments/sim-70b/"
    row = Deployment.objects.get()
    policy = row.scaling_policy()
    assert (policy.mode, policy.target_utilisation, policy.down_after_s, policy.slo_burn) == ("act", 0.6, 900, None)
    assert [(window.cells, window.region) for window in policy.schedule] == [(2, ""), (3, "us-east-1")]
    place = DeploymentRegion.objects.get(region_id="us-east-1")
    assert (place.cells_min, place.cells_max) == (2, 8)


def test_metrics_of_cloudwatch_are_set_by_the_form() -> None:
    typed = {
        "metrics-0-namespace": "AWS/SQS", "metrics-0-metric": "Visible", "metrics-0-per_cell": "40",
        "metrics-0-dimensions": "QueueName=jobs, Stage=prod", "metrics-0-statistic": "Maximum",
    }  # fmt: skip
    for _ in range(2):
        assert send("autoscaling", **typed).status_code == 302
    [metric] = Deployment.objects.get().scaling_policy().metrics
    assert (metric.per_cell, metric.statistic, metric.period_s) == (40.0, "Maximum", 60)
    assert metric.dimensions == {"QueueName": "jobs", "Stage": "prod"}
    shown = signed_in().get(url("autoscaling")).text
    assert "QueueName=jobs, Stage=prod" in unescape(shown)
    refused = send("autoscaling", **{**typed, "metrics-0-dimensions": "jobs"})
    assert (refused.status_code, "NAME=VALUE" in refused.text) == (409, True)


def test_the_update_policy_is_set_by_its_form() -> None:
    assert send("updates", waves_percent="20, 100", canary="on", **{"gate.error_ratio": "3"}).status_code == 302
    policy = Deployment.objects.get().policy()
    assert (policy.waves_percent, policy.canary, policy.gate.error_ratio) == ((20, 100), True, 3.0)


def test_the_traffic_policy_is_set_by_its_form() -> None:
    typed = {
        "cost-0-key": "us-west-2", "cost-0-value": "0.8", "utilisation_cap": "0.7", "split_sticky": "",
        "residency-0-key": "us-east-1", "residency-0-value": "us-east-1, us-west-2",
    }  # fmt: skip
    assert send("traffic", **typed).status_code == 302
    policy = TrafficRule.objects.get().policy()
    assert (policy.cost, policy.utilisation_cap, policy.split_sticky) == ({"us-west-2": 0.8}, 0.7, False)
    assert policy.residency == {"us-east-1": ("us-east-1", "us-west-2")}


@pytest.mark.parametrize(
    ("page", "field", "text", "at", "error"),
    [
        ("autoscaling", "target_utilisation", "7", "target_utilisation", "target_utilisation"),
        ("autoscaling", "target_utilisation", "<b>7</b>", "target_utilisation", "is not a number"),
        ("autoscaling", "schedule-0-cron", "<script>x</script>", "schedule", "cron"),
        ("autoscaling", "schedule-0-cron", "", "schedule", "cron"),
        ("autoscaling", "regions-0-cells", "8-2", "regions", "cells"),
        ("autoscaling", "regions-0-cells", "9" * 100_001, "regions", "the limit is 100000"),
        ("updates", "waves_percent", "50, 10", "waves_percent", "growing list"),
        ("updates", "waves_percent", "all", "waves_percent", "percentages with commas"),
        ("updates", "max_unavailable", "1001", "max_unavailable", "max_unavailable"),
        ("traffic", "utilisation_cap", "0.99", "utilisation_cap", "utilisation_cap"),
        ("traffic", "cost-0-key", "mars", "cost", "is missing"),
    ],
)
def test_a_mistake_is_named_at_its_input_and_stays(page: str, field: str, text: str, at: str, error: str) -> None:
    before = list(Deployment.objects.values())
    response = send(page, **{field: text})
    assert response.status_code == 409
    at_input = response.text.partition(f'id="error-{at}"')[2].partition("</p>")[0]
    assert error in unescape(at_input)
    assert "<script>x" not in response.text
    assert "<b>7" not in response.text
    assert list(Deployment.objects.values()) == before
    assert not TrafficRule.objects.exists()


def test_viewers_see_why_not_and_an_unknown_deployment_is_none() -> None:
    viewer = Client()
    viewer.force_login(make_user("vera", Role.VIEWER))
    shown = viewer.get("/deployments/sim-70b/").text
    assert "It needs the operator role" in shown
    for page in PAGES:
        assert viewer.get(url(page)).status_code == 403
        assert viewer.post(url(page), {"go": "apply"}).status_code == 403
        assert signed_in().get(f"/deployments/none/{page}/").status_code == 404
        assert f'href="{url(page)}"' in signed_in().get("/deployments/sim-70b/").text


def test_a_chain_is_named_changed_and_removed() -> None:
    rows.deployment("planner")
    send("chain", planner="planner", ttft_ms="1500", planner_ms="300")
    assert Deployment.objects.get(name="sim-70b").chain == {"planner": "planner", "ttft_ms": 1500, "planner_ms": 300}
    send("chain", ttft_ms="1000")
    assert Deployment.objects.get(name="sim-70b").chain["ttft_ms"] == 1000
    kept = send("chain", ttft_ms="200")
    assert "planner_ms is 300" in kept.text
    send("chain", planner="", ttft_ms="", planner_ms="")
    assert Deployment.objects.get(name="sim-70b").chain == {}
