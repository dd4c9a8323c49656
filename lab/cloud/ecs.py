"""Tasks of ECS by the cloud's clock, on moto's clusters, container instances and task definitions.

moto's tasks run immediately, move toward their end whenever they are described, and never fail to start. Here they
are pending first, stop slowly, and are forgotten an hour later; `StartTask` refuses single container instances within
an answer of 200, as ECS does; the tasks of a terminated machine stop. Each change is an event of EventBridge.

Where an ECS agent runs on the machine (`lab.cloud.ecs_agents`), it reports when a task runs and when it has stopped."""

import json
import math
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from lab.cloud.wire import Call, Refused
from lab.cloud.world import WATCHES, World, handles, moment

SERVICE = "ecs"
INSTANCES_MOST = 10
DESCRIBED_MOST = 100
CONNECTED_S = 10.0
"""After its last poll, an ECS agent counts as connected."""
TASK_STATE_CHANGE = "ECS Task State Change"


@dataclass
class Task:
    """`runs`, `stops` and `stopped`: when it runs, was asked to stop, and is gone; None: not. Infinite until the ECS
    agent of its machine has reported it. `keys`: last part of the path of its role's keys."""

    arn: str
    region: str
    cluster: str
    definition: str
    instance: str
    started_by: str
    group: str
    tags: list[dict[str, str]]
    overrides: dict[str, Any]
    created: float
    runs: float
    stops: float | None = None
    stopped: float | None = None
    code: str = ""
    reason: str = ""
    container_reason: str = ""
    keys: str = field(default_factory=lambda: secrets.token_hex(16), repr=False)
    told: str = field(default="", repr=False)

    def status_at(self, now: float) -> str:
        if self.stopped is not None and now >= self.stopped:
            return "STOPPED"
        if self.stops is not None:
            return "STOPPING"
        return "RUNNING" if now >= self.runs else "PENDING"

    def described(self, now: float) -> dict[str, Any]:
        status = self.status_at(now)
        answer = {
            "taskArn": self.arn,
            "clusterArn": self.cluster,
            "taskDefinitionArn": self.definition,
            "containerInstanceArn": self.instance,
            "startedBy": self.started_by,
            "group": self.group,
            "tags": self.tags,
            "overrides": self.overrides,
            "lastStatus": status,
            "desiredStatus": "RUNNING" if self.stops is None else "STOPPED",
            "launchType": "EC2",
            "createdAt": moment(self.created),
            "version": 1,
        }
        if now >= self.runs:
            answer["startedAt"] = moment(self.runs)
        if self.stops is not None:
            answer |= {"stopCode": self.code, "stoppedReason": self.reason, "stoppingAt": moment(self.stops)}
            answer |= {"containers": [{"name": "agent", "reason": self.container_reason}]}
        if status == "STOPPED":
            answer["stoppedAt"] = moment(self.stopped or now)
        return answer

    def end(self, at: float, within_s: float, code: str, reason: str) -> None:
        if self.stops is None:
            self.stops, self.stopped, self.code, self.reason = at, at + within_s, code, reason


def register_instances(world: World, cluster: str, machines: list[str], region: str = "us-east-1") -> list[str]:
    """What the ECS agent of each machine does at its first boot. Returns the ARNs of the container instances, which
    have the memory of their types."""
    arns = []
    for machine in machines:
        document = json.dumps({"instanceId": machine})
        found = world.client(SERVICE, region).register_container_instance(
            cluster=cluster, instanceIdentityDocument=document
        )["containerInstance"]["containerInstanceArn"]
        row = _instances(world, region, cluster)[found.rpartition("/")[2]]
        for resource in (*row.registered_resources, *row.remaining_resources):
            if resource["name"] == "MEMORY":
                resource["integerValue"] = _memory_mib(world, region, machine)
        arns.append(found)
    return arns


def _memory_mib(world: World, region: str, machine: str) -> int:
    kind = world.backend("ec2", region).get_instance(machine).instance_type
    answer = world.client("ec2", region).describe_instance_types(InstanceTypes=[kind])["InstanceTypes"][0]
    return int(answer["MemoryInfo"]["SizeInMiB"] * 0.97)


def _instances(world: World, region: str, cluster: str) -> dict[str, Any]:
    found: dict[str, Any] = world.backend(SERVICE, region).container_instances.get(cluster.rpartition("/")[2], {})
    return found


def row_id(arn: str) -> str:
    return arn.rpartition("/")[2]


def _names_of(arn: str) -> tuple[str, str, str]:
    """Account, region and cluster of a container instance."""
    _, _, _, region, account, path = arn.split(":")
    return account, region, path.split("/")[1]


def _row_of(world: World, arn: str) -> Any:
    _, region, cluster = _names_of(arn)
    return _instances(world, region, cluster).get(row_id(arn))


def _cluster(world: World, call: Call) -> str:
    name = (call.params.get("cluster") or "default").rpartition("/")[2]
    if name not in world.backend(SERVICE, call.region).clusters:
        raise Refused("ClusterNotFoundException", "Cluster not found.")
    return name


def _tasks(world: World, call: Call) -> Iterator[Task]:
    cluster = _cluster(world, call)
    arn = world.backend(SERVICE, call.region).clusters[cluster].arn
    return (task for task in world.tasks.values() if task.cluster == arn)


@handles(SERVICE, "StartTask")
def start_task(world: World, call: Call) -> dict[str, Any]:
    cluster, asked = _cluster(world, call), call.params["containerInstances"]
    if not 0 < len(asked) <= INSTANCES_MOST:
        raise Refused("InvalidParameterException", "Container instances size must be from 1 to 10.")
    if len(call.params.get("startedBy") or "") > 36:
        raise Refused("InvalidParameterException", "startedBy must be at most 36 characters.")
    backend = world.backend(SERVICE, call.region)
    definition = _definition(backend, call.params["taskDefinition"])
    if definition.status != "ACTIVE":
        raise Refused("ClientException", "TaskDefinition is inactive")
    started, failures = [], []
    for each in asked:
        row = _instances(world, call.region, cluster).get(each.rpartition("/")[2])
        reason = _why_not(row, definition)
        if reason or row is None:
            failures.append({"arn": each, "reason": reason})
            continue
        now = world.clock.now()
        task = Task(
            arn=f"{row.container_instance_arn.replace(':container-instance/', ':task/').rpartition('/')[0]}/"
            f"{secrets.token_hex(16)}",
            region=call.region,
            cluster=backend.clusters[cluster].arn,
            definition=definition.arn,
            instance=row.container_instance_arn,
            started_by=call.params.get("startedBy") or "",
            group=call.params.get("group") or "",
            tags=list(call.params.get("tags") or ()),
            overrides=dict(call.params.get("overrides") or {}),
            created=now,
            runs=math.inf if row.container_instance_arn in world.ecs_agents else now + world.delays.task_pending_s,
        )
        world.tasks[task.arn] = task
        _count(row, definition, 1)
        started.append(task)
    settle(world)
    return {"tasks": [task.described(world.clock.now()) for task in started], "failures": failures}


def _definition(backend: Any, name: str) -> Any:
    try:
        return backend.describe_task_definition(name)
    except Exception:
        raise Refused("ClientException", "TaskDefinition not found.") from None


def _memory_of(definition: Any) -> int:
    return sum(int(one.get("memory") or one.get("memoryReservation") or 0) for one in definition.container_definitions)


def _free_mib(row: Any) -> int:
    return next(int(one["integerValue"]) for one in row.remaining_resources if one["name"] == "MEMORY")


def _count(row: Any, definition: Any, by: int) -> None:
    row.running_tasks_count += by
    for resource in row.remaining_resources:
        if resource["name"] == "MEMORY":
            resource["integerValue"] -= by * _memory_of(definition)


def _why_not(row: Any, definition: Any) -> str:
    if row is None:
        return "MISSING"
    if row.status != "ACTIVE":
        return "INACTIVE"
    if not row.agent_connected:
        return "AGENT"
    wanted = [one["expression"] for one in definition.placement_constraints or ()]
    if any(one != f"attribute:ecs.instance-type == {row.attributes['ecs.instance-type']}" for one in wanted):
        return "ATTRIBUTE"
    return "RESOURCE:MEMORY" if _free_mib(row) < _memory_of(definition) else ""


@handles(SERVICE, "StopTask")
def stop_task(world: World, call: Call) -> dict[str, Any]:
    wanted = call.params["task"].rpartition("/")[2]
    for task in _tasks(world, call):
        if task.arn.endswith(f"/{wanted}"):
            reason = call.params.get("reason") or "Task stopped by user"
            within_s = math.inf if task.instance in world.ecs_agents else world.delays.task_stopping_s
            task.end(world.clock.now(), within_s, "UserInitiated", reason)
            settle(world)
            return {"task": task.described(world.clock.now())}
    raise Refused("InvalidParameterException", "The referenced task was not found.")


@handles(SERVICE, "TagResource")
def tag_resource(world: World, call: Call) -> dict[str, Any]:
    """Of a task; moto tags everything else."""
    arn = call.params["resourceArn"]
    task = world.tasks.get(arn)
    if task is None and ":task/" not in arn:
        return world.moto(call)
    if task is None:
        raise Refused("InvalidParameterException", "The specified task was not found.")
    if task.status_at(world.clock.now()) == "STOPPED":
        raise Refused("InvalidParameterException", "The specified task is stopped.")
    given = {one["key"]: one.get("value", "") for one in call.params["tags"]}
    tags = {one["key"]: one["value"] for one in task.tags} | given
    task.tags = [{"key": key, "value": value} for key, value in tags.items()]
    return {}


@handles(SERVICE, "DescribeTasks")
def describe_tasks(world: World, call: Call) -> dict[str, Any]:
    asked = call.params["tasks"]
    if not 0 < len(asked) <= DESCRIBED_MOST:
        raise Refused("InvalidParameterException", "Tasks must have from 1 to 100 entries.")
    now = world.clock.now()
    known = {task.arn.rpartition("/")[2]: task for task in _tasks(world, call) if _is_visible(world, task)}
    found, failures = [], []
    for each in asked:
        task = known.get(each.rpartition("/")[2])
        if task is None:
            failures.append({"arn": f"arn:aws:ecs:{call.region}:{world.account}:task/{each}", "reason": "MISSING"})
            continue
        answer = task.described(now)
        if "TAGS" not in (call.params.get("include") or ()):
            del answer["tags"]
        found.append(answer)
    return {"tasks": found, "failures": failures}


@handles(SERVICE, "ListTasks")
def list_tasks(world: World, call: Call) -> dict[str, Any]:
    """In pages. `startedBy` allows no other filter but the status."""
    asked = call.params
    if asked.get("startedBy") and (asked.get("family") or asked.get("containerInstance")):
        raise Refused("InvalidParameterException", "startedBy must be the only filter.")
    desired = asked.get("desiredStatus") or "RUNNING"
    arns = sorted(
        task.arn
        for task in _tasks(world, call)
        if _is_visible(world, task)
        and ("RUNNING" if task.stops is None else "STOPPED") == desired
        and asked.get("startedBy") in (None, "", task.started_by)
        and (asked.get("containerInstance") or "").rpartition("/")[2] in ("", task.instance.rpartition("/")[2])
    )
    first, most = int(asked.get("nextToken") or 0), int(asked.get("maxResults") or 100)
    more = {"nextToken": str(first + most)} if len(arns) > first + most else {}
    return {"taskArns": arns[first : first + most], **more}


def _is_visible(world: World, task: Task) -> bool:
    return world.clock.now() >= task.created + world.delays.task_visible_s


def settle(world: World) -> None:
    """Ends the tasks of terminated machines, which are container instances no longer, frees the room of stopped ones,
    forgets old ones, and sends events."""
    now = world.clock.now()
    for arn, polled_at in world.ecs_agents.items():
        if (row := _row_of(world, arn)) is not None:
            row.agent_connected = now - polled_at < CONNECTED_S
    for task in list(world.tasks.values()):
        backend = world.backend(SERVICE, task.region)
        row = _instances(world, task.region, task.cluster).get(task.instance.rpartition("/")[2])
        if row is None or _is_over(world, row.ec2_instance_id):
            machine = row.ec2_instance_id if row is not None else "unknown"
            task.end(now, 0.0, "TerminationNotice", f"Host EC2 (instance {machine}) terminated.")
            task.stopped = min(task.stopped or now, now)
        status = task.status_at(now)
        if status == task.told:
            continue
        task.told = status
        if status == "STOPPED" and row is not None:
            _count(row, _definition(backend, task.definition), -1)
        _send_event(world, task, now)
    for arn in list(world.ecs_agents):
        row = _row_of(world, arn)
        if row is not None and _is_over(world, row.ec2_instance_id):
            _, region, cluster = _names_of(arn)
            del world.ecs_agents[arn], world.backend(SERVICE, region).container_instances[cluster][row_id(arn)]
    for arn, task in list(world.tasks.items()):
        if task.stopped is not None and now >= task.stopped + world.delays.task_forgotten_s:
            del world.tasks[arn]


def _is_over(world: World, machine: str) -> bool:
    found = world.machines.get(machine)
    return found is None or found.ending is not None


def _send_event(world: World, task: Task, now: float) -> None:
    detail = {name: _plain(value) for name, value in task.described(now).items()}
    event = {
        "Source": "aws.ecs",
        "DetailType": TASK_STATE_CHANGE,
        "Resources": [task.arn],
        "Detail": json.dumps(detail),
        "Time": now,
    }
    world.backend("events", task.region).put_events([event])


def _plain(value: Any) -> Any:
    return value.isoformat().replace("+00:00", "Z") if hasattr(value, "isoformat") else value


WATCHES.append(settle)
