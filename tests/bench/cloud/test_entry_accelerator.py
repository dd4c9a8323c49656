"""Dials of Global Accelerator at the cloud of tests: they follow the weights, and nobody else is overwritten."""

from datetime import timedelta

import pytest

from bench.cloud.faults import Ending, Fault, When
from bench.cloud.server import World
from fleet.models import CloudRegion, Incident
from tests.bench.cloud.test_entry_route53 import EAST, WEST, Operated, evacuate
from traffic.services.entry_accelerator import EntryDials

pytestmark = [pytest.mark.cloud, pytest.mark.django_db]

LISTENER = "arn:aws:globalaccelerator::123456789012:accelerator/a/listener/l"


class Dialled(Operated):
    """With an endpoint group for each region."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.accelerator, self.groups = world.client("globalaccelerator", "us-west-2"), dict[str, str]()
        for region in (EAST, WEST):
            made = self.accelerator.create_endpoint_group(
                ListenerArn=LISTENER, EndpointGroupRegion=region, IdempotencyToken=region
            )
            self.groups[region] = made["EndpointGroup"]["EndpointGroupArn"]
            row = CloudRegion.objects.get(region_id=region)
            row.base["accelerator"] = self.groups[region]
            row.save()
        self.dial = EntryDials()

    def follow(self) -> dict[str, float]:
        self.now += timedelta(seconds=61)
        self.dial.follow(now=self.now, call=self.calls)
        return {
            region: self.accelerator.describe_endpoint_group(EndpointGroupArn=arn)["EndpointGroup"][
                "TrafficDialPercentage"
            ]
            for region, arn in self.groups.items()
        }


@pytest.fixture
def dialled(world: World) -> Dialled:
    dialled = Dialled(world)
    dialled.pass_by()
    dialled.settle()
    return dialled


def test_dials_follow_the_weights_and_the_last_one_is_open(dialled: Dialled) -> None:
    assert dialled.follow() == {EAST: 99, WEST: 100}
    evacuate(dialled, EAST, "real")
    dialled.pass_by()
    assert dialled.follow() == {EAST: 0, WEST: 100}
    changes = dialled.world.count("UpdateEndpointGroup")
    dialled.follow()
    assert dialled.world.count("UpdateEndpointGroup") == changes, "what is as wanted is not set again"


def test_a_dial_that_somebody_else_set_is_left_alone(dialled: Dialled) -> None:
    dialled.follow()
    dialled.accelerator.update_endpoint_group(EndpointGroupArn=dialled.groups[EAST], TrafficDialPercentage=30)
    evacuate(dialled, WEST, "real")
    dialled.pass_by()
    assert dialled.follow() == {EAST: 30, WEST: 100}
    assert "set it back, or untag" in Incident.objects.get(kind="entry-held").summary


def test_one_that_was_cut_short_goes_on(dialled: Dialled) -> None:
    dialled.follow()
    evacuate(dialled, EAST, "real")
    dialled.pass_by()
    dialled.world.faults.append(Fault("UpdateEndpointGroup", when=When.AFTER, ending=Ending.RESET))
    dialled.follow()
    assert dialled.follow() == {EAST: 0, WEST: 100}
    assert not Incident.objects.filter(kind="entry-held").exists()


def test_a_dial_that_cannot_be_opened_closes_no_other(dialled: Dialled) -> None:
    dialled.follow()
    evacuate(dialled, WEST, "real")
    dialled.pass_by()
    dialled.world.faults.append(Fault("UpdateEndpointGroup", code="TransactionInProgressException"))
    assert dialled.follow() == {EAST: 99, WEST: 100}
    assert dialled.follow() == {EAST: 100, WEST: 0}
