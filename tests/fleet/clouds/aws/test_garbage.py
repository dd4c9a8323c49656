"""Garbage collection of volumes, network interfaces and spot requests in the test cloud."""

from datetime import timedelta
from io import StringIO
from types import SimpleNamespace
from typing import Any

import pytest
from django.core.management import call_command
from django.core.management.base import CommandError

from fleet.clouds.aws.identity import install_ensure
from fleet.clouds.models import CloudRegion, Install
from fleet.clouds.services.garbage import cloud_garbage_collect
from fleet.faults.models import Incident
from fleet.reconcile.planning.states import CloudRegionState
from kernel import clock
from kernel.models import Event
from lab.cloud.world import Fault
from tests.fleet.clouds.aws.cloud_fleet import CloudFleet
from tests.lab.cloud.conftest import IMAGE

pytestmark = pytest.mark.cloud

LOOK_S = 900.0


def look(fleet: CloudFleet, times: int = 1) -> None:
    for _ in range(times):
        fleet.world.clock.advance(LOOK_S)
        cloud_garbage_collect(CloudRegion.objects.get(), clock.now())


def suspects() -> set[str]:
    return set(CloudRegion.objects.get().suspects.get("us-east-1/resources", ()))


def tags(kind: str, install: str, unit: str) -> list[dict[str, Any]]:
    own = {"switchyard:install": install, "switchyard:unit": unit}
    return [{"ResourceType": kind, "Tags": [{"Key": key, "Value": value} for key, value in own.items()]}]


def lose(fleet: CloudFleet, install: str = "", unit: str = "u-gone") -> dict[str, str]:
    """Leaves one of each kind unattached. Returns IDs by kind."""
    ec2, base = fleet.world.client("ec2"), CloudRegion.objects.get().stated_base()
    install = install or install_ensure(clock.now()).pk
    volume = ec2.create_volume(
        AvailabilityZone="us-east-1a", Size=8, TagSpecifications=tags("volume", install, unit)
    )["VolumeId"]  # fmt: skip
    interface = ec2.create_network_interface(
        SubnetId=base.zones["us-east-1a"].subnet, TagSpecifications=tags("network-interface", install, unit)
    )["NetworkInterface"]["NetworkInterfaceId"]
    return {"volume": volume, "interface": interface}


def there(fleet: CloudFleet) -> set[str]:
    ec2, free = fleet.world.client("ec2"), [{"Name": "status", "Values": ["available"]}]
    volumes = ec2.describe_volumes(Filters=free)["Volumes"]
    interfaces = ec2.describe_network_interfaces(Filters=free)["NetworkInterfaces"]
    return {*(one["VolumeId"] for one in volumes), *(one["NetworkInterfaceId"] for one in interfaces)}


@pytest.fixture
def fleet(cloud_fleet: CloudFleet) -> CloudFleet:
    """With a running unit, on an install that is older than a day."""
    cloud_fleet.order(2)
    cloud_fleet.provision()
    Install.objects.update(dry_run_until=clock.now())
    return cloud_fleet


def test_what_belongs_to_no_machine_is_ended_at_the_second_look_and_machines_keep_theirs(fleet: CloudFleet) -> None:
    lost, others = lose(fleet), lose(fleet, install="sw-ffffffffffff")
    before = len(fleet.world.client("ec2").describe_volumes()["Volumes"])
    look(fleet)
    assert set(lost.values()) <= there(fleet)
    look(fleet)

    assert there(fleet) == set(others.values())
    assert len(fleet.world.client("ec2").describe_volumes()["Volumes"]) == before - 1
    messages = Event.objects.filter(kind="garbage.deleted").values_list("message", flat=True)
    assert sorted(messages) == [
        f"Deleted network interface {lost['interface']} of provider aws: nothing referred to it",
        f"Deleted volume {lost['volume']} of provider aws: nothing referred to it",
    ]
    assert suspects() == set(lost.values()), "the list from before the deletion"
    look(fleet)
    assert not suspects()
    assert len(fleet.live()) == 2


def test_on_the_first_day_or_read_only_nothing_is_ended(fleet: CloudFleet) -> None:
    lost = lose(fleet)
    Install.objects.update(dry_run_until=clock.now() + timedelta(days=1))
    look(fleet, 3)
    Install.objects.update(dry_run_until=clock.now(), read_only="another control plane holds it")
    look(fleet, 2)

    assert set(lost.values()) <= there(fleet)


def test_a_look_that_came_in_part_is_none(fleet: CloudFleet) -> None:
    lost = lose(fleet)
    look(fleet)
    fleet.world.faults.append(Fault("DescribeNetworkInterfaces", "InternalError"))
    look(fleet)
    assert set(lost.values()) <= there(fleet)


def test_what_is_refused_is_left_and_holds_up_nothing_else(fleet: CloudFleet) -> None:
    lost = lose(fleet)
    fleet.world.faults.append(Fault("DeleteVolume", "VolumeInUse"))
    look(fleet, 2)
    assert there(fleet) == {lost["volume"]}
    look(fleet)
    assert not there(fleet)


def test_when_much_lies_about_nothing_is_ended_and_a_person_hears(fleet: CloudFleet) -> None:
    lost = {name for _ in range(6) for name in lose(fleet).values()}
    look(fleet, 2)

    assert lost <= there(fleet)
    assert Incident.objects.get().subject == "us-east-1/resources"
    for name in sorted(lost)[:2]:  # an interface sorts before a volume
        fleet.world.client("ec2").delete_network_interface(NetworkInterfaceId=name)
    for name in sorted(lost)[-2:]:
        fleet.world.client("ec2").delete_volume(VolumeId=name)
    look(fleet)
    assert not there(fleet)
    assert not Incident.objects.filter(state="open").exists()


def test_a_request_for_a_spot_machine_that_nothing_came_of_is_cancelled(fleet: CloudFleet) -> None:
    ec2, install = fleet.world.client("ec2"), install_ensure(clock.now()).pk
    asked = ec2.request_spot_instances(
        SpotPrice="1",
        LaunchSpecification={"ImageId": IMAGE, "InstanceType": fleet.kind},
        TagSpecifications=tags("spot-instances-request", install, "u-gone"),
    )["SpotInstanceRequests"][0]["SpotInstanceRequestId"]
    look(fleet, 2)
    requests = fleet.world.backend("ec2", "us-east-1").spot_instance_requests
    assert asked in requests, "it has a machine"
    # moto fulfils every request immediately.
    requests[asked].state, requests[asked].instance = "open", SimpleNamespace(id="")
    look(fleet, 2)

    assert asked not in requests


def test_the_command_says_what_would_be_ended_and_ends_it_when_it_is_told_to(fleet: CloudFleet) -> None:
    lost = lose(fleet)
    out = StringIO()
    call_command("collect_garbage", stdout=out)
    assert f"us-east-1: {lost['volume']} is a suspect" in out.getvalue()
    assert not suspects(), "printing changes nothing"
    look(fleet)
    fleet.world.clock.advance(LOOK_S)
    call_command("collect_garbage", region="us-east-1", stdout=out)
    assert f"us-east-1: {lost['volume']} would be deleted" in out.getvalue()
    assert set(lost.values()) <= there(fleet)
    call_command("collect_garbage", delete=True, stdout=out)
    assert not there(fleet)
    fleet.world.clock.advance(LOOK_S)
    last = StringIO()
    call_command("collect_garbage", stdout=last)
    assert last.getvalue() == "us-east-1: no garbage\n"


def test_the_command_names_why_nothing_is_ended_or_found(fleet: CloudFleet) -> None:
    Install.objects.update(dry_run_until=clock.now() + timedelta(hours=1))
    fleet.world.faults.append(Fault("DescribeVolumes", "UnauthorizedOperation"))
    out = StringIO()
    call_command("collect_garbage", stdout=out)
    assert "nothing is deleted until 2027-01-15" in out.getvalue()
    assert "us-east-1: it was not listed: UnauthorizedOperation" in out.getvalue()
    CloudRegion.objects.update(state=CloudRegionState.REFUSED)
    with pytest.raises(CommandError, match="no region 'us-east-1' of provider aws that is ready"):
        call_command("collect_garbage", region="us-east-1", stdout=out)
