"""Half answers of ECS, and revisions by other programs: what counts as known."""

from collections.abc import Callable
from typing import Any

import pytest

from fleet.clouds.aws import calls
from fleet.clouds.ecs.cluster import tasks_describe, tasks_list, tasks_start
from fleet.clouds.ecs.definitions import runs_the_same, task_definition
from fleet.reconcile.planning.states import MachineRole
from models_registry.instance_types.planner import INSTANCE_TYPES
from tests.fleet.clouds.ecs.test_definitions import CLUSTER

ARN = "arn:aws:ecs:us-east-1:1"
Answers = Callable[..., None]


def instance(name: str) -> str:
    return f"{ARN}:container-instance/c/{name}"


def task(name: str, on: str = "a", **columns: Any) -> dict[str, Any]:
    return {"taskArn": f"{ARN}:task/c/{name}", "containerInstanceArn": instance(on), "lastStatus": "RUNNING", **columns}


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Answers:
    """Sets the answer of each operation."""
    known: dict[str, Any] = {}
    monkeypatch.setattr(calls, "call", lambda service, operation, region, **params: known[operation])
    return known.update


@pytest.mark.parametrize(
    ("tasks", "failures"),
    [
        (["a"], []),
        (["a", "a"], []),
        (["a", "z"], []),
        (["a"], ["a"]),
        (["a", "b"], ["b"]),
        ([], ["a"]),
    ],
)
def test_an_answer_that_does_not_name_each_container_instance_once_counts_as_lost(
    answers: Answers, tasks: list[str], failures: list[str]
) -> None:
    started = [task(str(number), on) for number, on in enumerate(tasks)]
    answers(StartTask={"tasks": started, "failures": [{"arn": instance(on), "reason": "AGENT"} for on in failures]})
    with pytest.raises(calls.Unanswered, match="every container instance once"):
        tasks_start("us-east-1", {"containerInstances": [instance("a"), instance("b")]})


def test_a_task_is_absent_only_if_ecs_says_that_it_is_missing(answers: Answers) -> None:
    failures = [{"arn": f"{ARN}:task/c/2", "reason": "MISSING"}, {"arn": f"{ARN}:task/c/3", "reason": "INTERNAL"}]
    answers(DescribeTasks={"tasks": [task("1")], "failures": failures})
    found, missing = tasks_describe("us-east-1", "c", ["1", "2", "3"])
    assert ([one.id for one in found], missing) == (["1"], {"2"})

    answers(ListTasks={"taskArns": [f"{ARN}:task/c/{number}" for number in (1, 2, 3)]})
    with pytest.raises(calls.Unanswered, match="1 listed tasks were not described, such as 3"):
        tasks_list("us-east-1", "c")
    answers(DescribeTasks={"tasks": [task("1"), task("3")], "failures": failures[:1]})
    assert [one.id for one in tasks_list("us-east-1", "c")] == ["1", "3"]


@pytest.mark.parametrize(
    ("stopped", "why"),
    [
        ({}, ""),
        ({"stopCode": "UserInitiated"}, "UserInitiated"),
        (
            {"stopCode": "TaskFailedToStart", "stoppedReason": "CannotPullContainerError: x",
             "containers": [{"reason": "CannotPullContainerError: x"}]},
            "TaskFailedToStart: CannotPullContainerError: x",
        ),
        (
            {"stopCode": "EssentialContainerExited", "stoppedReason": "Essential container in task exited",
             "containers": [{"reason": "OutOfMemoryError: killed", "exitCode": 137}]},
            "EssentialContainerExited: Essential container in task exited; OutOfMemoryError: killed; exit code 137",
        ),
        ({"stoppedReason": "x" * 1000}, "x" * 500),
    ],
)  # fmt: skip
def test_the_reason_of_a_stop_has_what_its_containers_add(answers: Answers, stopped: dict[str, Any], why: str) -> None:
    answers(DescribeTasks={"tasks": [task("1", **stopped)], "failures": []})
    [found] = tasks_describe("us-east-1", "c", ["1"])[0]
    assert found.why == why


def test_a_revision_is_used_only_if_it_runs_the_same_programs() -> None:
    wanted = task_definition(INSTANCE_TYPES["trn1.32xlarge"], MachineRole.NODE, CLUSTER)
    container = wanted["containerDefinitions"][0]
    described = {**container, "cpu": 0, "volumesFrom": [], "environment": container["environment"][::-1]}
    assert runs_the_same({**wanted, "revision": 3, "containerDefinitions": [described]}, wanted)
    assert not runs_the_same({**wanted, "taskRoleArn": "arn:other"}, wanted)
    assert not runs_the_same({**wanted, "volumes": [{"name": "cache", "host": {"sourcePath": "/"}}]}, wanted)
    assert not runs_the_same({**wanted, "containerDefinitions": [container, container]}, wanted)
    other: list[dict[str, Any]] = [
        {"image": "elsewhere/agent:1"},
        {"command": ["sh"]},
        {"entryPoint": ["sh"]},
        {"privileged": True},
        {"secrets": [{"name": "A", "valueFrom": "arn:secret"}]},
        {"environment": [*container["environment"], {"name": "SWITCHYARD_PIN", "value": "other"}]},
        {"mountPoints": []},
    ]
    for each in other:
        assert not runs_the_same({**wanted, "containerDefinitions": [{**container, **each}]}, wanted), each
