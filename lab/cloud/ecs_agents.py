"""The cloud's side of ECS agents that run on machines: what each is to run, what it reports, and the keys of a task's
role, at 169.254.170.2 inside the machine's network. The keys are real keys of this cloud, of a session named after the
task, as AWS names it."""

import json
import math
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

from lab.cloud.ecs import SERVICE, Task, register_instances, row_id
from lab.cloud.imds import ROLE_KEYS_FOR_S, Reply, serve_replies
from lab.cloud.world import World

KEYS_AT = "/v2/credentials/"
STOP_TIMEOUT_S = 30
"""ECS's default."""


def agent_register(world: World, cluster: str, machine: str) -> str:
    """Makes a machine a container instance, if it is not one yet; returns its ARN. It calls the cloud itself, so it
    must not be called with the cloud's lock. Raises LookupError if there is no such machine."""
    found = world.machines.get(machine)
    if found is None:
        raise LookupError(f"there is no machine {machine}")
    known = (arn for arn in world.ecs_agents if _machine_of(world, found.region, cluster, arn) == machine)
    arn = next(known, "") or register_instances(world, cluster, [machine], found.region)[0]
    world.ecs_agents[arn] = world.clock.now()
    return arn


def _machine_of(world: World, region: str, cluster: str, arn: str) -> str:
    row = world.backend(SERVICE, region).container_instances.get(cluster, {}).get(row_id(arn))
    return row.ec2_instance_id if row is not None else ""


def agent_poll(world: World, arn: str, states: Mapping[str, Mapping[str, str]]) -> list[dict[str, Any]]:
    """Stores what an ECS agent reports of its tasks, by ID, and returns what it is to run. Raises LookupError if it is
    no container instance any more."""
    if arn not in world.ecs_agents:
        raise LookupError(f"{arn} is not a container instance")
    now = world.clock.now()
    world.ecs_agents[arn] = now
    for task in _tasks_on(world, arn):
        said = states.get(row_id(task.arn), {})
        if said.get("status") in ("RUNNING", "STOPPED"):
            task.runs = min(task.runs, now)
        if said.get("status") == "STOPPED":
            task.end(now, 0.0, said.get("code", "EssentialContainerExited"), said.get("reason", ""))
            task.stopped = min(task.stopped if task.stopped is not None else math.inf, now)
    world.settle()
    return [_order(world, task) for task in _tasks_on(world, arn) if task.status_at(now) != "STOPPED"]


def _tasks_on(world: World, arn: str) -> Iterator[Task]:
    return (task for task in list(world.tasks.values()) if task.instance == arn)


def _order(world: World, task: Task) -> dict[str, Any]:
    definition = world.backend(SERVICE, task.region).describe_task_definition(task.definition)
    [container] = definition.container_definitions
    overrides = task.overrides.get("containerOverrides") or ()
    stated = [container, *(one for one in overrides if one["name"] == container["name"])]
    volumes = {one["name"]: one["host"]["sourcePath"] for one in definition.volumes}
    return {
        "task": row_id(task.arn),
        "status": task.status_at(world.clock.now()),
        "image": container["image"],
        "is_pulled": container["image"] not in world.unpullable,
        "environment": {each["name"]: each["value"] for one in stated for each in one.get("environment") or ()},
        "devices": [one["hostPath"] for one in (container.get("linuxParameters") or {}).get("devices") or ()],
        "mounts": {one["containerPath"]: volumes[one["sourceVolume"]] for one in container.get("mountPoints") or ()},
        "keys": f"{KEYS_AT}{task.keys}",
        "stop_timeout_s": container.get("stopTimeout") or STOP_TIMEOUT_S,
    }


class TaskKeys:
    """The answers for the tasks on one machine. Threads may share it."""

    def __init__(self, world: World, machine: str) -> None:
        self._world, self._machine = world, machine
        self._lock = threading.Lock()

    def reply(self, method: str, path: str, _: Mapping[str, str]) -> Reply:
        with self._lock, self._world.settled():
            for task in list(self._world.tasks.values()):
                row = self._world.backend(SERVICE, task.region).container_instances
                here = row.get(task.cluster.rpartition("/")[2], {}).get(row_id(task.instance))
                is_ours = here is not None and here.ec2_instance_id == self._machine
                if is_ours and method == "GET" and path == f"{KEYS_AT}{task.keys}":
                    return 200, json.dumps(self._keys(task)), {"Content-Type": "application/json"}
        return 404, "", {}

    def _keys(self, task: Task) -> dict[str, str]:
        definition = self._world.backend(SERVICE, task.region).describe_task_definition(task.definition)
        held = self._world.backend("sts", "aws").assume_role(
            region_name=task.region, role_session_name=row_id(task.arn), role_arn=definition.task_role_arn, policy="",
            duration=ROLE_KEYS_FOR_S, external_id="",
        )  # fmt: skip
        return {
            "RoleArn": definition.task_role_arn,
            "AccessKeyId": held.access_key_id,
            "SecretAccessKey": held.secret_access_key,
            "Token": held.session_token,
            "Expiration": held.expiration.strftime("%Y-%m-%dT%H:%M:%SZ"),
        }


def serve_task_keys(world: World, machine: str, listener: socket.socket) -> AbstractContextManager[None]:
    """Answers a machine's tasks at a socket that is bound already; closes it at the end."""
    return serve_replies(listener, TaskKeys(world, machine).reply, f"task-keys-{machine}")
