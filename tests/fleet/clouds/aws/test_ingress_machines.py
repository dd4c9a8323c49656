"""Ingress machines of a region in the test cloud, and the targets of its load balancer."""

from typing import Any

import msgspec
import pytest

from fleet.clouds.models import CloudRegion
from fleet.machines.models import Machine
from fleet.regions.models import Region
from kernel import clock
from kernel.models import Event
from lab.cloud.server import World
from models_registry.instance_types.models import InstanceType
from tests.fleet.clouds.aws.cloud_fleet import REGION, ZONES, CloudFleet, make_pool
from tests.lab.cloud.aws_calls import Calls
from tests.lab.cloud.conftest import make_network, make_target_group, target_states
from traffic.entry.models import EntryTarget
from traffic.entry.services import entry_targets_follow
from traffic.routing.models import Ingress, IngressReport
from traffic.routing.services.ingresses import cloud_ingresses_ensure, ingress_machines_follow

pytestmark = [pytest.mark.cloud, pytest.mark.django_db]


class Entrance:
    """The region's ingresses and its one target group."""

    def __init__(self, fleet: CloudFleet) -> None:
        self.fleet, self.world = fleet, fleet.world
        InstanceType.objects.get_or_create(name="c7i.2xlarge", defaults={"accelerator": "none", "price_per_hour": 0.36})
        cloud = CloudRegion.objects.get()
        base: dict[str, Any] = cloud.base
        for position, zone in enumerate(ZONES, 11):
            make_pool(position, zone, base["zones"][zone]["subnet"], instance_type_id="c7i.2xlarge")
        self.client, self.group = make_target_group(self.world, make_network(self.world))
        base |= {"ingress_group": base["node_group"], "ingress_profile": base["node_profile"]}
        CloudRegion.objects.update(base=msgspec.to_builtins(base) | {"target_groups": {"tls": self.group}})
        self.calls = Calls(self.world)

    def pass_by(self, seconds: float = 11.0) -> None:
        self.world.clock.advance(seconds)
        now = clock.now()
        ingress_machines_follow(now=now)
        cloud_ingresses_ensure(now=now)
        entry_targets_follow(now=now, call=self.calls)

    def report(self, *names: str, revision: int = 1) -> None:
        for name in names:
            stated = {"connected": True, "revision": revision, "last_seen_at": clock.now()}
            IngressReport.objects.filter(ingress=name).update(**stated)

    def targets(self) -> dict[str, str]:
        return target_states(self.client, self.group)


@pytest.fixture
def entrance(cloud_fleet: CloudFleet) -> Entrance:
    return Entrance(cloud_fleet)


def ingresses() -> dict[str, Ingress]:
    return {each.zone: each for each in Ingress.objects.filter(region_id=REGION)}


def test_each_zone_gets_one_machine_and_it_becomes_a_target_with_its_table(entrance: Entrance) -> None:
    for _ in range(4):
        entrance.pass_by()
    made = ingresses()
    assert set(made) == set(ZONES)
    assert len(entrance.world.machines.live()) == 2, "and no more, however often it is looked at"
    assert {row.zone for row in Machine.objects.all()} == set(ZONES)
    addresses = {each.address for each in made.values()}
    assert "" not in addresses
    assert entrance.targets() == {}

    entrance.report(*(each.id for each in made.values()))
    entrance.pass_by()
    assert set(entrance.targets()) == addresses
    assert set(EntryTarget.objects.values_list("port", flat=True)) == {11080}
    told = set(Event.objects.filter(kind="ingress.target").values_list("message", flat=True))
    assert told == {f"{each.id} gets clients of the load balancer at port 11080" for each in made.values()}


def test_groups_for_grpc_have_targets_while_the_region_serves_it(entrance: Entrance) -> None:
    groups = {"tls": entrance.group, "grpc": f"{entrance.group}-grpc", "plain_grpc": f"{entrance.group}-plain"}
    cloud = CloudRegion.objects.get()
    CloudRegion.objects.update(base=cloud.base | {"target_groups": groups})
    Ingress.objects.create(id="i-1", region_id=REGION, address="10.0.0.9", port=8080, created_at=clock.now())
    IngressReport.objects.create(ingress_id="i-1", connected=True, revision=1, last_seen_at=clock.now())
    sent: list[tuple[str, str, int]] = []

    def call(service: str, operation: str, region: str, **params: Any) -> dict[str, Any]:
        sent.append((operation, params["TargetGroupArn"], params["Targets"][0]["Port"]))
        return {"TargetHealthDescriptions": []}

    def follow() -> list[tuple[str, str, int]]:
        sent.clear()
        entry_targets_follow(now=clock.now(), call=call)
        return sent

    assert follow() == [("RegisterTargets", groups["tls"], 11080)]
    Region.objects.update(grpc=True)
    assert follow() == [
        ("RegisterTargets", groups["grpc"], 13080),
        ("RegisterTargets", groups["plain_grpc"], 12080),
    ]
    Region.objects.update(grpc=False)
    assert follow() == [
        ("DeregisterTargets", groups["grpc"], 13080),
        ("DeregisterTargets", groups["plain_grpc"], 12080),
    ]


def test_a_machine_that_leaves_is_taken_out_first_and_waits_for_its_streams(entrance: Entrance) -> None:
    for _ in range(4):
        entrance.pass_by()
    first, second = ingresses().values()
    entrance.report(first.id, second.id)
    entrance.pass_by()
    Machine.objects.filter(runs=first.id).update(leaving=True)
    entrance.pass_by()
    assert entrance.targets()[first.address] == "draining"
    entrance.pass_by(60)
    assert Ingress.objects.filter(id=first.id).exists(), "its streams may go on"
    for _ in range(3):
        entrance.pass_by(301)
    assert not Ingress.objects.filter(id=first.id).exists()
    assert not EntryTarget.objects.filter(ingress=first.id).exists()
    assert entrance.targets().keys() >= {second.address}


def test_one_whose_machine_ended_is_replaced_under_another_id(entrance: Entrance, world: World) -> None:
    for _ in range(4):
        entrance.pass_by()
    before = {each.id for each in ingresses().values()}
    ended = Machine.objects.order_by("id").first()
    assert ended is not None
    world.client("ec2").terminate_instances(InstanceIds=[ended.provider_id])
    for _ in range(12):
        entrance.pass_by()
    after = ingresses()
    assert set(after) == set(ZONES)
    assert len(before & {each.id for each in after.values()}) == 1
