"""Images of tasks: a change of the stack moves nothing, a move tries one unit first, and a bad image goes back."""

import pytest

from fleet.clouds.models import CloudNotice, CloudRegion, ImageMove, TaskImage
from fleet.clouds.services.images import cloud_images, image_move_request
from fleet.machines.models import Machine
from fleet.nodes.models import Node
from fleet.reconcile.planning.states import NodeState
from fleet.regions.models import Region
from fleet.regions.pages.views import region_images
from kernel import clock
from kernel.refusals import InvalidInput
from tests.fleet.clouds.aws.cloud_fleet import REGION, TRN1
from tests.fleet.clouds.ecs.cluster_fleet import REGISTRY, ClusterFleet

pytestmark = pytest.mark.cloud

OLD, NEW = f"{REGISTRY}/node-agent:1.0", f"{REGISTRY}/node-agent@sha256:{'c' * 64}"


def order(fleet: ClusterFleet, state: NodeState = NodeState.READY) -> str:
    """Orders a node that joins immediately, or is lost."""
    fleet.world.clock.advance(1)
    [node] = fleet.order(1)
    fleet.provision()
    Node.objects.filter(id=node).update(state=state, state_since=clock.now())
    return node


def step(fleet: ClusterFleet, seconds: float = 10.0) -> ImageMove:
    fleet.world.clock.advance(seconds)
    cloud_images(CloudRegion.objects.select_related("region").get(), clock.now())
    return ImageMove.objects.get()


def images() -> list[str]:
    """Of the machines, in order of launch."""
    return list(Machine.objects.order_by("created_at", "id").values_list("image", flat=True))


def ask(image: str = NEW) -> ImageMove:
    return image_move_request(REGION, TRN1, image, actor="ops", now=clock.now())


def test_one_unit_is_tried_and_the_others_follow(cluster_fleet: ClusterFleet) -> None:
    with pytest.raises(InvalidInput, match="no task for nodes"):
        ask()
    first = order(cluster_fleet)
    cloud = CloudRegion.objects.get()
    cloud.base["cluster"]["image"] = "registry/node-agent:9"
    cloud.save()
    second = order(cluster_fleet)
    assert images() == [OLD, OLD], "a later reading of the stack moves nothing"
    for wrong in ("ami-0123456789abcdef0", "registry/node-agent", "registry/node agent:1"):
        with pytest.raises(InvalidInput, match="not a reference"):
            ask(wrong)

    ask()
    assert step(cluster_fleet).reason == f"{min(first, second)} leaves for it"
    order(cluster_fleet)
    order(cluster_fleet)
    assert images() == [OLD, OLD, NEW, OLD], "while one is tried, others are started as before"
    assert step(cluster_fleet, 601).state == "rolling"
    old = [row.runs for row in Machine.objects.filter(image=OLD)]
    cluster_fleet.give_back(*old)
    cluster_fleet.provision_for(30)
    order(cluster_fleet)
    move = step(cluster_fleet)
    assert (move.state, move.reason) == ("done", "all machines run it")
    assert TaskImage.objects.values_list("image", "next_image").get() == (NEW, "")
    running = {task.arn.rpartition("/")[2] for task in cluster_fleet.tasks()}
    assert set(Machine.objects.filter(provider_id__in=running).values_list("image", flat=True)) == {NEW}


def test_two_units_that_do_not_start_turn_it_back(cluster_fleet: ClusterFleet) -> None:
    order(cluster_fleet)
    ask()
    step(cluster_fleet)
    order(cluster_fleet, NodeState.LOST)
    step(cluster_fleet)
    order(cluster_fleet, NodeState.LOST)
    assert step(cluster_fleet).state == "back"
    assert not CloudNotice.objects.filter(settled_at=None).exists()
    order(cluster_fleet)
    assert images() == [OLD, NEW, NEW, OLD]
    [shown] = region_images(Region.objects.get()).types
    assert (shown.instance_type, shown.images, shown.is_under_way) == (TRN1, (OLD,), True)
