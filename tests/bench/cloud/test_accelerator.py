"""Global Accelerator in the cloud of tests: dials from 0 to 100, tags, and its API in one region."""

from typing import Any

import pytest

from bench.cloud.server import World
from tests.bench.cloud.conftest import refusal

pytestmark = pytest.mark.cloud

LISTENER = "arn:aws:globalaccelerator::1:accelerator/a/listener/l"


@pytest.fixture
def client(world: World) -> Any:
    return world.client("globalaccelerator", "us-west-2")


def test_a_dial_is_set_and_read_again(client: Any) -> None:
    create = {"ListenerArn": LISTENER, "EndpointGroupRegion": "us-east-1"}
    group = client.create_endpoint_group(**create)["EndpointGroup"]
    arn = group["EndpointGroupArn"]

    assert group["TrafficDialPercentage"] == 100
    client.update_endpoint_group(EndpointGroupArn=arn, TrafficDialPercentage=30)
    client.tag_resource(ResourceArn=arn, Tags=[{"Key": "switchyard:revision", "Value": "7"}])
    assert client.describe_endpoint_group(EndpointGroupArn=arn)["EndpointGroup"]["TrafficDialPercentage"] == 30
    assert client.list_tags_for_resource(ResourceArn=arn)["Tags"] == [{"Key": "switchyard:revision", "Value": "7"}]
    assert refusal(client.create_endpoint_group, **create) == "EndpointGroupAlreadyExistsException"
    beyond = {"EndpointGroupArn": arn, "TrafficDialPercentage": 101}
    assert refusal(client.update_endpoint_group, **beyond) == "InvalidArgumentException"


def test_nobodys_group_and_another_region(world: World, client: Any) -> None:
    group = {"EndpointGroupArn": f"{LISTENER}/endpoint-group/none"}

    assert refusal(client.describe_endpoint_group, **group) == "EndpointGroupNotFoundException"
    elsewhere = world.client("globalaccelerator", "us-east-1")
    assert refusal(elsewhere.describe_endpoint_group, **group) == "UnrecognizedClientException"
