"""Instances have hosts while they run, regardless of what stops them; a host that shuts down stops its instance."""

import pytest

from lab.cloud.ec2_describe import warn_of_interruption
from lab.cloud.machines import Market
from lab.cloud.server import World
from lab.cloud.stack import ECS_IMAGE
from lab.hosts.cloud_control_api import FIRST_BOOT, METADATA, TASK_KEYS, Hypervisor
from lab.hosts.topology import NoLaboratory, TemporaryHost
from tests.lab.cloud.conftest import Network, network, refusal, world

__all__ = ["network", "world"]

pytestmark = pytest.mark.cloud


class Hosts:
    """Hosts without a laboratory. `done`: what was asked, in order; `refuses`: nothing boots."""

    def __init__(self) -> None:
        self.there: dict[str, TemporaryHost] = {}
        self.done: list[str] = []
        self.refuses = False

    def add(self, added: TemporaryHost) -> None:
        if self.refuses:
            raise NoLaboratory("there is no room")
        assert added.host.address not in {each.host.address for each in self.there.values()}
        self.there[added.name] = added
        self.done.append(f"add {added.name}")

    def remove(self, name: str) -> None:
        del self.there[name]
        self.done.append(f"remove {name}")

    def restart(self, name: str) -> None:
        self.done.append(f"restart {name}")


@pytest.fixture
def hosts() -> Hosts:
    return Hosts()


@pytest.fixture
def hypervisor(world: World, hosts: Hosts) -> Hypervisor:
    return Hypervisor(world, hosts, {"AWS_ENDPOINT_URL": "http://cloud"})


def test_an_instance_has_a_host_from_when_it_runs(
    world: World, network: Network, hosts: Hosts, hypervisor: Hypervisor
) -> None:
    network.launch(2)
    hypervisor.step()
    assert hosts.there == {}

    world.clock.advance(world.delays.pending_s)
    hypervisor.step()
    hypervisor.step()
    assert hosts.done == ["add v1", "add v2"]
    described = network.ec2.describe_instances()["Reservations"][0]["Instances"]
    assert [each["PrivateIpAddress"] for each in described] == [str(each.host.address) for each in hosts.there.values()]
    added = hosts.there["v1"]
    assert (added.host.site, added.link_local, dict(added.environment)) == (
        "us-east-1", (METADATA,), {"AWS_ENDPOINT_URL": "http://cloud", "SWITCHYARD_DEEP_CHECKS": "off"},
    )  # fmt: skip
    assert added.files[FIRST_BOOT].startswith("#!/bin/sh")


def test_whatever_ends_an_instance_ends_its_host(
    world: World, network: Network, hosts: Hosts, hypervisor: Hypervisor
) -> None:
    [ended] = network.launch(1)
    [spot] = network.launch(1, InstanceMarketOptions={"MarketType": Market.SPOT})
    world.clock.advance(world.delays.pending_s)
    hypervisor.step()

    network.ec2.terminate_instances(InstanceIds=[ended])
    warn_of_interruption(world, spot)
    hypervisor.step()
    assert list(hosts.there) == ["v2"]
    world.clock.advance(120.0)
    hypervisor.step()
    assert hosts.there == {}

    network.launch(1)
    world.clock.advance(world.delays.pending_s)
    hypervisor.step()
    assert list(hosts.there) == ["v3"]


def test_a_host_that_shuts_down_ends_its_instance_and_one_without_power_is_impaired(
    world: World, network: Network, hypervisor: Hypervisor
) -> None:
    ids = network.launch(2)
    world.clock.advance(world.delays.pending_s)
    hypervisor.step()

    hypervisor.ended("v1", by_itself=True)
    hypervisor.ended("v2", by_itself=False)
    hypervisor.ended("v9", by_itself=True)
    world.clock.advance(world.delays.shutting_down_s)
    hypervisor.step()
    assert list(network.states().values()) == ["terminated", "running"]
    assert [(each["host"], each["reason"]) for each in hypervisor.table()] == [
        ("", "Instance initiated shutdown"), ("v2", ""),
    ]  # fmt: skip
    left = world.machines.get(ids[1])
    assert left is not None
    assert left.impaired_since is not None

    machine = hypervisor.booted("v2")
    assert machine is left
    assert machine.impaired_since is None
    assert hypervisor.booted("n1") is None


def test_a_reboot_keeps_the_host(world: World, network: Network, hosts: Hosts, hypervisor: Hypervisor) -> None:
    ids = network.launch(1)
    assert refusal(network.ec2.reboot_instances, InstanceIds=ids) == "IncorrectState"
    world.clock.advance(world.delays.pending_s)
    hypervisor.step()

    network.ec2.reboot_instances(InstanceIds=ids)
    hypervisor.step()
    hypervisor.step()
    assert hosts.done == ["add v1", "restart v1"]
    assert refusal(network.ec2.reboot_instances, InstanceIds=["i-0123456789abcdef0"]) == "InvalidInstanceID.NotFound"


def test_an_instance_whose_host_does_not_boot_ends(
    world: World, network: Network, hosts: Hosts, hypervisor: Hypervisor
) -> None:
    hosts.refuses = True
    [machine_id] = network.launch(1)
    world.clock.advance(world.delays.pending_s)
    hypervisor.step()

    assert network.states() == {machine_id: "shutting-down"}
    [found] = network.ec2.describe_instances()["Reservations"][0]["Instances"]
    assert found["StateReason"] == {"Code": "Server.InternalError", "Message": "there is no room"}


def test_a_container_instance_has_an_ecs_agent_the_keys_of_tasks_and_its_devices(
    world: World, network: Network, hosts: Hosts, hypervisor: Hypervisor
) -> None:
    network.launch(1, ImageId=ECS_IMAGE.id, NetworkInterfaces=network.interfaces(2))
    world.clock.advance(world.delays.pending_s)
    hypervisor.step()

    added = hosts.there["v1"]
    assert added.link_local == (METADATA, TASK_KEYS)
    assert {"/etc/local.d/10-ecs-agent.start", "/usr/local/bin/switchyard-agent"} < set(added.files)
    assert {"neuron0", "infiniband/uverbs0"} < set(added.devices)
