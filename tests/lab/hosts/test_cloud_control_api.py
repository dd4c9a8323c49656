"""What people do to a cloud that runs elsewhere: beside AWS's calls, and each mistake is one sentence."""

import json
from io import BytesIO
from typing import Any

import pytest

from lab.cloud.server import World
from lab.hosts.cloud_control_api import Control, Hypervisor
from tests.lab.cloud.conftest import Network, network, refusal, world
from tests.lab.hosts.test_hypervisor import Hosts

__all__ = ["network", "world"]

pytestmark = pytest.mark.cloud


class Caller:
    """Calls the application as a server does."""

    def __init__(self, world: World) -> None:
        self.application = Control(world, Hypervisor(world, Hosts(), {}))

    def ask(self, what: str, method: str = "POST", **given: object) -> Any:
        """The answer, or why there is none."""
        body = json.dumps(given).encode()
        environ = {
            "REQUEST_METHOD": method, "PATH_INFO": f"/cloud/{what}", "CONTENT_LENGTH": str(len(body)),
            "wsgi.input": BytesIO(body),
        }  # fmt: skip
        said: list[str] = []
        answer = json.loads(b"".join(self.application(environ, lambda status, _headers: said.append(status))))
        assert said == ["200 OK" if "done" in answer else "400 Bad Request"]
        return answer.get("done", answer.get("error"))


@pytest.fixture
def caller(world: World) -> Caller:
    return Caller(world)


def test_faults_are_made_and_healed(world: World, network: Network, caller: Caller) -> None:
    caller.ask("capacity", instance_type="trn1.32xlarge", zone="us-east-1a", market="on-demand", left=0)
    assert refusal(network.launch) == "InsufficientInstanceCapacity"
    caller.ask("capacity", instance_type="trn1.32xlarge", zone="us-east-1a", market="on-demand", left=None)
    caller.ask("quota", name="Running On-Demand Trn instances", vcpus=1)
    assert refusal(network.launch) == "VcpuLimitExceeded"
    caller.ask("fault", operation="RunInstances", code="RequestLimitExceeded")
    assert refusal(network.launch) == "RequestLimitExceeded"
    caller.ask("zone", name="us-east-1a", silent=True)
    assert refusal(network.ec2.describe_instances) == "Unavailable"

    caller.ask("heal")
    assert len(network.launch(2)) == 2


def test_machines_are_warned_and_listed(world: World, network: Network, caller: Caller) -> None:
    [machine_id] = network.launch(1)
    given: dict[str, dict[str, Any]] = {
        "spot-warning": {}, "rebalance": {}, "event": {"code": "instance-retirement", "in_s": 600},
        "impaired": {"impaired": True},
    }  # fmt: skip
    for what, arguments in given.items():
        assert caller.ask(what, instance=machine_id, **arguments) is None
    machine = world.machines.get(machine_id)
    assert machine is not None
    assert (machine.interrupted, len(machine.events)) == (world.clock.now() + 120.0, 1)
    assert machine.impaired_since == world.clock.now()
    [row] = caller.ask("instances")
    assert (row["instance"], row["state"], row["host"]) == (machine_id, "pending", "")
    caller.ask("terminate", instance=machine_id)
    assert network.states() == {machine_id: "shutting-down"}


@pytest.mark.parametrize(
    ("what", "given", "complaint"),
    [
        ("nothing", {}, "POST one of instances, capacity"),
        ("zone", {"name": "us-east-1a"}, "missing a required argument: 'silent'"),
        ("zone", {"name": "us-east-1a", "silent": True, "loud": False}, "unexpected keyword argument 'loud'"),
        ("capacity", {"instance_type": "t", "zone": "z", "market": "black", "left": 0}, "Market 'black': give one of"),
        ("fault", {"operation": "RunInstances"}, "A fault of nothing"),
        ("fault", {"operation": "RunInstances", "code": "x", "when": "never"}, "A fault 'never'"),
        ("spot-warning", {"instance": "i-0"}, "There is no instance 'i-0'"),
    ],
)
def test_a_mistake_is_one_sentence(caller: Caller, what: str, given: dict[str, Any], complaint: str) -> None:
    assert complaint in caller.ask(what, **given)


def test_only_posts_are_taken(caller: Caller) -> None:
    assert "GET 'heal'" in caller.ask("heal", method="GET")
