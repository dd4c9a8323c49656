"""Units are launched by one call, once although processes crash, and all or none."""

from datetime import timedelta

import pytest

from fleet.clouds.base import Machine, NoCapacity, ProviderError
from fleet.machines.models import ProviderCall
from fleet.machines.services import provisioning
from fleet.machines.services.orders import CLAIM, calls_claim
from fleet.machines.services.provisioning import call_carry_out
from fleet.nodes.models import Node
from fleet.nodes.services.nodes import node_retire, nodes_launch
from fleet.reconcile.planning.decisions import LaunchNodes, RetireNode
from fleet.reconcile.planning.states import NodeState
from fleet.reconcile.selectors.snapshot import fleet_view
from kernel import clock
from tests.fleet import rows
from tests.fleet.cloud import Cloud
from tests.fleet.provision import MANY, Clock, provision
from tests.fleet.racing import race
from tests.fleet.rows import KIND, NOW

pytestmark = [pytest.mark.usefixtures("now", "cloud"), pytest.mark.slow]


class Killed(BaseException):
    pass


def order_unit(size: int, count: int = 1) -> None:
    rows.deployment()
    nodes_launch(LaunchNodes("us-east-1", KIND, size * count, "a cell", there=0, unit=size), now=clock.now())


@pytest.mark.django_db
def test_the_machines_of_a_unit_are_one_call(cloud: Cloud) -> None:
    order_unit(3, count=2)
    assert len({view.unit for view in fleet_view(now=NOW).nodes.values()}) == 2
    provision()
    assert (cloud.together, ProviderCall.objects.count()) == ([3, 3], 0)
    assert [spec.id for spec in cloud.launched[:3]] == sorted(spec.id for spec in cloud.launched[:3])
    assert {view.unit for view in fleet_view(now=NOW).nodes.values()} == {""}, "they are no order any more"


@pytest.mark.django_db
def test_a_unit_takes_one_slot_is_one_attempts_and_waits_and_is_lost_as_one(cloud: Cloud, now: Clock) -> None:
    order_unit(2, count=2)
    first, *others = calls_claim(free={"local": 1}, otherwise=MANY, now=NOW)
    assert (len(first), others, {call.claim for call in first}) == (2, [], {first[0].claim})
    assert [len(calls) for calls in calls_claim(free={}, otherwise=MANY, now=NOW)] == [2], "the other one"
    cloud.answer = NoCapacity("no two of them stand together")
    call_carry_out(first)
    assert ProviderCall.objects.filter(claim="", due_at__gt=NOW, attempts=0).count() == 2
    now.now += CLAIM
    cloud.answer = ProviderError("no such image")
    provision()
    assert set(Node.objects.values_list("state", flat=True)) == {"lost"}


@pytest.mark.django_db
def test_a_member_of_a_unit_that_is_given_back_is_not_launched_with_the_others(cloud: Cloud, now: Clock) -> None:
    order_unit(3)
    cloud.answer = NoCapacity("sold out")
    provision()
    given_back, *kept = Node.objects.order_by("id").values_list("id", flat=True)
    node_retire(RetireNode(given_back, NodeState.JOINING, "surplus"), now=now.now)
    cloud.answer = None
    now.now += timedelta(seconds=2)
    provision()
    assert ([spec.id for spec in cloud.launched], cloud.together, cloud.terminated) == (kept, [2], [given_back])


@pytest.mark.django_db
def test_of_a_unit_whose_process_dies_while_it_is_noted_the_rest_is_launched_again(
    cloud: Cloud, now: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    order_unit(3)
    stored: list[str] = []

    def dies_at_the_second(*, node: str, machine: Machine) -> None:
        if stored:
            raise Killed
        stored.append(node)

    with monkeypatch.context() as broken:
        broken.setattr(provisioning, "machine_store", dies_at_the_second)
        with pytest.raises(Killed):
            provision()
    now.now += CLAIM
    provision()
    assert (cloud.together, ProviderCall.objects.count()) == ([3, 2], 0)
    assert set(Node.objects.values_list("state", flat=True)) == {"joining"}


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("first", [0, 1], ids=["its first", "another"])
def test_a_unit_is_claimed_once_and_without_whoever_is_given_back_meanwhile(first: int) -> None:
    order_unit(3)
    nodes = list(Node.objects.order_by("id").values_list("id", flat=True))
    claims: list[list[str]] = []

    def claim() -> None:
        claims.extend([call.node_id for call in calls] for calls in calls_claim(free={}, otherwise=MANY, now=NOW))

    def give_back() -> None:
        node_retire(RetireNode(nodes[first], NodeState.JOINING, "surplus"), now=NOW)

    assert race(give_back, claim) == "applied"
    claim()
    left = [node for node in nodes if node != nodes[first]]
    assert sorted(claims, key=len) == [[nodes[first]], left], "its end, and the launch of the others"


@pytest.mark.django_db(transaction=True)
def test_two_workers_never_claim_the_same_unit() -> None:
    order_unit(3, count=2)
    claims: list[int] = []

    def claim() -> None:
        claims.extend(len(calls) for calls in calls_claim(free={}, otherwise=MANY, now=NOW))

    assert race(claim, claim) == "applied"
    assert claims == [3, 3]
