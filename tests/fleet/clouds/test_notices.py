"""Announcements of the test cloud become one row each, which ends with the event."""

import json
from datetime import timedelta

import pytest

from fleet.capacity.planning.pools import Market
from fleet.clouds.models import CapacityPool, CloudNotice, CloudRegion
from fleet.clouds.services.notices import cloud_queue, cloud_reservations, cloud_statuses
from fleet.faults.models import Incident
from fleet.machines.models import Machine
from fleet.machines.planner import Statement
from fleet.machines.services.reports import evidence_of, notice_record
from fleet.reconcile.planning.states import NoticeKind, NoticeSource
from kernel import clock
from kernel.models import Event
from lab.cloud.ec2_describe import recommend_rebalance, schedule, warn_of_interruption
from lab.cloud.machines import Market as Sold
from lab.cloud.machines import Reserved
from lab.cloud.world import Fault
from tests.fleet.clouds.aws.cloud_fleet import REGION, TRN1, CloudFleet, make_pool
from tests.fleet.clouds.aws.conftest import cloud_fleet
from tests.lab.cloud.conftest import world

__all__ = ["cloud_fleet", "world"]

pytestmark = pytest.mark.cloud


@pytest.fixture
def machine(cloud_fleet: CloudFleet, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A node's machine, and a queue with all events of EC2 that drops a message after two receives."""
    monkeypatch.setattr("fleet.clouds.aws.notices.WAIT_S", 0)
    sqs, events = cloud_fleet.world.client("sqs"), cloud_fleet.world.client("events")

    def made(name: str, **attributes: str) -> tuple[str, str]:
        url = sqs.create_queue(QueueName=name, Attributes=attributes)["QueueUrl"]
        found = sqs.get_queue_attributes(QueueUrl=url, AttributeNames=["QueueArn"])["Attributes"]
        return url, found["QueueArn"]

    dead_url, dead = made("dead")
    policy = json.dumps({"deadLetterTargetArn": dead, "maxReceiveCount": "2"})
    url, arn = made("notices", RedrivePolicy=policy, VisibilityTimeout="0")
    events.put_rule(Name="ec2", EventPattern=json.dumps({"source": ["aws.ec2"]}))
    events.put_targets(Rule="ec2", Targets=[{"Id": "queue", "Arn": arn}])
    cloud = CloudRegion.objects.get()
    cloud.base |= {"queue_url": url, "dead_letter_url": dead_url}
    cloud.save()
    cloud_fleet.order(1)
    cloud_fleet.provision()
    cloud_fleet.world.clock.advance(60)
    look()
    return Machine.objects.get()


def look() -> None:
    cloud_queue(CloudRegion.objects.get(), clock.now())


def poll() -> None:
    cloud_statuses(CloudRegion.objects.get(), clock.now())


def rows() -> list[tuple[str, str, bool]]:
    found = CloudNotice.objects.order_by("pk").values_list("kind", "source", "settled_at")
    return [(kind, source, settled_at is None) for kind, source, settled_at in found]


def test_a_warning_is_kept_once_however_often_it_comes_and_told(cloud_fleet: CloudFleet, machine: Machine) -> None:
    warn_of_interruption(cloud_fleet.world, machine.provider_id)
    look()
    notice = CloudNotice.objects.get()
    assert (notice.machine, notice.kind, notice.source) == (machine, NoticeKind.INTERRUPTION, NoticeSource.EVENTS)
    assert notice.ends_at is not None
    assert abs((notice.ends_at - clock.now()).total_seconds() - 120) <= 1
    told = Event.objects.get(kind="node.notice")
    assert told.message.startswith(f"{machine.runs}: interruption until ")
    (statement,) = evidence_of(notice).values()
    assert not hear(machine, NoticeSource.EVENTS, statement)
    assert len(rows()) == 1


def hear(
    machine: Machine, source: NoticeSource, statement: Statement, kind: NoticeKind = NoticeKind.INTERRUPTION
) -> bool:
    return notice_record(machine=machine, kind=kind, source=source, statement=statement, now=clock.now())


def test_the_earlier_source_counts_and_the_later_confirms_in_one_row(cloud_fleet: CloudFleet, machine: Machine) -> None:
    soon = clock.now() + timedelta(seconds=100)
    assert hear(machine, NoticeSource.IMDS, Statement("a", clock.now(), soon))
    warn_of_interruption(cloud_fleet.world, machine.provider_id)
    look()
    assert rows() == [("interruption", "imds", True)]
    notice = CloudNotice.objects.get()
    assert notice.ends_at == soon
    assert set(evidence_of(notice)) == {NoticeSource.IMDS, NoticeSource.EVENTS}
    assert Event.objects.filter(kind="node.notice").count() == 1
    hear(machine, NoticeSource.IMDS, Statement("", clock.now(), over=True))
    assert rows() == [("interruption", "imds", True)]  # the cloud repeats it


def test_a_closed_health_event_ends_what_it_announced_and_a_late_one_opens_nothing(
    cloud_fleet: CloudFleet, machine: Machine
) -> None:
    base, now = CloudRegion.objects.get().base, clock.now()

    def send(status: str, minutes: int) -> None:
        detail = {
            "eventTypeCode": "AWS_EC2_MAINTENANCE_SCHEDULED", "statusCode": status,
            "startTime": (now + timedelta(days=1)).isoformat(),
            "affectedEntities": [{"entityValue": machine.provider_id}],
        }  # fmt: skip
        at = (now + timedelta(minutes=minutes)).isoformat()
        event = {"id": f"e-{minutes}", "detail-type": "AWS Health Event", "time": at, "detail": detail}
        cloud_fleet.world.client("sqs").send_message(QueueUrl=base["queue_url"], MessageBody=json.dumps(event))
        look()

    send("open", 0)
    assert rows() == [("maintenance", "events", True)]
    send("closed", 5)
    send("open", 0)
    send("open", 1)
    assert rows() == [("maintenance", "events", False)]
    assert Event.objects.filter(kind="node.notice").first() is not None


def test_of_the_machines_of_others_nothing_is_kept(cloud_fleet: CloudFleet, machine: Machine) -> None:
    Machine.objects.update(provider_id="i-00000000000000000")
    warn_of_interruption(cloud_fleet.world, machine.provider_id)
    look()
    assert rows() == []


def test_what_makes_no_sense_goes_to_the_dead_letters_and_holds_up_nobody(
    cloud_fleet: CloudFleet, machine: Machine
) -> None:
    sqs, base = cloud_fleet.world.client("sqs"), CloudRegion.objects.get().base
    sqs.send_message(QueueUrl=base["queue_url"], MessageBody="what is this")
    recommend_rebalance(cloud_fleet.world, machine.provider_id)
    for _ in range(3):
        look()
    assert rows() == [("rebalance", "events", True)]
    (dead,) = sqs.receive_message(QueueUrl=base["dead_letter_url"])["Messages"]
    assert dead["Body"] == "what is this"


def test_a_queue_that_may_not_be_read_is_an_incident_until_it_is(cloud_fleet: CloudFleet, machine: Machine) -> None:
    cloud = CloudRegion.objects.get()
    url = cloud.base["queue_url"]
    cloud.base["queue_url"] = f"{url}-gone"
    cloud.save()
    for _ in range(2):
        look()
    (incident,) = Incident.objects.filter(kind="notices-unread", state="open")
    assert "NonExistentQueue" in incident.summary or "QueueDoesNotExist" in incident.summary
    cloud.base["queue_url"] = url
    cloud.save()
    look()
    assert not Incident.objects.filter(kind="notices-unread", state="open").exists()


def test_polling_finds_what_was_scheduled_and_settles_what_was_withdrawn(
    cloud_fleet: CloudFleet, machine: Machine
) -> None:
    at = cloud_fleet.world.clock.now() + 86400
    schedule(cloud_fleet.world, machine.provider_id, "instance-retirement", at)
    poll()
    poll()
    assert rows() == [("retirement", "status", True)]
    seen = cloud_fleet.world.machines.get(machine.provider_id)
    assert seen is not None
    seen.events[0]["Description"] = "[Canceled] The instance is running on degraded hardware"
    poll()
    assert rows() == [("retirement", "status", False)]


def test_impaired_is_one_notice_until_the_checks_pass_and_failed_polls_settle_nothing(
    cloud_fleet: CloudFleet, machine: Machine
) -> None:
    seen = cloud_fleet.world.machines.get(machine.provider_id)
    assert seen is not None
    seen.impaired_since = cloud_fleet.world.clock.now()
    poll()
    cloud_fleet.world.faults.append(Fault("DescribeInstanceStatus", "InternalError", times=9))
    seen.impaired_since = None
    poll()
    assert rows() == [("impaired", "status", True)]
    cloud_fleet.world.faults.clear()
    poll()
    assert rows() == [("impaired", "status", False)]


def test_what_was_said_of_a_machine_that_is_gone_is_over(cloud_fleet: CloudFleet, machine: Machine) -> None:
    warn_of_interruption(cloud_fleet.world, machine.provider_id)
    look()
    cloud_fleet.world.clock.advance(240)
    look()
    poll()
    assert rows() == [("interruption", "events", False)]


def test_the_end_of_a_capacity_block_is_known_before_it_is_announced(cloud_fleet: CloudFleet, machine: Machine) -> None:
    now, capacity = cloud_fleet.world.clock.now(), cloud_fleet.world.machines.capacity
    block = capacity.reserve(Reserved(TRN1, "us-east-1a", 4, now, ends=now + 86400, market=Sold.BLOCK))
    subnet = CapacityPool.objects.get(position=1).subnet
    pool = make_pool(3, "us-east-1a", subnet, market=Market.BLOCK, reservation=block.id)
    Machine.objects.update(reservation=block.id, market=Market.BLOCK)
    for _ in range(2):
        cloud_reservations(CloudRegion.objects.get(region_id=REGION), clock.now())
    notice = CloudNotice.objects.get()
    pool.refresh_from_db()
    assert (pool.free, notice.kind, notice.source) == (4, NoticeKind.BLOCK_END, NoticeSource.BLOCK)
    assert pool.ends_at is not None
    assert notice.ends_at == pool.ends_at - timedelta(minutes=30)
