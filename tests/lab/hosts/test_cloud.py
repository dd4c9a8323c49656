"""Instances of the cloud of tests are hosts of a laboratory: they run their user data, know who they are by their
metadata service alone, reach the cloud, and end with their instance, or it with them."""

import socket
from collections.abc import Iterator
from typing import Any

import boto3
import pytest
from botocore.config import Config

from engine_agent.node.telemetry.neuron_output import parse_neuron_ls
from lab.hosts import client
from lab.hosts.cloud_control import PORT
from lab.hosts.topology import CLOUD, Topology
from tests.lab.hosts.conftest import ECHO, Lab, eventually, places_in

pytestmark = pytest.mark.processes

ACCESS_KEY, SECRET = "AKIACONTROLPLANE0000", "of the control plane"
USER_DATA = """#!/bin/sh
at=http://169.254.169.254/latest
token=$(curl -sf -X PUT -H 'X-aws-ec2-metadata-token-ttl-seconds: 60' $at/api/token)
curl -sf -H "X-aws-ec2-metadata-token: $token" $at/meta-data/instance-id >> /var/lib/ran
echo >> /var/lib/ran
curl -s -o /dev/null -w '%{http_code}' "$AWS_ENDPOINT_URL/cloud/" > /var/lib/reached
echo done
"""
TARGET_PORT = 7000
NEW_TOKEN = "curl -sf -X PUT -H 'X-aws-ec2-metadata-token-ttl-seconds: 60' http://169.254.169.254/latest/api/token"


@pytest.fixture(scope="module")
def ports() -> tuple[int, int]:
    """Of the cloud, and of the load balancer of us-east-1, on the real host."""
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        return one.getsockname()[1], other.getsockname()[1]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory, ports: tuple[int, int]) -> Iterator[Lab]:
    """c1 and a cloud with us-east-1."""
    places, environment = places_in(tmp_path_factory.mktemp("lab"))
    topology = Topology(("us-east-1",), controls=1, ingresses=0, nodes=0, cloud=True)
    keys: dict[str, str | float] = {"access_key": ACCESS_KEY, "secret": SECRET, "pending_s": 0.0}
    try:
        forwards = [client.Forward(ports[0], CLOUD, PORT), client.Forward(ports[1], "us-east-1", TARGET_PORT)]
        client.start(topology, places, forwards, keys)
        yield Lab(places, environment)
    finally:
        client.stop(places)


def connect(service: str, port: int) -> Any:
    """A client of the cloud, on the real host."""
    return boto3.client(
        service, region_name="us-east-1", endpoint_url=f"http://127.0.0.1:{port}",
        aws_access_key_id=ACCESS_KEY, aws_secret_access_key=SECRET,
        config=Config(retries={"mode": "standard", "total_max_attempts": 1}),
    )  # fmt: skip


@pytest.fixture(scope="module")
def ec2(lab: Lab, ports: tuple[int, int]) -> Any:
    return connect("ec2", ports[0])


@pytest.fixture(scope="module")
def subnet(ec2: Any) -> str:
    vpc = ec2.create_vpc(CidrBlock="10.1.0.0/16")["Vpc"]["VpcId"]
    return str(ec2.create_subnet(VpcId=vpc, CidrBlock="10.1.16.0/20")["Subnet"]["SubnetId"])


class Instance:
    """One that has run its user data. `name`: of its host; empty: it has none just now."""

    def __init__(self, lab: Lab, ec2: Any, subnet: str) -> None:
        interface = {"DeviceIndex": 0, "SubnetId": subnet, "DeleteOnTermination": True}
        [launched] = ec2.run_instances(
            ImageId="ami-12c6146b", InstanceType="trn1.2xlarge", MinCount=1, MaxCount=1, NetworkInterfaces=[interface],
            UserData=USER_DATA,
        )["Instances"]  # fmt: skip
        self.id, self.address = str(launched["InstanceId"]), launched["PrivateIpAddress"]
        self._lab, self._ec2 = lab, ec2
        eventually(lambda: self.name, "it has a host")
        eventually(lambda: "done" in self.read("/var/log/cloud-init-output.log"), "it has run its user data")

    @property
    def name(self) -> str:
        hosts = client.ask(self._lab.places, "status")["hosts"]
        return next((str(host["name"]) for host in hosts if host["address"] == self.address), "")

    def read(self, path: str) -> str:
        return self._lab.run(self.name, "cat", path).stdout

    def state(self) -> str:
        [found] = self._ec2.describe_instances(InstanceIds=[self.id])["Reservations"]
        return str(found["Instances"][0]["State"]["Name"])


def test_an_instance_is_a_host_that_runs_its_user_data_once(lab: Lab, ec2: Any, subnet: str) -> None:
    instance = Instance(lab, ec2, subnet)
    assert instance.read("/var/lib/ran") == f"{instance.id}\n"
    assert instance.read("/var/lib/reached") == "400"
    assert lab.run("c1", "sh", "-c", NEW_TOKEN).returncode != 0
    devices = lab.run(
        instance.name, "sh", "-c", "ls /dev; head -c 1 /dev/urandom >/dev/null && echo random"
    ).stdout.split()
    assert {"neuron0", "null", "shm", "random"} <= set(devices)
    assert "neuron1" not in devices
    listed = lab.run(instance.name, "/opt/aws/neuron/bin/neuron-ls", "-j").stdout
    assert [device.name for device in parse_neuron_ls(listed)] == ["trn1.2xlarge"]

    lab.run(instance.name, "sh", "-c", "echo before > /run/before")
    ec2.reboot_instances(InstanceIds=[instance.id])
    again = f"test ! -e /run/before && {NEW_TOKEN}"
    eventually(lambda: lab.run(instance.name, "sh", "-c", again).returncode == 0, "it has booted again, with metadata")
    assert instance.read("/var/lib/ran") == f"{instance.id}\n"

    ec2.terminate_instances(InstanceIds=[instance.id])
    eventually(lambda: not instance.name, "its host is gone")


def test_the_port_of_a_region_leads_to_targets_that_are_healthy(
    lab: Lab, ec2: Any, subnet: str, ports: tuple[int, int]
) -> None:
    instance = Instance(lab, ec2, subnet)
    lab.run(instance.name, "sh", "-c", f"cat > /opt/echo <<'E'\n{ECHO}\nE\nsetsid -f sh /opt/echo > /dev/null 2>&1")
    assert not answers(ports[1])

    balancers, [vpc] = connect("elbv2", ports[0]), ec2.describe_subnets(SubnetIds=[subnet])["Subnets"]
    group = balancers.create_target_group(
        Name="entry", Protocol="TCP", Port=TARGET_PORT, VpcId=vpc["VpcId"], TargetType="ip", HealthCheckProtocol="TCP",
        HealthCheckIntervalSeconds=5, HealthCheckTimeoutSeconds=5, HealthyThresholdCount=2,
    )["TargetGroups"][0]["TargetGroupArn"]  # fmt: skip
    made = balancers.create_load_balancer(Name="entry", Type="network", Subnets=[subnet])["LoadBalancers"][0]
    forward = [{"Type": "forward", "TargetGroupArn": group}]
    balancers.create_listener(
        LoadBalancerArn=made["LoadBalancerArn"], Protocol="TCP", Port=TARGET_PORT, DefaultActions=forward
    )
    target = {"TargetGroupArn": group, "Targets": [{"Id": instance.address}]}
    balancers.register_targets(**target)
    eventually(lambda: answers(ports[1]), "the target is healthy, and reached")
    balancers.deregister_targets(**target)
    assert not answers(ports[1])
    lab.do("cloud", "terminate", instance.id)


def answers(port: int) -> bool:
    """Whether an echo answers there."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
            connection.sendall(b"why?")
            return connection.recv(99) == b"why?"
    except ConnectionResetError:  # no target is healthy
        return False


def test_a_host_that_shuts_down_ends_its_instance(lab: Lab, ec2: Any, subnet: str) -> None:
    instance = Instance(lab, ec2, subnet)
    lab.run(instance.name, "sh", "-c", "setsid -f shutdown -h now > /dev/null 2>&1")
    eventually(lambda: instance.state() in {"shutting-down", "terminated"}, "the instance ends")
    eventually(lambda: not instance.name, "its host is gone")


def test_a_host_without_power_is_an_impaired_instance(lab: Lab, ec2: Any, subnet: str) -> None:
    instance = Instance(lab, ec2, subnet)

    def health() -> str:
        [found] = ec2.describe_instance_status(InstanceIds=[instance.id])["InstanceStatuses"]
        return str(found["InstanceStatus"]["Status"])

    lab.ask("power-off", name=instance.name)
    eventually(lambda: health() == "impaired", "its checks fail")
    assert instance.state() == "running"
    lab.ask("boot", name=instance.name)
    eventually(lambda: health() == "ok", "its checks pass")

    [row] = [line.split() for line in lab.do("cloud", "instances").splitlines() if instance.id in line]
    assert row[:3] == [instance.id, instance.name, "running"]
    assert "There is no instance 'i-0'" in lab.command("cloud", "spot-warning", "i-0").stderr
    lab.do("cloud", "terminate", instance.id)
    eventually(lambda: not instance.name, "its host is gone")
