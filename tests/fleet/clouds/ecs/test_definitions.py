"""Task definitions of instance types, as golden files, and the calls that start them. `UPDATE_GOLDEN=1` writes them."""

import os
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from fleet.clouds.ecs.definitions import (
    Cluster,
    Start,
    digest_of,
    huge_pages_of,
    start_task,
    task_definition,
)
from fleet.reconcile.planning.states import MachineRole
from models_registry.instance_types.planner import INSTANCE_TYPES

GOLDEN = Path(__file__).with_name("golden")
REGISTRY = "123456789012.dkr.ecr.us-east-1.amazonaws.com/switchyard"
ROLE = "arn:aws:iam::123456789012:role/sw-0123456789ab"
CLUSTER = Cluster(
    name="sw-0123456789ab",
    aws_region="us-east-1",
    install="sw-0123456789ab",
    task_role=f"{ROLE}-node-task",
    ingress_role=f"{ROLE}-ingress-task",
    execution_role=f"{ROLE}-execution",
    image=f"{REGISTRY}/node-agent@sha256:{'a' * 64}",
    ingress_image=f"{REGISTRY}/ingress@sha256:{'b' * 64}",
    log_group="/switchyard/nodes",
    server="https://control.example:8000",
)
NODES = ("trn1.32xlarge", "inf2.48xlarge", "p5.48xlarge", "g6e.48xlarge")


def rendered(instance_type: str, role: MachineRole = MachineRole.NODE) -> str:
    definition = task_definition(INSTANCE_TYPES[instance_type], role, CLUSTER)
    return msgspec.json.format(msgspec.json.encode(definition), indent=1).decode() + "\n"


@pytest.mark.parametrize(
    ("instance_type", "role"),
    [*((kind, MachineRole.NODE) for kind in NODES), ("c7i.2xlarge", MachineRole.INGRESS)],
)
def test_a_task_definition_is_as_its_golden_file(instance_type: str, role: MachineRole) -> None:
    path = GOLDEN / f"{role.value}-{instance_type}.json"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(rendered(instance_type, role))
    assert rendered(instance_type, role) == path.read_text()


@pytest.mark.parametrize(
    ("instance_type", "neuron", "efas", "gpus"),
    [("trn1.32xlarge", 16, 8, 0), ("inf2.48xlarge", 12, 0, 0), ("p5.48xlarge", 0, 32, 8), ("g6e.48xlarge", 0, 4, 8)],
)
def test_every_accelerator_and_every_efa_is_in_the_task(instance_type: str, neuron: int, efas: int, gpus: int) -> None:
    container = task_definition(INSTANCE_TYPES[instance_type], MachineRole.NODE, CLUSTER)["containerDefinitions"][0]
    paths = [one["hostPath"] for one in container["linuxParameters"].get("devices", ())]
    assert sum(path.startswith("/dev/neuron") for path in paths) == neuron
    assert sum(path.startswith("/dev/infiniband/uverbs") for path in paths) == efas
    assert [one["value"] for one in container.get("resourceRequirements", ())] == ([str(gpus)] if gpus else [])
    assert huge_pages_of(instance_type) == 110 * efas


def test_a_definition_is_registered_again_only_if_its_content_changes() -> None:
    shape = INSTANCE_TYPES["trn1.32xlarge"]
    one = task_definition(shape, MachineRole.NODE, CLUSTER)
    other = task_definition(shape, MachineRole.NODE, replace(CLUSTER, image=f"{REGISTRY}/node-agent@sha256:{'c' * 64}"))
    assert digest_of(one) == digest_of(dict(reversed(one.items())))
    assert digest_of(one) != digest_of(other)


def test_a_type_of_unknown_memory_is_refused() -> None:
    with pytest.raises(ValueError, match="memory of trn1"):
        task_definition(replace(INSTANCE_TYPES["trn1.32xlarge"], host_memory_gib=None), MachineRole.NODE, CLUSTER)


def test_a_unit_of_more_than_ten_is_started_by_several_calls() -> None:
    start = Start("u-12", 3, "token", "family:7", tuple(f"arn-{index}" for index in range(12)))
    calls = start_task(start, CLUSTER)
    assert [len(one["containerInstances"]) for one in calls] == [10, 2]
    assert {(one["startedBy"], one["taskDefinition"]) for one in calls} == {("token", "family:7")}
    with pytest.raises(ValueError, match="does not match"):
        start_task(replace(start, unit="U 12"), CLUSTER)
