"""Renders the task definitions of node agents and ingresses, and the parameters of `StartTask`. Pure: no client, clock
or row. A definition follows from the instance type, the role and the region's stack alone, so that all tasks of a type
are alike and a spare fits any cell. `digest_of` names its content: an unchanged definition is registered once.

A task owns its container instance: host network, all accelerators, all EFAs, and a reservation of memory that leaves no
room for a second one. ECS must be told each device; nothing is privileged. Huge pages cannot be set by a task, because
`vm.nr_hugepages` belongs to the host: the launch template of `deploy/aws/ecs.yaml` reserves them, and the task mounts
them. There is no init process: the entrypoint of the images (`deploy/images/agent.sh`) stops all processes of its
container if it is PID 1. No value is secret, because everybody who may describe tasks can read them: agents prove their
identity by the task's role (`fleet.agents.services.enrolment`)."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import msgspec

from engine_agent.protocol.ports import CLOUD_INGRESS, ingress_ports, metrics_port
from fleet.clouds.aws.launch import TAG_ATTEMPT, TAG_INSTALL, TAG_UNIT, network_of
from fleet.reconcile.planning.states import MachineRole
from models_registry.instance_types.planner import NEURON, NVIDIA, InstanceShape

CONTAINER = "agent"
TAG_DIGEST = "switchyard:digest"
CACHE = "/mnt/switchyard"
"""The disks of the instance, on the host and in the task: the cache outlives tasks."""
HUGE_PAGES = "/dev/hugepages"
HUGE_PAGES_PER_EFA = 110
"""Of 2 MiB. AWS's guide on EFA and containers asks for 5,128 of them for 32 EFAs and some for the driver."""
MIB = 1024
MEMORY_SHARE = 0.85
"""Of the host's memory, reserved for the task: the rest is the operating system's, the ECS agent's and huge pages'."""
SHARED_MEMORY_SHARE = 0.25
SHARED_MEMORY_MIB_MOST = 256 * MIB
STOP_TIMEOUT_S = 120
"""From SIGTERM to SIGKILL. Cells are drained before, so that agents only stop idle engines."""
OPEN_FILES = 1_048_576
STACK_BYTES = 64 * MIB * MIB
LOG_BUFFER = "16m"
"""Non-blocking: an agent never waits for CloudWatch Logs, and loses lines instead."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """An ECS cluster, from the outputs of its stack (`deploy/aws/ecs.yaml`). Roles are ARNs. `image`: of the node
    agent, with a digest or an immutable tag; engines are in it or arrive as builds. `log_group`: of CloudWatch Logs.
    `server` and `pin`: as in `fleet.clouds.aws.launch.Boot`."""

    name: str
    aws_region: str
    install: str
    task_role: str
    ingress_role: str
    execution_role: str
    image: str
    ingress_image: str
    log_group: str
    server: str
    pin: str = ""


Request = dict[str, Any]


def task_definition(shape: InstanceShape, role: MachineRole, cluster: Cluster) -> Request:
    """Returns the parameters of `RegisterTaskDefinition`, without tags. Raises ValueError if the devices or the memory
    of the type are unknown."""
    if not shape.host_memory_gib:
        raise ValueError(f"the memory of {shape.name} is not known; a task cannot reserve it")
    is_node = role is MachineRole.NODE
    efas = len(network_of(shape.name).efa_cards) if is_node else 0
    return {
        "family": family_of(shape.name, role, cluster.install),
        "networkMode": "host",
        "taskRoleArn": cluster.task_role if is_node else cluster.ingress_role,
        "executionRoleArn": cluster.execution_role,
        "containerDefinitions": [_container(shape, role, cluster, efas)],
        "volumes": [
            {"name": "cache", "host": {"sourcePath": CACHE}},
            *([{"name": "huge-pages", "host": {"sourcePath": HUGE_PAGES}}] if efas else []),
        ],
        "placementConstraints": [
            {"type": "memberOf", "expression": f"attribute:ecs.instance-type == {shape.name}"},
        ],
    }


def family_of(instance_type: str, role: MachineRole, install: str) -> str:
    return f"{install}-{role.value}-{instance_type.replace('.', '-')}"


def _container(shape: InstanceShape, role: MachineRole, cluster: Cluster, efas: int) -> Request:
    memory_mib = int((shape.host_memory_gib or 0) * MIB)
    is_node = role is MachineRole.NODE
    gpus = shape.chips if is_node and shape.vendor == NVIDIA else 0
    mounts = [{"sourceVolume": "cache", "containerPath": CACHE, "readOnly": False}]
    if efas:
        mounts.append({"sourceVolume": "huge-pages", "containerPath": HUGE_PAGES, "readOnly": False})
    return {
        "name": CONTAINER,
        "image": cluster.image if is_node else cluster.ingress_image,
        "essential": True,
        "memoryReservation": int(memory_mib * MEMORY_SHARE),
        "stopTimeout": STOP_TIMEOUT_S,
        "environment": [{"name": name, "value": value} for name, value in _environment(cluster).items()],
        "mountPoints": mounts,
        **({} if is_node else {"portMappings": list(_ingress_port_mappings())}),
        "linuxParameters": {
            "sharedMemorySize": min(int(memory_mib * SHARED_MEMORY_SHARE), SHARED_MEMORY_MIB_MOST),
            **({"devices": devices} if (devices := list(_devices(shape, efas)) if is_node else []) else {}),
        },
        "ulimits": [
            {"name": "memlock", "softLimit": -1, "hardLimit": -1},
            {"name": "nofile", "softLimit": OPEN_FILES, "hardLimit": OPEN_FILES},
            {"name": "stack", "softLimit": STACK_BYTES, "hardLimit": STACK_BYTES},
        ],
        **({"resourceRequirements": [{"type": "GPU", "value": str(gpus)}]} if gpus else {}),
        "logConfiguration": {
            "logDriver": "awslogs",
            "options": {
                "awslogs-group": cluster.log_group,
                "awslogs-region": cluster.aws_region,
                "awslogs-stream-prefix": role.value,
                "mode": "non-blocking",
                "max-buffer-size": LOG_BUFFER,
            },
        },
    }


def _ingress_port_mappings() -> Iterator[Request]:
    """With the host's network they map nothing: ECS starts no second task with one of these ports there. Metrics are on
    loopback."""
    for port in sorted({*ingress_ports(CLOUD_INGRESS).values()} - {metrics_port(CLOUD_INGRESS)}):
        yield {"containerPort": port, "hostPort": port, "protocol": "tcp"}


def _environment(cluster: Cluster) -> dict[str, str]:
    return {
        "AWS_REGION": cluster.aws_region,
        "SWITCHYARD_CACHE": f"{CACHE}/switchyard-cache",
        "SWITCHYARD_INSTALL": cluster.install,
        "SWITCHYARD_PIN": cluster.pin,
        "SWITCHYARD_SERVER": cluster.server,
    }


def _devices(shape: InstanceShape, efas: int) -> Iterator[Request]:
    """GPUs are mapped by ECS itself (`resourceRequirements`)."""
    neuron = shape.chips if shape.vendor == NEURON else 0
    for path in (
        *(f"/dev/neuron{index}" for index in range(neuron)),
        *(f"/dev/infiniband/uverbs{index}" for index in range(efas)),
    ):
        yield {"hostPath": path, "containerPath": path, "permissions": ["read", "write"]}


def huge_pages_of(instance_type: str) -> int:
    """Returns how many pages of 2 MiB the host must reserve (`vm.nr_hugepages`); 0 without EFA. Raises ValueError if
    the type is not in the table."""
    return HUGE_PAGES_PER_EFA * len(network_of(instance_type).efa_cards)


def digest_of(definition: Mapping[str, Any]) -> str:
    """Returns the name of a definition's content."""
    return sha256(msgspec.json.encode(definition, order="sorted")).hexdigest()[:32]


_OF_TASKS = ("networkMode", "taskRoleArn", "executionRoleArn")
_OF_CONTAINERS = ("name", "image", "command", "entryPoint", "user", "privileged", "secrets", "environmentFiles")
"""ECS returns these as they were registered. It adds defaults to others."""


def runs_the_same(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Whether a registered definition runs the same programs as the same roles, with the same environment and files of
    the host."""
    there, ours = found.get("containerDefinitions") or (), wanted["containerDefinitions"]
    if len(there) != len(ours) or any(found.get(name) != wanted.get(name) for name in _OF_TASKS):
        return False
    if _sources(found) != _sources(wanted):
        return False
    pairs = list(zip(there, ours, strict=True))
    return all(
        (one.get(name) or None) == (other.get(name) or None) for one, other in pairs for name in _OF_CONTAINERS
    ) and all(
        _named(one, "environment", "name", "value") == _named(other, "environment", "name", "value")
        and _named(one, "mountPoints", "containerPath", "sourceVolume")
        == _named(other, "mountPoints", "containerPath", "sourceVolume")
        for one, other in pairs
    )


def _sources(definition: Mapping[str, Any]) -> dict[str, str]:
    return {one["name"]: (one.get("host") or {}).get("sourcePath", "") for one in definition.get("volumes") or ()}


def _named(container: Mapping[str, Any], member: str, name: str, value: str) -> dict[str, str]:
    return {one.get(name, ""): one.get(value, "") for one in container.get(member) or ()}


INSTANCES_PER_CALL = 10
"""ECS's limit for `StartTask`."""
_UNIT = re.compile(r"[a-z0-9-]{1,64}")


@dataclass(frozen=True, slots=True)
class Start:
    """One try of a unit. `instances`: container instances by subject, in order."""

    unit: str
    number: int
    started_by: str
    definition: str
    instances: tuple[str, ...]


def start_task(start: Start, cluster: Cluster) -> list[Request]:
    """Returns the parameters of the calls of an attempt: one for up to `INSTANCES_PER_CALL` container instances. Raises
    ValueError if the unit has another form."""
    if not _UNIT.fullmatch(start.unit):
        raise ValueError(f"unit {start.unit!r} does not match {_UNIT.pattern}")
    at = range(0, len(start.instances), INSTANCES_PER_CALL)
    return [_start_call(start, start.instances[first : first + INSTANCES_PER_CALL], cluster) for first in at]


def _start_call(start: Start, instances: Sequence[str], cluster: Cluster) -> Request:
    tags = {TAG_INSTALL: cluster.install, TAG_UNIT: start.unit, TAG_ATTEMPT: str(start.number)}
    environment = [{"name": "SWITCHYARD_UNIT", "value": start.unit}]
    return {
        "cluster": cluster.name,
        "taskDefinition": start.definition,
        "containerInstances": list(instances),
        "startedBy": start.started_by,
        "group": cluster.install,
        "enableECSManagedTags": True,
        "overrides": {"containerOverrides": [{"name": CONTAINER, "environment": environment}]},
        "tags": [{"key": key, "value": value} for key, value in tags.items()],
    }
