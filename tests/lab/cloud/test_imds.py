"""The metadata of a machine in the cloud of tests: by tokens alone, and as its programs would find it on EC2."""

import http.client
import json
import re
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from engine_agent.node.imds import Metadata
from lab.cloud.ec2_describe import recommend_rebalance, schedule, warn_of_interruption
from lab.cloud.imds import serve_metadata
from lab.cloud.server import World
from tests.lab.cloud.conftest import BEGAN, Network

pytestmark = pytest.mark.cloud

TTL, TOKEN = "X-aws-ec2-metadata-token-ttl-seconds", "X-aws-ec2-metadata-token"
SPOT = {"MarketType": "spot"}


class Programs:
    """What runs on a machine and asks for its metadata."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.token = ""

    def call(self, method: str, path: str, **headers: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        connection.request(method, path, headers={name.replace("_", "-"): text for name, text in headers.items()})
        answer = connection.getresponse()
        found = answer.status, answer.read().decode()
        connection.close()
        return found

    def read(self, path: str) -> str | None:
        self.token = self.token or self.call("PUT", "/latest/api/token", **{TTL: "21600"})[1]
        status, body = self.call("GET", f"/latest/{path}", **{TOKEN: self.token})
        assert status in (200, 404)
        return body if status == 200 else None

    def document(self, path: str) -> Any:
        return json.loads(self.read(path) or "")


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def launch(world: World, network: Network, stack: ExitStack, **params: Any) -> tuple[str, Programs]:
    [machine] = network.launch(**params)
    world.clock.advance(world.delays.pending_s)
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    stack.enter_context(serve_metadata(world, machine, listener))
    return machine, Programs(port)


def give_role(world: World) -> str:
    iam = world.client("iam")
    iam.create_role(RoleName="node", AssumeRolePolicyDocument='{"Version": "2012-10-17", "Statement": []}')
    arn = iam.create_instance_profile(InstanceProfileName="node")["InstanceProfile"]["Arn"]
    iam.add_role_to_instance_profile(InstanceProfileName="node", RoleName="node")
    return str(arn)


def test_nothing_is_said_without_a_token(world: World, network: Network, stack: ExitStack) -> None:
    _, programs = launch(world, network, stack)
    ask = {TTL: "60"}

    assert programs.call("GET", "/latest/meta-data/instance-id") == (401, "")
    assert programs.call("GET", "/latest/meta-data/instance-id", **{TOKEN: "guessed"}) == (401, "")
    for seconds in ("0", "21601", "x", "-1", ""):
        assert programs.call("PUT", "/latest/api/token", **{TTL: seconds})[0] == 400
    assert programs.call("PUT", "/latest/api/token")[0] == 400
    assert programs.call("PUT", "/latest/api/token", X_Forwarded_For="10.0.0.1", **ask)[0] == 403
    assert programs.call("PUT", "/latest/meta-data/instance-id", **ask)[0] == 405
    status, token = programs.call("PUT", "/latest/api/token", **ask)
    assert status == 200
    assert programs.call("GET", "/latest/meta-data/instance-id", **{TOKEN: token})[0] == 200
    world.clock.advance(60)
    assert programs.call("GET", "/latest/meta-data/instance-id", **{TOKEN: token}) == (401, "")


def test_a_machine_is_told_who_and_where_it_is(world: World, network: Network, stack: ExitStack) -> None:
    machine, programs = launch(world, network, stack, UserData="#!/bin/sh\necho äöü\n")
    described = network.ec2.describe_instances()["Reservations"][0]
    instance = described["Instances"][0]

    assert programs.read("meta-data/instance-id") == machine
    assert programs.read("meta-data/local-ipv4") == instance["PrivateIpAddress"]
    assert programs.read("meta-data/placement/availability-zone") == "us-east-1a"
    assert programs.read("meta-data/placement/region") == "us-east-1"
    assert programs.read("meta-data/ami-launch-index") == "0"
    assert programs.read("meta-data/reservation-id") == described["ReservationId"]
    assert programs.read("meta-data/instance-life-cycle") == "on-demand"
    assert programs.read("user-data") == "#!/bin/sh\necho äöü\n"
    assert programs.call("GET", "/2021-07-15/meta-data/mac", **{TOKEN: programs.token})[0] == 200
    assert programs.call("GET", "/meta-data/mac", **{TOKEN: programs.token})[0] == 404
    document = programs.document("dynamic/instance-identity/document")
    assert (document["instanceId"], document["accountId"]) == (machine, world.account)
    listed = (programs.read("meta-data/") or "").split("\n")
    assert {"ami-id", "placement/", "events/"} <= set(listed)
    assert not {"iam/", "spot/", "tags/"} & set(listed)


def test_the_second_of_a_launch_knows_that_it_is(world: World, network: Network, stack: ExitStack) -> None:
    second = network.launch(2)[1]
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    stack.enter_context(serve_metadata(world, second, listener))

    assert Programs(port).read("meta-data/ami-launch-index") == "1"


def test_the_keys_of_the_role_name_the_machine(world: World, network: Network, stack: ExitStack) -> None:
    machine, programs = launch(world, network, stack, IamInstanceProfile={"Arn": give_role(world)})

    assert programs.read("meta-data/iam/security-credentials/") == "node"
    keys = programs.document("meta-data/iam/security-credentials/node")
    assert programs.document("meta-data/iam/security-credentials/node") == keys
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", keys["Expiration"])
    client = world.client(
        "sts", aws_access_key_id=keys["AccessKeyId"], aws_secret_access_key=keys["SecretAccessKey"],
        aws_session_token=keys["Token"],
    )  # fmt: skip
    assert client.get_caller_identity()["Arn"] == f"arn:aws:sts::{world.account}:assumed-role/node/{machine}"


def test_tags_are_told_where_the_launch_says_so(world: World, network: Network, stack: ExitStack) -> None:
    tags = [{"ResourceType": "instance", "Tags": [{"Key": "switchyard:unit", "Value": "u-1"}]}]
    _, silent = launch(world, network, stack, TagSpecifications=tags)
    options = {"InstanceMetadataTags": "enabled"}
    _, telling = launch(world, network, stack, TagSpecifications=tags, MetadataOptions=options)

    assert silent.read("meta-data/tags/instance/switchyard:unit") is None
    assert telling.read("meta-data/tags/instance/switchyard:unit") == "u-1"


def test_warnings_and_scheduled_events(world: World, network: Network, stack: ExitStack) -> None:
    machine, programs = launch(world, network, stack, InstanceMarketOptions=SPOT)

    assert programs.read("meta-data/spot/instance-action") is None
    assert programs.read("meta-data/events/recommendations/rebalance") is None
    assert programs.document("meta-data/events/maintenance/scheduled") == []
    recommend_rebalance(world, machine)
    schedule(world, machine, "instance-retirement", BEGAN + 86400)
    warn_of_interruption(world, machine)
    assert programs.document("meta-data/events/recommendations/rebalance") == {"noticeTime": "2027-01-15T08:00:30Z"}
    assert programs.document("meta-data/spot/instance-action") == {
        "action": "terminate", "time": "2027-01-15T08:02:30Z",
    }  # fmt: skip
    [event] = programs.document("meta-data/events/maintenance/scheduled")
    assert (event["Code"], event["NotBefore"]) == ("instance-retirement", "16 Jan 2027 08:00:00 GMT")
    assert event["State"] == "active"


def test_a_machine_that_is_forgotten_has_nothing(world: World, network: Network, stack: ExitStack) -> None:
    machine, programs = launch(world, network, stack)
    network.ec2.terminate_instances(InstanceIds=[machine])
    assert programs.read("meta-data/instance-id") == machine
    world.clock.advance(world.delays.shutting_down_s + world.delays.forgotten_s)

    assert programs.read("meta-data/instance-id") is None


def test_the_agent_of_a_node_reads_what_its_machine_is_told(world: World, network: Network, stack: ExitStack) -> None:
    machine, programs = launch(world, network, stack, InstanceMarketOptions=SPOT)
    metadata = Metadata(("127.0.0.1", programs.port))
    assert metadata.notices(0.0) == ()
    warn_of_interruption(world, machine)
    recommend_rebalance(world, machine)
    schedule(world, machine, "instance-retirement", 1795489330.0)
    ends = {notice.kind.value: notice.ends_at for notice in metadata.notices(1.0)}
    assert ends.keys() == {"interruption", "rebalance", "retirement"}
    assert ends["retirement"] == 1795489330.0
