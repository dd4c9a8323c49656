"""Ranges and the autoscaler on the command line."""

import json

import pytest

from fleet.autoscaling.models import RoleState, ScalingDecision, ScalingState, ScalingSwitch
from fleet.autoscaling.planning.role_split import RoleSplit
from fleet.capacity.planning.planner import plan_capacity
from fleet.deployments.models import Deployment, DeploymentRegion
from models_registry.versions.models import ModelVersion
from tests.controlplane.cli.conftest import Switchyard
from tests.fleet import rows
from tests.fleet.capacity import views
from tests.fleet.rows import NOW
from traffic.capacity.services import day_plan_store

pytestmark = [pytest.mark.django_db, pytest.mark.slow]


@pytest.fixture(autouse=True)
def deployment() -> None:
    rows.deployment(cells=2)


def test_a_range_is_set_by_its_ends(switchyard: Switchyard) -> None:
    assert switchyard("scale", "sim-70b", "us-east-1=2..8").code == 0
    assert str(DeploymentRegion.objects.get().range) == "2 to 8"
    for wrong in ("us-east-1=2..", "us-east-1=..8", "us-east-1=a..b", "=2..8"):
        ended = switchyard("scale", "sim-70b", wrong)
        assert (ended.code, "use the form REGION=CELLS, REGION=MIN..MAX or" in ended.err) == (2, True)


def test_an_exported_range_is_read_back_as_it_is(switchyard: Switchyard) -> None:
    switchyard("scale", "sim-70b", "us-east-1=2..8")
    switchyard("autoscale", "policy", "sim-70b", "mode=act")
    (document,) = [json.loads(switchyard("export", "deployments", "sim-70b", "-o", "json").out)]
    found = document[0] if isinstance(document, list) else document
    assert found["spec"]["regions"] == [{"region": "us-east-1", "cells": {"min": 2, "max": 8}}]
    assert found["spec"]["scaling"] == {"mode": "act"}


def test_cells_by_role_are_set_exported_and_ended_by_a_number(switchyard: Switchyard) -> None:
    ModelVersion.objects.update(parallelism={rows.KIND: {"nodes": 1}})
    assert switchyard("scale", "sim-70b", "us-east-1=1p+3d+2m").code == 0
    assert DeploymentRegion.objects.get().split == RoleSplit(mixed=2, prefill=1, decode=3)
    (document,) = [json.loads(switchyard("export", "deployments", "sim-70b", "-o", "json").out)]
    found = document[0] if isinstance(document, list) else document
    assert found["spec"]["regions"] == [{"region": "us-east-1", "cells": {"prefill": 1, "decode": 3, "mixed": 2}}]
    for wrong in ("us-east-1=1p+", "us-east-1=1p+1p", "us-east-1=p+3d", "us-east-1=1x+3d"):
        ended = switchyard("scale", "sim-70b", wrong)
        assert (ended.code, "by role, REGION=1p+3d" in ended.err) == (2, True)
    alone = switchyard("scale", "sim-70b", "us-east-1=2p")
    assert (alone.code, "prefill cells without decode cells" in alone.err) == (3, True)
    assert switchyard("scale", "sim-70b", "us-east-1=2").code == 0
    assert DeploymentRegion.objects.get().split == RoleSplit(mixed=2)


def test_a_policy_is_set_in_parts(switchyard: Switchyard) -> None:
    said = switchyard("autoscale", "policy", "sim-70b", "mode=act", "target_utilisation=0.6")
    assert said.out == 'scaling policy of deployment sim-70b: mode="act", target_utilisation=0.6\n'
    assert Deployment.objects.get().scaling == {"mode": "act", "target_utilisation": 0.6}
    assert "is invalid; use name=value" in switchyard("autoscale", "policy", "sim-70b", "act").err
    wrong = switchyard("autoscale", "policy", "sim-70b", "target=1")
    assert (wrong.code, "there is no target; there are: mode" in wrong.err) == (3, True)


def test_status_shows_what_is_wanted_and_what_was_decided(switchyard: Switchyard) -> None:
    assert "switchyard scale DEPLOYMENT REGION=2..8" in switchyard("autoscale", "status").err
    switchyard("scale", "sim-70b", "us-east-1=2..8")
    ScalingState.objects.create(
        place=DeploymentRegion.objects.get(), wanted=3, rule="queue", reason="many wait", acting=False, looked_at=NOW
    )
    ScalingDecision.objects.create(
        deployment_id="sim-70b", region_id="us-east-1", at=NOW, was=2, wanted=3, acted=False, rule="queue", reason="so"
    )
    shown = switchyard("autoscale", "status", "sim-70b").out
    assert [line.split()[:7] for line in shown.splitlines()[1:2]] == [
        ["sim-70b", "us-east-1", "shadow", "2-8", "2", "3", "queue"]
    ]
    assert "TOO MANY" in shown
    found = json.loads(switchyard("autoscale", "status", "sim-70b", "-o", "json").out)
    assert (found["places"][0]["wanted"], found["decisions"][0]["was"]) == (3, 2)


def test_the_switch(switchyard: Switchyard) -> None:
    assert "autoscaling is paused by operator" in switchyard("autoscale", "pause", "--why", "a load test").out
    assert ScalingSwitch.objects.get().paused
    assert "a load test" in switchyard("autoscale", "status").out
    assert "autoscaling is on by operator" in switchyard("autoscale", "resume").out


def test_the_plan_of_the_day(switchyard: Switchyard) -> None:
    assert "No plan yet" in switchyard("autoscale", "plan").out
    one = views.deployment("sim-70b", views.place(demand=views.flat(60.0)))
    plan = plan_capacity(views.view(one, pools=(views.pool(count=8),)))
    day_plan_store(plan=plan, took_s=0.1, now=NOW)
    shown = switchyard("autoscale", "plan", "sim-70b").out
    assert "found by whole" in shown
    assert "cells      8 8 8 8" in shown
    assert "us-east-1 has 8 machines of trn1 then" in shown
    assert json.loads(switchyard("autoscale", "plan", "-o", "json").out)["shifts"] == 6


def test_status_says_which_roles_are_planned_and_why(switchyard: Switchyard) -> None:
    plan = {"mixed": 0, "prefill": 3, "decode": 1, "rule": "demand", "reason": "long prompts", "acting": False}
    RoleState.objects.create(place=DeploymentRegion.objects.get(), looked_at=NOW, **plan)
    said = switchyard("autoscale", "status", "sim-70b").out
    assert "roles in us-east-1: 3 prefill, 1 decode (shadow): long prompts" in said
