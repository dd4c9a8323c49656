"""Adapter names are checked against all names in use before a version serves."""

from collections.abc import Callable
from typing import Any

import pytest

from fleet.autoscaling.planning.policy import CELLS_MOST
from fleet.deployments.models import Deployment, DeploymentRegion
from fleet.deployments.services.deployments import deployment_create, deployment_scale
from fleet.reconcile.planning.states import CellState
from fleet.rollouts.services import rollout_propose, rollout_start
from kernel.models import Event
from kernel.refusals import InvalidInput
from models_registry.versions.models import Model, ModelVersion
from tests.fleet import rows
from tests.fleet.rows import KIND, NOW

pytestmark = pytest.mark.django_db


def wanted() -> dict[str, int]:
    return dict(DeploymentRegion.objects.values_list("region_id", "cells"))


def test_each_changed_region_is_one_event() -> None:
    rows.deployment(cells=1)
    rows.deployment(cells=2, where="us-west-2")
    rows.region("eu-central-1")
    cells = {"us-east-1": 3, "us-west-2": 2, "eu-central-1": 1}
    assert deployment_scale(name="sim-70b", cells=cells, actor="ada", now=NOW)
    assert wanted() == cells
    assert {event.region: event.detail for event in Event.objects.all()} == {
        "us-east-1": {"was": 1, "cells": 3},
        "eu-central-1": {"was": 0, "cells": 1},
    }


def test_what_is_so_already_is_not_recorded_and_rings_nobody(
    django_capture_on_commit_callbacks: Callable[..., Any],
) -> None:
    rows.deployment(cells=2)
    with django_capture_on_commit_callbacks() as callbacks:
        assert not deployment_scale(name="sim-70b", cells={"us-east-1": 2}, actor="ada", now=NOW)
    assert not Event.objects.exists()
    assert not callbacks


@pytest.mark.parametrize(("cells", "rule"), [({"mars": 1}, "exists"), ({"us-east-1": -1}, "range")])
def test_nothing_changes_when_one_part_is_wrong(cells: dict[str, int], rule: str) -> None:
    rows.deployment(cells=2)
    rows.region("eu-central-1")
    with pytest.raises(InvalidInput) as refused:
        deployment_scale(name="sim-70b", cells={"eu-central-1": 1, **cells}, actor="ada", now=NOW)
    assert refused.value.rule == rule
    assert wanted() == {"us-east-1": 2}


def test_a_slip_of_the_finger_buys_no_machines() -> None:
    rows.deployment()
    with pytest.raises(InvalidInput, match="from 0 to 1000"):
        deployment_scale(name="sim-70b", cells={"us-east-1": CELLS_MOST + 1}, actor="ada", now=NOW)


SURGE = {"strategy": "surge", "surge": 1}


def version(name: str, *adapters: str, model: str = "sim-70b") -> ModelVersion:
    row, _ = Model.objects.get_or_create(name=model, defaults={"created_at": NOW})
    return ModelVersion.objects.create(
        model=row, version=name, engine="sim", state="released", parallelism={KIND: {"nodes": 2}}, created_at=NOW,
        adapters=[{"name": adapter, "artifact_uri": "", "artifact_digest": "", "rank": None} for adapter in adapters],
    )  # fmt: skip


def create(name: str, reference: str) -> Deployment:
    return deployment_create(
        name=name, model_version=reference, instance_types=[KIND], cells={"us-east-1": 1}, actor="ada", now=NOW
    )


def test_a_rollout_to_a_version_whose_adapter_another_deployment_serves_is_refused() -> None:
    rows.deployment()
    version("2", "tuned")
    version("1", "tuned", model="other")
    create("other", "other@1")
    with pytest.raises(InvalidInput) as refused:
        rollout_propose(deployment="sim-70b", version="sim-70b@2", policy={})
    assert (refused.value.field, refused.value.rule) == ("version", "distinct")
    assert str(refused.value).startswith(
        "adapter tuned of sim-70b@2, deployment sim-70b has the same name as adapter tuned of other@1, deployment oth"
    )


def test_a_deployment_whose_name_or_model_is_an_adapter_s_is_refused() -> None:
    rows.deployment()
    version("1", "tuned", model="other")
    create("other", "other@1")
    version("1", model="tuned")
    for name, reference in (("tuned", "sim-70b@1"), ("new", "tuned@1")):
        with pytest.raises(InvalidInput, match="has the same name as adapter tuned of other@1"):
            create(name, reference)
    version("1", "new2", model="own")
    with pytest.raises(InvalidInput, match="adapter new2 of own@1, deployment new2 has the same name as deployment n"):
        create("new2", "own@1")
    assert set(Deployment.objects.values_list("name", flat=True)) == {"sim-70b", "other"}


def test_what_a_rollout_brings_is_taken_while_it_runs_and_what_cells_serve_until_they_stop() -> None:
    rows.deployment()
    two = version("2", "tuned", "kept")
    rollout_start(proposal=rollout_propose(deployment="sim-70b", version="sim-70b@2", policy=SURGE), actor="a", now=NOW)
    version("1", "tuned", model="other")
    version("2", "kept", model="other")
    with pytest.raises(InvalidInput, match="adapter tuned of sim-70b@2, deployment sim-70b"):
        create("other", "other@1")
    Deployment.objects.get().rollouts.all().delete()
    cell = rows.cell("c1", rows.node("n-a"), rows.node("n-b"), model_version=two)
    with pytest.raises(InvalidInput, match="adapter tuned of sim-70b@2, deployment sim-70b"):
        create("other", "other@1")
    cell.state = CellState.STOPPED.value
    cell.save()
    create("other", "other@1")


def test_the_versions_of_one_deployment_may_share_adapters() -> None:
    rows.deployment()
    version("2", "tuned")
    create("chat", "sim-70b@2")
    version("3", "tuned", "more")
    assert rollout_propose(deployment="chat", version="sim-70b@3", policy=SURGE).version.version == "3"
