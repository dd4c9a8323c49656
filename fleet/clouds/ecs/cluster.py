"""Reads and changes an ECS cluster: its container instances with their network nodes, tasks, and revisions of task
definitions. Every function raises `fleet.clouds.aws.calls.CallFailed` if AWS did not confirm it. Writes no row."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fleet.clouds.aws import calls
from fleet.clouds.aws.launch import TAG_ATTEMPT, TAG_INSTALL, TAG_UNIT
from fleet.clouds.ecs.definitions import TAG_DIGEST, digest_of, runs_the_same
from fleet.clouds.planning.call_budget import TOPOLOGY_CALL, path_of
from fleet.clouds.planning.starts import WHY_MOST
from fleet.clouds.planning.tasks import ContainerInstance, TaskSeen
from fleet.placement.planning.distance import Path

PAGE = 100
"""Of lists, and IDs of one describe call: ECS's limit."""
PAGES_MOST = 100
PATH = "switchyard.path"
"""The attribute of a container instance with its network nodes, widest first, divided by slashes."""
ATTRIBUTES_PER_CALL = 10
ATTRIBUTE_MOST = 128
MISSING = "MISSING"
ACTIVE = "ACTIVE"
"""Of revisions: one that was deregistered may be described for a while."""


def _ecs(operation: str, region: str, *members: str, **params: Any) -> dict[str, Any]:
    """Makes a call. `members`: of every complete answer. boto3 returns an answer without members for a JSON text that
    was cut off, which must not count as an empty list. Raises Unanswered then."""
    answer = calls.call("ecs", operation, region, **params)
    if missing := [name for name in members if name not in answer]:
        raise calls.Unanswered("", f"the answer of {operation} has no {', '.join(missing)}")
    return answer


def _list_arns(operation: str, member: str, region: str, cluster: str, **params: Any) -> Iterator[str]:
    token = ""
    for _ in range(PAGES_MOST):
        more = {"nextToken": token} if token else {}
        page = _ecs(operation, region, member, cluster=cluster, maxResults=PAGE, **params, **more)
        yield from page[member]
        token = page.get("nextToken") or ""
        if not token:
            return
    raise calls.Unanswered("", f"{operation} has more than {PAGES_MOST} pages")


def _batches(ids: Sequence[str], most: int) -> Iterator[list[str]]:
    for at in range(0, len(ids), most):
        yield list(ids[at : at + most])


def instances_read(region: str, cluster: str) -> list[ContainerInstance]:
    """Returns the container instances of a cluster, without those that are being registered or removed."""
    arns = [
        arn
        for status in ("ACTIVE", "DRAINING")
        for arn in _list_arns("ListContainerInstances", "containerInstanceArns", region, cluster, status=status)
    ]
    return [
        _container_instance(one)
        for batch in _batches(arns, PAGE)
        for one in _ecs(
            "DescribeContainerInstances", region, "containerInstances", cluster=cluster, containerInstances=batch
        )["containerInstances"]
    ]


def _container_instance(found: Mapping[str, Any]) -> ContainerInstance:
    attributes = {one["name"]: one.get("value") or "" for one in found.get("attributes") or ()}
    free = {one["name"]: one for one in found.get("remainingResources") or ()}
    zone = attributes.get("ecs.availability-zone", "")
    path = tuple(part for part in attributes.get(PATH, "").split("/") if part)
    return ContainerInstance(
        arn=found["containerInstanceArn"],
        machine=found.get("ec2InstanceId") or "",
        instance_type=attributes.get("ecs.instance-type", ""),
        zone=zone,
        path=path or ((zone,) if zone else ()),
        status=found.get("status") or "",
        connected=bool(found.get("agentConnected")),
        memory_mib=int(free.get("MEMORY", {}).get("integerValue") or 0),
    )


def instances_place(region: str, cluster: str, instances: Sequence[ContainerInstance]) -> tuple[ContainerInstance, ...]:
    """Requests the network nodes of up to 100 container instances and stores them as attributes, so that later launches
    and other tools read them without another call. Returns the instances with their places."""
    asked = [one.machine for one in instances if one.machine][:PAGE]
    if not asked:
        return tuple(instances)
    answer = calls.call("ec2", TOPOLOGY_CALL, region, InstanceIds=asked)
    paths = {one["InstanceId"]: _place_of(one) for one in answer["Instances"]}
    placed = tuple(replace(one, path=paths.get(one.machine, one.path)) for one in instances)
    attributes = [
        {"name": PATH, "value": "/".join(one.path)[:ATTRIBUTE_MOST], "targetType": "container-instance",
         "targetId": short_id(one.arn)}
        for one in placed
        if one.machine in paths
    ]  # fmt: skip
    for at in range(0, len(attributes), ATTRIBUTES_PER_CALL):
        _ecs("PutAttributes", region, cluster=cluster, attributes=attributes[at : at + ATTRIBUTES_PER_CALL])
    return placed


def _place_of(instance: Mapping[str, Any]) -> Path:
    zone = instance.get("ZoneId") or instance["AvailabilityZone"]
    return path_of(zone, instance.get("NetworkNodes") or (), instance.get("CapacityBlockId") or "")


def addresses_of(region: str, machines: Collection[str]) -> dict[str, str]:
    """Returns the private address of each machine, from EC2: attributes of container instances are written by the
    machines themselves and prove nothing."""
    filters = [{"Name": "instance-id", "Values": sorted(machines)}]
    return {
        one["InstanceId"]: one.get("PrivateIpAddress", "")
        for page in calls.pages("DescribeInstances", region, Filters=filters, MaxResults=PAGE)
        for reservation in page["Reservations"]
        for one in reservation["Instances"]
    }


# Tasks.


def short_id(arn: str) -> str:
    return arn.rpartition("/")[2]


def tasks_start(region: str, request: Mapping[str, Any]) -> tuple[list[TaskSeen], list[str]]:
    """Makes one call of `StartTask`. Returns the started tasks, and the reason of each container instance that ECS
    refused in an answer of 200."""
    answer = _ecs("StartTask", region, "tasks", "failures", **request)
    tasks, failures = [_task(one) for one in answer["tasks"]], answer["failures"]
    answered = [
        short_id(arn) for arn in (*(one.instance for one in tasks), *(one.get("arn") or "" for one in failures))
    ]
    if sorted(answered) != sorted(short_id(arn) for arn in request["containerInstances"]):
        raise calls.Unanswered("", "the answer of StartTask does not cover every container instance once")
    reasons = [f"{one.get('reason') or 'no reason'} of {short_id(one.get('arn') or '')}" for one in failures]
    return tasks, reasons


def tasks_found(region: str, cluster: str, started_by: str) -> list[TaskSeen]:
    """Returns the tasks with this `startedBy`, stopped ones of the last hour included. ECS allows no second filter with
    it and lists running tasks then, so that stopped ones come from the list of all."""
    arns = {*_list_arns("ListTasks", "taskArns", region, cluster, startedBy=started_by)}
    arns |= {*_list_arns("ListTasks", "taskArns", region, cluster, desiredStatus="STOPPED")}
    found, _ = tasks_describe(region, cluster, sorted(arns))
    return [one for one in found if one.started_by == started_by]


def tasks_running(region: str, cluster: str, started_by: str) -> list[TaskSeen]:
    """Returns the tasks with this `startedBy` that run or start. One call if there are none."""
    arns = sorted(_list_arns("ListTasks", "taskArns", region, cluster, startedBy=started_by))
    return [one for one in tasks_describe(region, cluster, arns)[0] if one.is_alive]


def tasks_list(region: str, cluster: str) -> list[TaskSeen]:
    """Returns every task of the cluster, stopped ones of the last hour included. Raises Unanswered if ECS does not
    describe each task that it lists."""
    arns = {
        arn
        for status in ("RUNNING", "STOPPED")
        for arn in _list_arns("ListTasks", "taskArns", region, cluster, desiredStatus=status)
    }
    found, missing = tasks_describe(region, cluster, sorted(arns))
    if unknown := {short_id(arn) for arn in arns} - {one.id for one in found} - missing:
        raise calls.Unanswered("", f"{len(unknown)} listed tasks were not described, such as {min(unknown)}")
    return found


def tasks_describe(region: str, cluster: str, ids: Sequence[str]) -> tuple[list[TaskSeen], set[str]]:
    """Returns the tasks, and the IDs of those that ECS does not have: forgotten, or not visible yet. Nothing is known
    about IDs that are in neither, such as those that ECS failed to describe."""
    found: list[TaskSeen] = []
    missing: set[str] = set()
    for batch in _batches(ids, PAGE):
        answer = _ecs("DescribeTasks", region, "tasks", "failures", cluster=cluster, tasks=batch, include=["TAGS"])
        found += [_task(one) for one in answer["tasks"]]
        missing |= {short_id(one.get("arn") or "") for one in answer["failures"] if one.get("reason") == MISSING}
    return found, missing


def task_stop(region: str, cluster: str, task: str, reason: str) -> TaskSeen:
    return _task(_ecs("StopTask", region, "task", cluster=cluster, task=task, reason=reason[:255])["task"])


def _task(found: Mapping[str, Any]) -> TaskSeen:
    tags = {one["key"]: one.get("value") or "" for one in found.get("tags") or ()}
    code = str(found.get("stopCode") or "")
    return TaskSeen(
        id=short_id(found["taskArn"]),
        arn=found["taskArn"],
        instance=found.get("containerInstanceArn") or "",
        status=found.get("lastStatus") or "",
        desired=found.get("desiredStatus") or "",
        code=code,
        why=_why_stopped(code, str(found.get("stoppedReason") or ""), found.get("containers") or ()),
        stopping_at=found.get("stoppingAt"),
        started_by=found.get("startedBy") or "",
        created_at=found.get("createdAt"),
        install=tags.get(TAG_INSTALL, ""),
        unit=tags.get(TAG_UNIT, ""),
        attempt=tags.get(TAG_ATTEMPT, ""),
        tags=tags,
    )


def _why_stopped(code: str, reason: str, containers: Sequence[Mapping[str, Any]]) -> str:
    """Returns the stop code, its reason, and what the containers add to it."""
    texts = [text for text in (code, reason) if text]
    parts = [": ".join(texts)] if texts else []
    for container in containers if texts else ():
        own, exit_code = str(container.get("reason") or ""), container.get("exitCode")
        parts += [own] if own and own not in reason else []
        parts += [f"exit code {exit_code}"] if exit_code is not None and str(exit_code) not in reason else []
    return "; ".join(parts)[:WHY_MOST]


def task_tag(region: str, arn: str, tags: Mapping[str, str]) -> None:
    """Sets tags of a task, by its ARN."""
    _ecs("TagResource", region, resourceArn=arn, tags=[{"key": name, "value": value} for name, value in tags.items()])


# Revisions of task definitions.


def definition_ensure(region: str, definition: Mapping[str, Any], install: str) -> str:
    """Returns `family:revision` of a definition with this content; registers a revision if the latest one differs. A
    repeated call after a lost answer finds the revision, and two concurrent processes make two equal revisions. The tag
    with the digest alone is not trusted: a user who may register a revision of the family may also set it."""
    digest, family = digest_of(definition), definition["family"]
    try:
        latest = _ecs("DescribeTaskDefinition", region, "taskDefinition", taskDefinition=family, include=["TAGS"])
    except calls.Refused as error:
        if error.is_for_now or error.code != "ClientException":
            raise
        latest = {}
    found = latest.get("taskDefinition") or {}
    is_known = {"key": TAG_DIGEST, "value": digest} in (latest.get("tags") or ())
    if is_known and found.get("status") == ACTIVE and runs_the_same(found, definition):
        return _revision(latest)
    tags = [{"key": TAG_INSTALL, "value": install}, {"key": TAG_DIGEST, "value": digest}]
    return _revision(_ecs("RegisterTaskDefinition", region, "taskDefinition", **definition, tags=tags))


def _revision(answer: Mapping[str, Any]) -> str:
    return f"{answer['taskDefinition']['family']}:{answer['taskDefinition']['revision']}"


def definitions_drop(region: str, family: str, kept: Collection[str]) -> list[str]:
    """Deregisters the active revisions of a family that are not `kept` (`family:revision`), the latest never. Running
    tasks keep theirs. Returns those that were deregistered."""
    arns: list[str] = []
    token = ""
    for _ in range(PAGES_MOST):
        asked: dict[str, Any] = {"familyPrefix": family, "status": "ACTIVE"}
        asked |= {"nextToken": token} if token else {}
        page = _ecs("ListTaskDefinitions", region, "taskDefinitionArns", **asked)
        arns += page["taskDefinitionArns"]
        token = page.get("nextToken") or ""
        if not token:
            break
    names = sorted((short_id(arn) for arn in arns), key=lambda name: int(name.rpartition(":")[2]))
    old = [name for name in names[:-1] if name not in kept and name.rpartition(":")[0] == family]
    for name in old:
        _ecs("DeregisterTaskDefinition", region, taskDefinition=name)
    return old
