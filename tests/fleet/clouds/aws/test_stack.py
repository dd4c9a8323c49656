"""A region takes its state from its stack: ready or refused with a reason, and pools for its offers."""

from datetime import timedelta
from typing import Any

import pytest

from fleet.capacity.planning.pools import Market
from fleet.clouds.aws.identity import install_ensure
from fleet.clouds.aws.region import IMAGE_OUTPUTS, image_of
from fleet.clouds.models import CapacityPool, CloudRegion
from fleet.clouds.services.regions import cloud_new_types_read, cloud_region_read
from fleet.clouds.services.upkeep import CloudUpkeep
from fleet.deployments.selectors import instance_types_wanted
from fleet.machines.models import ProviderCall
from fleet.nodes.models import Node
from fleet.reconcile.planning.states import CloudRegionState
from fleet.regions.models import Region
from fleet.regions.services import region_create
from kernel import clock
from kernel.refusals import InvalidInput
from lab.cloud.machines import Market as Sold
from lab.cloud.machines import Reserved
from lab.cloud.server import World
from lab.cloud.stack import IMAGES, PINNED, ROOT_DEVICE, deploy_base, deploy_region
from lab.cloud.world import Fault
from models_registry.instance_types.models import InstanceType
from models_registry.instance_types.planner import INSTANCE_TYPES
from models_registry.instance_types.services import instance_types_ship
from tests.fleet import rows

pytestmark = [pytest.mark.cloud, pytest.mark.django_db]

STACK = "switchyard-us-east-2"
NAME = "us-east-2"


def create(**columns: Any) -> Region:
    given = {"provider": "aws", "stack": STACK, **columns}
    return region_create(name=NAME, columns=given, actor="ops", now=clock.now())


def read() -> CloudRegion:
    cloud = CloudRegion.objects.get(pk=NAME)
    cloud_region_read(cloud, clock.now())
    cloud.refresh_from_db()
    return cloud


@pytest.fixture
def aws(cloud_fleet: Any) -> World:
    """A fleet's clients, and the base of this install."""
    InstanceType.objects.update_or_create(name="c7i.2xlarge", defaults={"accelerator": "none"})
    world: World = cloud_fleet.world
    world.base = deploy_base(world, install_ensure(clock.now()).id)  # type: ignore[attr-defined]
    return world


def deploy(world: World, **parameters: str) -> None:
    base = {**world.base, **{key: parameters.pop(key) for key in ("Install",) if key in parameters}}  # type: ignore[attr-defined]
    deploy_region(world, NAME, base, NetworkPrefix="10.2", **parameters)


def test_creating_a_region_asks_the_cloud_nothing_and_reading_it_makes_it_ready(aws: World) -> None:
    deploy(aws, PlainHttp="yes", Grpc="yes")
    before = len(aws.calls)

    create()

    assert len(aws.calls) == before
    assert CloudRegion.objects.get(pk=NAME).state == CloudRegionState.READING
    cloud = read()
    base = cloud.stated_base()
    assert (cloud.state, cloud.reason) == (CloudRegionState.READY, "")
    assert base.account == aws.account
    assert sorted(base.zones) == ["us-east-2a", "us-east-2b"]
    assert base.node_role == f"{install_ensure(clock.now()).id}-node"
    assert set(base.target_groups) == {"tls", "plain", "grpc", "plain_grpc"}
    assert set(base.root_devices) == {image.id for image in IMAGES}
    assert set(base.root_devices.values()) == {ROOT_DEVICE}


def test_a_type_gets_pools_once_something_names_it(aws: World) -> None:
    deploy(aws)
    instance_types_ship()
    create()
    cloud = read()
    pools = CapacityPool.objects.filter(region_id=NAME)
    assert set(cloud.types_read) == instance_types_wanted()
    assert set(pools.values_list("instance_type_id", flat=True)) < instance_types_wanted()
    before = len(aws.calls)
    cloud_new_types_read(cloud, clock.now())
    assert len(aws.calls) == before
    rows.version("2", parallelism={"g5.xlarge": {}})
    cloud_new_types_read(cloud, clock.now())
    assert pools.filter(instance_type="g5.xlarge").exists()


def test_what_was_ordered_before_the_first_reading_is_launched_right_after_it(aws: World) -> None:
    deploy(aws, ZoneB="us-east-2c")
    create()
    later = clock.now() + timedelta(seconds=30)
    node = rows.node("n-00000001", where=NAME, state="joining")
    Node.objects.filter(pk=node.pk).update(instance_type_id="trn1.32xlarge")
    columns = {"action": "launch", "reason": "r", "requested_at": clock.now(), "due_at": later}
    ordered = ProviderCall.objects.create(node=node, **columns)

    read()

    ordered.refresh_from_db()
    assert ordered.due_at <= clock.now()


def test_pools_are_what_zones_offer_reservations_first(aws: World) -> None:
    deploy(aws, ZoneB="us-east-2c")
    install = install_ensure(clock.now()).id
    nodes = ("nn-1", "nn-2", "nn-3")
    for tags in ({}, {"switchyard:install": install}):
        aws.machines.capacity.reserve(
            Reserved("trn1.32xlarge", "us-east-2c", 4, aws.clock.now(), network_nodes=nodes, tags=tags)
        )
    create()

    read()

    pools = CapacityPool.objects.filter(region_id=NAME, instance_type_id="trn1.32xlarge")
    found = [(pool.position, pool.market, pool.zone, pool.image) for pool in pools]
    image = "ami-0000000000000aaaa"
    assert found[0] == (0, Market.RESERVED, "us-east-2c", image)
    assert [each[1] for each in found[1:]] == [Market.ON_DEMAND] * (len(found) - 1)
    assert pools[0].network_nodes == list(nodes)
    assert pools[0].free == 4
    assert CapacityPool.objects.filter(region_id=NAME, instance_type_id="c7i.2xlarge").exists()


def test_machines_get_the_image_of_their_accelerator_and_processor_or_the_pinned_one(aws: World) -> None:
    deploy(aws, PinnedGpuImage=PINNED.id)
    create()
    tags = {"switchyard:install": install_ensure(clock.now()).id}
    aws.machines.capacity.reserve(Reserved("g5g.xlarge", "us-east-2a", 1, aws.clock.now(), tags=tags))
    wanted = ["g5g.xlarge", "g6.xlarge", "trn2.48xlarge", "c7i.2xlarge"]
    rows.version("2", parallelism={kind: {} for kind in wanted})
    read()
    by_parameter = {image.parameter: image.id for image in IMAGES}
    used = dict(CapacityPool.objects.filter(region_id=NAME).values_list("instance_type_id", "image"))
    found = {kind: next((name for name, id_ in by_parameter.items() if id_ == used[kind]), used[kind]) for kind in used}
    assert found["g6.xlarge"] == PINNED.id
    assert "arm64/base-oss-nvidia-driver-gpu" in found["g5g.xlarge"]
    assert "neuron/dlami" in found["trn2.48xlarge"]
    assert "canonical/ubuntu/server/24.04/stable/current/amd64" in found["c7i.2xlarge"]


def test_an_image_for_other_processors_is_refused_by_name(aws: World) -> None:
    deploy(aws, PinnedGpuArmImage=PINNED.id)
    create()
    assert read().reason == f"GpuArmImage of stack {STACK} is {PINNED.id} for x86_64; it must be for arm64"


@pytest.mark.parametrize(
    ("kind", "output"),
    [
        ("trn1.32xlarge", "Trn1Image"), ("inf2.xlarge", "Trn1Image"), ("trn2.48xlarge", "NeuronImage"),
        ("p5.48xlarge", "GpuImage"), ("g5g.xlarge", "GpuArmImage"), ("c7i.2xlarge", "CpuImage"),
        ("local.cpu", "CpuImage"),
    ],
)  # fmt: skip
def test_the_image_of_a_type(kind: str, output: str) -> None:
    assert image_of(INSTANCE_TYPES[kind], {name: name for name in IMAGE_OUTPUTS}) == output


def test_a_further_pool_of_a_type_has_the_image_in_use(aws: World) -> None:
    """Machines of one type with different images would not form a cell: their fingerprints differ."""
    deploy(aws, ZoneB="us-east-2c")
    create()
    read()
    CapacityPool.objects.update(image="ami-0000000000older")
    tags = {"switchyard:install": install_ensure(clock.now()).id}
    aws.machines.capacity.reserve(Reserved("trn1.32xlarge", "us-east-2a", 2, aws.clock.now(), tags=tags))

    read()

    [further] = CapacityPool.objects.filter(region_id=NAME, market=Market.RESERVED)
    assert further.image == "ami-0000000000older"


def test_reading_again_adds_and_keeps_what_a_person_changed(aws: World) -> None:
    deploy(aws)
    create()
    read()
    CapacityPool.objects.filter(region_id=NAME).update(enabled=False)
    many = CapacityPool.objects.filter(region_id=NAME).count()
    aws.machines.capacity.reserve(
        Reserved(
            "trn1.32xlarge", "us-east-2a", 2, aws.clock.now(), market=Sold.ON_DEMAND,
            tags={"switchyard:install": install_ensure(clock.now()).id},
        )
    )  # fmt: skip

    read()

    assert CapacityPool.objects.filter(region_id=NAME, enabled=False).count() == many
    assert CapacityPool.objects.filter(region_id=NAME, enabled=True).count() == 1


def test_what_is_missing_is_named(aws: World) -> None:
    create()

    missing = read()
    assert missing.state == CloudRegionState.REFUSED
    assert f"there is no stack {STACK} in {NAME}" in missing.reason
    aws.client("cloudformation", NAME).create_stack(
        StackName=STACK,
        TemplateBody='{"Resources": {"Q": {"Type": "AWS::SQS::Queue"}},'
        ' "Outputs": {"Install": {"Value": "sw-0123456789ab"}, "ZoneA": {"Value": "us-east-2a"}}}',
    )
    lacking = read()
    assert lacking.state == CloudRegionState.REFUSED
    assert f"stack {STACK} has no output SubnetA, NodeGroup" in lacking.reason


def test_the_stack_of_another_install_is_refused(aws: World) -> None:
    deploy(aws, Install="sw-ffffffffffff")
    create()

    cloud = read()

    assert cloud.state == CloudRegionState.REFUSED
    assert "is of install sw-ffffffffffff" in cloud.reason
    assert not CapacityPool.objects.filter(region_id=NAME).exists()


def test_no_answer_leaves_a_region_as_it_was_and_a_refusal_one_that_is_ready(aws: World) -> None:
    deploy(aws)
    create()
    aws.faults.append(Fault("DescribeStacks", "InternalFailure"))

    waiting = read()
    assert waiting.state == CloudRegionState.READING
    assert "no answer yet" in waiting.reason
    ready = read()
    assert ready.state == CloudRegionState.READY
    aws.faults.append(Fault("DescribeStacks", "AccessDenied", message="not yours"))
    still = read()
    assert (still.state, still.reason) == (CloudRegionState.READY, "AccessDenied: not yours")
    assert still.stated_base().zones


@pytest.mark.parametrize(
    ("columns", "field"),
    [
        ({"stack": ""}, "stack"),
        ({"stack": "no/such name"}, "stack"),
        ({"aws_region": "here"}, "aws_region"),
        ({"provider": "local"}, "stack"),
    ],
)
def test_what_no_region_can_be_of(aws: World, columns: dict[str, str], field: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        create(**columns)
    assert refused.value.field == field
    assert not Region.objects.filter(name=NAME).exists()


def test_the_loop_reads_a_region_that_is_not_ready_and_no_other(aws: World, monkeypatch: pytest.MonkeyPatch) -> None:
    create()
    begun: list[tuple[str, list[str]]] = []
    monkeypatch.setattr(CloudUpkeep, "_start_round", lambda _, cloud, due: begun.append((cloud.pk, due)))
    CloudRegion.objects.exclude(pk=NAME).delete()

    CloudUpkeep().run_pass()
    CloudRegion.objects.update(state=CloudRegionState.READY)
    CloudUpkeep().run_pass()

    assert begun[0] == (NAME, ["first stack"])
    assert "list" in begun[1][1]
    assert "first stack" not in begun[1][1]
