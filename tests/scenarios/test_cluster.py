"""A fleet on an ECS cluster whose container instances are hosts with an ECS agent, and whose tasks are real agents that
prove themselves by their task's role. An agent is killed, a version is rolled out, container instances drain and end,
an answer is lost, and a task that no row knows is stopped.
"""

from collections import Counter
from typing import Any

import pytest

from lab.hosts.cloud_fleet import REGISTRY
from tests.scenarios.lab_cloud import REGION, TYPE, Cloud, cloud, eventually

__all__ = ["cloud"]

pytestmark = [pytest.mark.long, pytest.mark.scenario, pytest.mark.own_fleet, pytest.mark.timeout(2400)]

NODES = 5
"""Of two cells, and a spare."""
NO_BAKE = {"min_healthy_s": 0, "canary_bake_s": 0, "bake_s": 0}
KILL_AGENT = "pkill -9 -f '^sh /var/lib/switchyard/run'; pkill -9 -f '[e]ngine_agent machine'"


class Cluster:
    """The cluster and its fleet, as the cloud and the fleet show them now."""

    def __init__(self, cloud: Cloud) -> None:
        self.cloud = cloud
        self.ecs = cloud.calls_of("ecs")
        self.name: str = self.ecs.list_clusters()["clusterArns"][0].rpartition("/")[2]

    def tasks(self) -> list[dict[str, Any]]:
        """Of nodes, as ECS describes those that run or start."""
        arns = self.ecs.list_tasks(cluster=self.name)["taskArns"]
        found = self.ecs.describe_tasks(cluster=self.name, tasks=arns, include=["TAGS"])["tasks"] if arns else []
        return [task for task in found if "-node-" in task["taskDefinitionArn"]]

    def instances(self) -> dict[str, dict[str, Any]]:
        """Container instances for nodes, by ARN."""
        arns = self.ecs.list_container_instances(cluster=self.name)["containerInstanceArns"]
        found = self.ecs.describe_container_instances(cluster=self.name, containerInstances=arns)["containerInstances"]
        kinds = {
            one["containerInstanceArn"]: {each["name"]: each.get("value") for each in one["attributes"]}
            for one in found
        }
        return {
            one["containerInstanceArn"]: one
            for one in found
            if kinds[one["containerInstanceArn"]]["ecs.instance-type"] == TYPE
        }

    def instance_of(self, task: str) -> str:
        return str(next(one["containerInstanceArn"] for one in self.tasks() if one["taskArn"].endswith(task)))

    def host_of(self, instance: str) -> str:
        machine = self.instances()[instance]["ec2InstanceId"]
        return str(next(row["host"] for row in self.cloud.ask_cloud("instances") if row["instance"] == machine))

    def members(self) -> dict[str, str]:
        """Node -> task, of all cells."""
        cells = {cell["id"] for cell in self.cloud.cells() if cell["state"] == "ready"}
        members = {node["id"] for node in self.cloud.rows("nodes/") if node["cell"] in cells}
        return {row["node"]: row["provider_id"] for row in self.cloud.rows("machines/") if row["node"] in members}

    def is_whole(self) -> bool:
        """Whether both cells serve, a spare is ready, and each node has one task."""
        ready = [row for row in self.cloud.rows("nodes/") if row["state"] == "ready" and row["connected"]]
        tasks = {task["taskArn"].rpartition("/")[2] for task in self.tasks()}
        known = {row["provider_id"] for row in self.cloud.rows("machines/") if row["role"] == "node"}
        return len(self.members()) == 4 and len(ready) == len(tasks) == NODES and tasks <= known

    def why_stopped(self, task: str) -> str:
        [row] = [row for row in self.cloud.ask_cloud("tasks") if row["task"] == task]
        return str(row["reason"]) if row["status"] == "STOPPED" else ""


def test_a_cluster_serves_through_what_happens_to_its_tasks(cloud: Cloud) -> None:
    said = cloud.lab("cloud", "up", "--ecs", "--detach", "--region", REGION, "--round-trip", "10ms")
    assert "every cell is ready, on 2 tasks each" in said
    assert "".join(eventually(cloud.streamed, "an answer is streamed"))
    cluster = Cluster(cloud)
    eventually(cluster.is_whole, "both cells and a spare run")
    assert not cloud.rows("incidents/?kind=hardware-differs"), "a task lacks devices of its type"
    assert set(Counter(task["containerInstanceArn"] for task in cluster.tasks()).values()) == {1}

    a_killed_agent_ends_its_task_and_is_replaced_although_an_answer_is_lost(cluster)
    a_version_reaches_one_cell_after_the_other(cluster)
    a_container_instance_that_drains_loses_its_cell_first(cluster)
    an_image_that_no_registry_has_turns_back(cluster)
    a_task_that_no_row_knows_is_stopped(cluster)
    a_terminated_container_instance_is_replaced(cluster)
    assert "".join(eventually(cloud.streamed, "an answer is streamed at the end"))
    assert cloud.lab("down") == "The laboratory has ended.\n"


def a_killed_agent_ends_its_task_and_is_replaced_although_an_answer_is_lost(cluster: Cluster) -> None:
    cloud = cluster.cloud
    node, task = sorted(cluster.members().items())[0]
    instance = cluster.instance_of(task)
    cloud.lab("cloud", "lose-answer", "StartTask")
    cloud.lab("exec", cluster.host_of(instance), "--", "sh", "-c", KILL_AGENT)

    eventually(lambda: "Essential container" in cluster.why_stopped(task), "its task has stopped")
    eventually(lambda: cluster.is_whole() and node not in cluster.members(), "the cell serves with another node")
    began = Counter(row["switchyard:unit"] for row in cloud.ask_cloud("tasks") if row["status"] == "RUNNING")
    alone = [unit for unit, count in began.items() if count > 2]
    assert not alone, "a call whose answer was lost was repeated"


def a_version_reaches_one_cell_after_the_other(cluster: Cluster) -> None:
    cloud = cluster.cloud
    asked = {"deployment": "sim-70b", "version": "sim-70b@2", "policy": NO_BAKE}
    answer = cloud.api("POST", "rollouts/", json=asked)
    assert answer.is_success, answer.text
    least = 2

    def ended() -> bool:
        nonlocal least
        least = min(least, len([cell for cell in cloud.cells() if cell["state"] == "ready"]))
        return str(cloud.api("GET", f"rollouts/{answer.json()['id']}/").json()["state"]) == "succeeded"

    eventually(ended, "the rollout has succeeded")
    assert {cell["model_version"] for cell in cloud.cells()} == {"sim-70b@2"}
    assert least >= 1, "a cell served at any time"
    eventually(cluster.is_whole, "both cells and a spare run")


def a_container_instance_that_drains_loses_its_cell_first(cluster: Cluster) -> None:
    node, task = sorted(cluster.members().items())[-1]
    instance = cluster.instance_of(task)
    cluster.ecs.update_container_instances_state(cluster=cluster.name, containerInstances=[instance], status="DRAINING")
    eventually(lambda: "given back" in cluster.why_stopped(task), "its task was stopped by the fleet")
    eventually(lambda: cluster.is_whole() and node not in cluster.members(), "the cell serves elsewhere")
    assert instance not in {each["containerInstanceArn"] for each in cluster.tasks()}
    events = cluster.cloud.rows("events/?page_size=500")
    assert any(row["kind"] == "node.notice" and "its container instance drains" in row["message"] for row in events)
    cluster.ecs.update_container_instances_state(cluster=cluster.name, containerInstances=[instance], status="ACTIVE")


def an_image_that_no_registry_has_turns_back(cluster: Cluster) -> None:
    cloud, image = cluster.cloud, f"{REGISTRY}/node-agent:2.0"
    cloud.ask_cloud("image", name=image, missing=True)
    asked = {"region": REGION, "instance_type": TYPE, "image": image}
    assert cloud.api("POST", "image-moves/", json=asked).is_success

    def went_back() -> bool:
        [move] = cloud.rows("image-moves/")
        assert move["booted"] == []
        return bool(move["reason"] == "all went back")

    eventually(went_back, "two tasks failed to start, and the move turned back")
    assert any("CannotPullContainerError" in row["reason"] for row in cloud.ask_cloud("tasks"))
    lost = [row["message"] for row in cloud.rows("events/?page_size=500") if row["kind"] == "node.lost"]
    assert sum("its task ended before it joined: TaskFailedToStart: CannotPull" in text for text in lost) >= 2, lost
    eventually(cluster.is_whole, "both cells and a spare run")


def a_task_that_no_row_knows_is_stopped(cluster: Cluster) -> None:
    """As after a backup was restored: the task has the tags of this install. One that names the cell that it serves is
    only reported."""
    cloud = cluster.cloud
    some = cluster.tasks()[0]
    serves = {"switchyard:node", "switchyard:cell", "switchyard:generation"}
    tags = [tag for tag in some["tags"] if tag["key"] not in serves]
    environment = [{"name": "SWITCHYARD_UNIT", "value": "u-0"}]

    def started() -> str:
        """Its task. The memory of a container instance is free once its last task has ended."""
        taken = {one["containerInstanceArn"] for one in cluster.tasks()}
        answer = cluster.ecs.start_task(
            cluster=cluster.name, taskDefinition=some["taskDefinitionArn"], tags=tags,
            containerInstances=[next(arn for arn in cluster.instances() if arn not in taken)],
            overrides={"containerOverrides": [{"name": "agent", "environment": environment}]},
        )  # fmt: skip
        assert answer["tasks"], answer["failures"]
        return str(answer["tasks"][0]["taskArn"]).rpartition("/")[2]

    name = eventually(started, "a free container instance starts it")
    cloud.end_first_day()
    cloud.ask_cloud("age-task", task=name, seconds=900)
    eventually(lambda: "no row references it" in cluster.why_stopped(name), "it is stopped as garbage")
    assert cluster.is_whole()


def a_terminated_container_instance_is_replaced(cluster: Cluster) -> None:
    node, task = sorted(cluster.members().items())[0]
    machine = cluster.instances()[cluster.instance_of(task)]["ec2InstanceId"]
    cluster.cloud.lab("cloud", "terminate", machine)
    eventually(lambda: cluster.is_whole() and node not in cluster.members(), "the cell serves on another machine")
    assert len(cluster.instances()) == NODES
