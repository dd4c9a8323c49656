"""The demo fleet is seeded once, and operators' changes stay."""

from dataclasses import replace
from typing import Any

import pytest

from fleet.deployments.models import Deployment, DeploymentRegion
from fleet.deployments.services.demo import LOCAL, Heads, Weights, demo_seed
from fleet.regions.models import Region
from fleet.rollouts.services import rollout_propose
from models_registry.instance_types.models import InstanceType
from models_registry.versions.models import ModelVersion, VersionState
from models_registry.versions.planning.engine_arguments import nodes_per_cell, render_engine_plan
from tests.fleet.rows import NOW
from tests.models_registry.rows import DIGEST, DOCUMENT, STEP_COST

pytestmark = [pytest.mark.django_db, pytest.mark.slow]

WEIGHTS = Weights(uri="file:///weights", digest="sha256:0123456789abcdef")
GGUF = Weights(uri="file:///gguf", digest="sha256:fedcba9876543210", engine="llama-cpp")
TRITON = replace(GGUF, engine="triton")


def seed(weights: Weights | None = WEIGHTS, *, port: int = 8080) -> None:
    demo_seed(weights=weights, ingress_port=port, now=NOW)


def version_of(deployment: str) -> ModelVersion:
    return Deployment.objects.get(name=deployment).model_version


def test_two_regions_with_a_warm_spare_each_and_an_address_for_applications() -> None:
    seed()
    assert list(Region.objects.values_list("name", "ingress_url", "spares")) == [
        ("us-east-1", "http://127.0.0.1:8080", {LOCAL: 1}),
        ("us-west-2", "http://127.0.0.1:8081", {LOCAL: 1}),
    ]


def test_what_is_wanted_where() -> None:
    seed()
    assert set(DeploymentRegion.objects.values_list("deployment_id", "region_id", "cells")) == {
        ("smollm2", "us-east-1", 1),
        ("sim-70b", "us-east-1", 2),
        ("sim-70b", "us-west-2", 2),
    }
    assert nodes_per_cell(version_of("sim-70b").spec(), LOCAL) == 2


def test_where_hosts_join_two_of_four_in_a_region_are_left_to_heal_with() -> None:
    demo_seed(weights=None, ingress_port=8080, now=NOW, provider="machines")
    assert set(DeploymentRegion.objects.values_list("deployment_id", "region_id", "cells")) == {
        ("sim-70b", "us-east-1", 1),
        ("sim-70b", "us-west-2", 1),
    }
    assert set(Region.objects.values_list("provider", flat=True)) == {"machines"}


def test_regions_of_a_cloud_are_declared_by_somebody_else_for_models_that_run_there() -> None:
    demo_seed(weights=None, ingress_port=8080, now=NOW, provider="aws")
    assert not Region.objects.exists()
    assert not Deployment.objects.exists()
    version = ModelVersion.objects.get(model="sim-70b", version="1")
    assert nodes_per_cell(version.spec(), "trn1.32xlarge") == 2


@pytest.mark.parametrize(
    ("weights", "engine"), [(WEIGHTS, "vllm"), (GGUF, "llama-cpp"), (TRITON, "triton"), (None, "sim")]
)
def test_every_version_of_it_can_be_run(weights: Weights | None, engine: str) -> None:
    seed(weights)
    machine = InstanceType.objects.get(name=LOCAL).shape()
    plans = {name: render_engine_plan(version_of(name).spec(), machine) for name in ("smollm2", "sim-70b")}
    assert {name: plan.engine for name, plan in plans.items()} == {"smollm2": engine, "sim-70b": "sim"}
    artifact = plans["smollm2"].artifact
    assert (artifact.digest if artifact else None) == (weights.digest if weights else None)


@pytest.mark.parametrize("weights", [WEIGHTS, GGUF, TRITON, None])
def test_every_model_has_a_second_version_that_can_be_rolled_out(weights: Weights | None) -> None:
    seed(weights)
    for deployment in Deployment.objects.all():
        released = ModelVersion.objects.filter(model=deployment.model_version.model, state=VersionState.RELEASED)
        (other,) = released.exclude(pk=deployment.model_version_id)
        assert rollout_propose(deployment=deployment.name, version=other.reference, policy={}).version == other


def test_seeding_again_keeps_what_an_operator_changed() -> None:
    seed()
    DeploymentRegion.objects.filter(deployment="smollm2").update(cells=5)
    Region.objects.update(spares={})
    seed()
    assert DeploymentRegion.objects.get(deployment="smollm2").cells == 5
    assert set(Region.objects.values_list("spares__local.cpu", flat=True)) == {None}


def test_bad_versions_are_validated_whatever_an_earlier_release_called_them() -> None:
    seed()
    bad = ModelVersion.objects.filter(version__startswith="bad-")
    assert set(bad.values_list("state", flat=True)) == {"validated"}
    bad.update(state="draft")
    seed()
    assert set(bad.values_list("state", flat=True)) == {"validated"}


def test_another_port_moves_the_addresses() -> None:
    seed()
    seed(port=9000)
    assert Region.objects.get(name="us-west-2").ingress_url == "http://127.0.0.1:9001"


def test_another_engine_takes_the_place_of_the_one_before() -> None:
    seed()
    assert version_of("smollm2").version == "135m-fp32-01234567"
    seed(None)
    assert version_of("smollm2").version == "sim"


def test_the_version_of_an_earlier_release_is_replaced() -> None:
    seed()
    ModelVersion.objects.filter(pk=version_of("smollm2").pk).update(version="135m-01234567")
    seed()
    assert version_of("smollm2").version == "135m-fp32-01234567"


def test_a_version_that_an_operator_rolled_out_stays() -> None:
    seed()
    chosen = version_of("smollm2")
    chosen.pk, chosen.version = None, "2"
    chosen.save()
    Deployment.objects.filter(name="smollm2").update(model_version=chosen)
    seed()
    assert version_of("smollm2").version == "2"


@pytest.mark.parametrize("step_cost", [STEP_COST, None])
def test_heads_that_were_trained_here_are_a_version_of_their_own_with_its_calibration(step_cost: Any) -> None:
    heads = Heads("file:///heads", DIGEST, DOCUMENT, step_cost)
    for _ in range(2):
        seed(Weights(uri="file:///weights", digest=DIGEST, heads=heads))
    version = ModelVersion.objects.get(version__contains="medusa")
    assert version.calibrations.count() == 1
    assert version.speculation["tokens"] == 2
    assert version.speculation["tokens_per_batch_size"] == ([[1, 1, 0]] if step_cost else [[1, 3, 2], [4, 4, 0]])
    render_engine_plan(version.spec(), InstanceType.objects.get(name=LOCAL).shape())
