"""An image move through the services: one unit is launched from the image first, then the others; and the way back."""

from collections.abc import Iterator
from typing import Any

import pytest

from fleet.capacity.planning.pools import Market
from fleet.clouds.aws.calls import Unanswered
from fleet.clouds.aws.region import PoolFound, RegionRead
from fleet.clouds.models import CapacityPool, CloudNotice, CloudRegion, ImageMove
from fleet.clouds.services.images import cloud_images, image_move_request, image_move_roll_back
from fleet.clouds.services.regions import cloud_region_read
from fleet.machines.models import Machine
from fleet.nodes.models import Node
from fleet.reconcile.planning.states import NodeState
from kernel import clock
from kernel.models import Event
from kernel.refusals import Conflict
from tests.fleet.clouds.aws.cloud_fleet import REGION, TRN1, CloudFleet
from tests.lab.cloud.conftest import IMAGE

pytestmark = pytest.mark.cloud


@pytest.fixture
def image(cloud_fleet: CloudFleet) -> str:
    """Another image in the region's account."""
    made = cloud_fleet.world.client("ec2").register_image(Name="newer")
    return str(made["ImageId"])


def step(fleet: CloudFleet, seconds: float = 0.0) -> ImageMove:
    fleet.world.clock.advance(seconds)
    cloud_images(CloudRegion.objects.get(), clock.now())
    return ImageMove.objects.get()


def order(fleet: CloudFleet, state: NodeState = NodeState.READY) -> list[str]:
    """Orders a unit whose nodes join immediately, or are lost."""
    fleet.world.clock.advance(1)
    nodes = fleet.order(1)
    fleet.provision()
    Node.objects.filter(id__in=nodes).update(state=state, state_since=clock.now())
    return nodes


def retire(fleet: CloudFleet, node: str) -> None:
    """Retires a spare that leaves, as the reconciler does after its replacement joined."""
    fleet.give_back(node)
    fleet.provision_for(30)


def images() -> list[str]:
    return list(Machine.objects.order_by("created_at", "id").values_list("image", flat=True))


def told() -> Iterator[str]:
    yield from CloudNotice.objects.filter(settled_at=None).values_list("machine__runs", flat=True)


def ask(image: str) -> ImageMove:
    return image_move_request(REGION, TRN1, image, actor="ops", now=clock.now())


def begin(image: str) -> ImageMove:
    ask(image)
    cloud_images(CloudRegion.objects.get(), clock.now())
    move = ImageMove.objects.get()
    assert move.state == "canary"
    return move


def test_one_unit_is_tried_and_the_others_follow_one_by_one(cloud_fleet: CloudFleet, image: str) -> None:
    first, second = order(cloud_fleet) + order(cloud_fleet)
    assert begin(image).reason == f"{min(first, second)} leaves for it"
    assert list(told()) == [min(first, second)]

    [canary], [usual] = order(cloud_fleet), order(cloud_fleet)
    assert images() == [IMAGE, IMAGE, image, IMAGE], "while one is tried, others are launched as before"
    assert CloudRegion.objects.get().stated_base().root_device_of(image) == "/dev/sda1"
    assert step(cloud_fleet, 300).state == "canary"
    assert step(cloud_fleet, 301).state == "rolling"
    retire(cloud_fleet, min(first, second))
    left = sorted({first, second, usual} - {min(first, second)})
    for node in left:
        assert step(cloud_fleet, 10).reason == f"{node} leaves for it"
        order(cloud_fleet)
        retire(cloud_fleet, node)

    move = step(cloud_fleet, 10)
    assert (move.state, move.reason, move.ended_at) == ("done", "all machines run it", clock.now())
    assert images()[-2:] == [image, image]
    assert set(CapacityPool.objects.values_list("image", "next_image")) == {(image, "")}
    assert canary in move.booted
    assert not list(told())
    kinds = Event.objects.filter(kind__startswith="image.").order_by("pk").values_list("kind", flat=True)
    assert list(kinds) == ["image.asked", "image.canary", "image.rolling", "image.done"]


def test_two_units_that_do_not_boot_turn_it_round_and_pools_keep_their_image(
    cloud_fleet: CloudFleet, image: str
) -> None:
    [old] = order(cloud_fleet)
    begin(image)
    step(cloud_fleet)
    order(cloud_fleet, NodeState.LOST)
    assert step(cloud_fleet, 10).state == "canary"
    order(cloud_fleet, NodeState.LOST)
    move = step(cloud_fleet, 10)

    assert (move.state, move.reason) == ("back", "2 launches from it did not boot")
    assert not list(told()), f"{old} stays after all"
    order(cloud_fleet)
    assert images() == [IMAGE, image, image, IMAGE]
    assert step(cloud_fleet, 10).reason == "all went back"
    assert set(CapacityPool.objects.values_list("image", "next_image")) == {(IMAGE, "")}


def test_a_person_turns_it_round_and_what_runs_it_is_replaced(cloud_fleet: CloudFleet, image: str) -> None:
    order(cloud_fleet)
    begin(image)
    step(cloud_fleet)
    [canary] = order(cloud_fleet)
    image_move_roll_back(ImageMove.objects.get().pk, actor="ops", now=clock.now())

    assert step(cloud_fleet, 10).reason == f"{canary} leaves for it"
    with pytest.raises(Conflict, match="is back: only a move that is under way can be rolled back"):
        image_move_roll_back(ImageMove.objects.get().pk, actor="ops", now=clock.now())
    retire(cloud_fleet, canary)
    assert step(cloud_fleet, 10).state == "done"


def test_what_the_cloud_does_not_have_is_refused_and_an_answer_is_waited_for(
    cloud_fleet: CloudFleet, image: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask("ami-00000000000000000")
    move = step(cloud_fleet)
    assert (move.state, move.reason) == (
        "refused", "us-east-1 has no image ami-00000000000000000 that this account may use",
    )  # fmt: skip
    assert move.ended_at is not None
    ImageMove.objects.all().delete()

    ask(image)
    with monkeypatch.context() as patched:
        patched.setattr("fleet.clouds.services.images.call", silent)
        assert (step(cloud_fleet).state, step(cloud_fleet).reason) == ("asked", "no answer yet: none in 20 s")
    assert step(cloud_fleet).state == "canary"
    ImageMove.objects.all().delete()

    CapacityPool.objects.update(image=image, next_image="")
    stated(monkeypatch, cloud_fleet, image)
    ask("")
    assert step(cloud_fleet).reason == f"launches of {TRN1} in us-east-1 use {image} already"
    assert cloud_fleet.world.count("RunInstances") == 0


def test_the_image_that_the_stack_states_is_found_by_the_loop(
    cloud_fleet: CloudFleet, image: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    order(cloud_fleet)
    stated(monkeypatch, cloud_fleet, image)
    ask("")
    assert str(ImageMove.objects.get()) == f"{TRN1} in us-east-1 to the image that its stack states"
    move = step(cloud_fleet)
    assert (move.image, move.state) == (image, "canary")
    assert set(CapacityPool.objects.values_list("next_image", flat=True)) == {image}


def silent(*_: Any, **__: Any) -> Any:
    raise Unanswered("", "none in 20 s")


def stated(monkeypatch: pytest.MonkeyPatch, fleet: CloudFleet, image: str) -> None:
    """The region's stack has one pool, with this image."""
    pools = tuple(
        PoolFound(pool.instance_type_id, Market(pool.market), pool.zone, pool.zone_id, pool.subnet, image)
        for pool in CapacityPool.objects.all()[:1]
    )
    base = CloudRegion.objects.get().stated_base()
    monkeypatch.setattr("fleet.clouds.services.images.region_read", lambda *_: RegionRead(base, pools))


def test_an_image_that_pools_use_keeps_its_root_volume_when_the_stack_names_others(
    cloud_fleet: CloudFleet, image: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(image)
    cloud = CloudRegion.objects.get()
    cloud.base["root_devices"][IMAGE] = cloud.base["root_devices"]["ami-0000unused"] = "/dev/sda1"
    cloud.save()

    def read(*_: Any) -> Any:
        base = cloud.stated_base()
        base.root_devices.clear()
        base.root_devices["ami-0000newest"] = "/dev/xvda"
        return RegionRead(base, ())

    monkeypatch.setattr("fleet.clouds.services.regions.region_read", read)
    cloud_region_read(CloudRegion.objects.get(), clock.now())
    assert CloudRegion.objects.get().base["root_devices"] == {
        "ami-0000newest": "/dev/xvda", IMAGE: "/dev/sda1", image: "/dev/sda1",
    }  # fmt: skip
