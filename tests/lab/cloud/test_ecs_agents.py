"""ECS agents of machines register, run what StartTask ordered, report it, and are disconnected when silent. The keys of
a task are those of its role, in a session named after the task."""

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.lab.cloud.conftest import Network, network, world

if TYPE_CHECKING:
    from lab.cloud.server import World

__all__ = ["network", "world"]

pytestmark = pytest.mark.cloud

CLUSTER = "switchyard"
DEVICE = {"hostPath": "/dev/neuron0", "containerPath": "/dev/neuron0", "permissions": ["read", "write"]}


class Agent:
    """An ECS agent on a machine, and one task that was started on it."""

    def __init__(self, world: "World", network: Network) -> None:
        from lab.cloud.ecs_agents import agent_register

        self.world, self.ecs = world, world.client("ecs")
        self.ecs.create_cluster(clusterName=CLUSTER)
        [self.machine] = network.launch(1)
        world.clock.advance(60)
        self.arn = agent_register(world, CLUSTER, self.machine)
        world.client("iam").create_role(RoleName="node-task", AssumeRolePolicyDocument="{}")
        container = {
            "name": "agent", "image": "registry/node-agent:1.0", "memory": 64, "stopTimeout": 120,
            "environment": [{"name": "SERVER", "value": "https://control"}],
            "linuxParameters": {"devices": [DEVICE]},
            "mountPoints": [{"sourceVolume": "cache", "containerPath": "/mnt/cache"}],
        }  # fmt: skip
        self.ecs.register_task_definition(
            family="node", containerDefinitions=[container], networkMode="host",
            taskRoleArn=f"arn:aws:iam::{world.account}:role/node-task",
            volumes=[{"name": "cache", "host": {"sourcePath": "/mnt/disk"}}],
        )  # fmt: skip
        environment = [{"name": "SWITCHYARD_UNIT", "value": "u-1"}]
        [task] = self.ecs.start_task(
            cluster=CLUSTER, taskDefinition="node", containerInstances=[self.arn],
            overrides={"containerOverrides": [{"name": "agent", "environment": environment}]},
        )["tasks"]  # fmt: skip
        self.task = task["taskArn"].rpartition("/")[2]

    def poll(self, **states: dict[str, str]) -> list[dict[str, Any]]:
        from lab.cloud.ecs_agents import agent_poll

        return agent_poll(self.world, self.arn, {self.task: states["of_task"]} if states else {})

    def status(self) -> str:
        return str(self.ecs.describe_tasks(cluster=CLUSTER, tasks=[self.task])["tasks"][0]["lastStatus"])


@pytest.fixture
def agent(world: "World", network: Network) -> Agent:
    return Agent(world, network)


def test_a_task_runs_and_has_stopped_when_its_agent_says_so(agent: Agent) -> None:
    agent.world.clock.advance(5)
    [order] = agent.poll()
    assert order["environment"] == {"SERVER": "https://control", "SWITCHYARD_UNIT": "u-1"}
    assert (order["devices"], order["mounts"]) == (["/dev/neuron0"], {"/mnt/cache": "/mnt/disk"})
    assert (order["status"], order["stop_timeout_s"], order["is_pulled"]) == ("PENDING", 120, True)
    agent.poll(of_task={"status": "RUNNING"})
    assert agent.status() == "RUNNING"

    agent.ecs.stop_task(cluster=CLUSTER, task=agent.task)
    agent.world.clock.advance(5)
    [order] = agent.poll(of_task={"status": "RUNNING"})
    assert order["status"] == agent.status() == "STOPPING"
    assert agent.poll(of_task={"status": "STOPPED"}) == []
    assert agent.status() == "STOPPED"


def test_a_silent_agent_is_disconnected_and_its_tasks_stay(agent: Agent) -> None:
    agent.poll(of_task={"status": "RUNNING"})
    agent.world.clock.advance(60)

    def is_connected() -> bool:
        found = agent.ecs.describe_container_instances(cluster=CLUSTER, containerInstances=[agent.arn])
        return bool(found["containerInstances"][0]["agentConnected"])

    assert not is_connected()
    assert agent.status() == "RUNNING"
    agent.poll(of_task={"status": "RUNNING"})
    assert is_connected()


def test_a_terminated_machine_is_no_container_instance(agent: Agent) -> None:
    agent.poll(of_task={"status": "RUNNING"})
    agent.world.client("ec2").terminate_instances(InstanceIds=[agent.machine])
    agent.world.settle()

    assert agent.status() == "STOPPED"
    assert agent.ecs.list_container_instances(cluster=CLUSTER)["containerInstanceArns"] == []
    with pytest.raises(LookupError):
        agent.poll()


def test_the_keys_of_a_task_are_of_its_role_and_named_after_it(agent: Agent) -> None:
    from lab.cloud.ecs_agents import TaskKeys

    [order] = agent.poll()
    status, body, _ = TaskKeys(agent.world, agent.machine).reply("GET", order["keys"], {})
    keys = json.loads(body)
    assert status == 200
    sts = agent.world.client(
        "sts", aws_access_key_id=keys["AccessKeyId"], aws_secret_access_key=keys["SecretAccessKey"],
        aws_session_token=keys["Token"],
    )  # fmt: skip
    assert sts.get_caller_identity()["Arn"].endswith(f"assumed-role/node-task/{agent.task}")
    assert TaskKeys(agent.world, agent.machine).reply("GET", f"{order['keys']}0", {})[0] == 404
    assert TaskKeys(agent.world, "i-other").reply("GET", order["keys"], {})[0] == 404
