"""The entry of all clients on the test cloud: of several writers one wins, without lost updates."""

import secrets
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest

from fleet.clouds.aws.calls import Refused
from fleet.clouds.models import CloudRegion
from fleet.faults.models import Incident
from fleet.reconcile.planning.states import CloudRegionState, IncidentState
from fleet.reconcile.selectors.snapshot import LISTENING_LEASE
from fleet.regions.models import Region
from kernel.leases import lease_take
from kernel.models import Event
from lab.cloud.server import World
from lab.cloud.world import Ending, Fault, When
from tests.fleet import rows
from tests.fleet.rows import NOW
from tests.lab.cloud.aws_calls import Calls
from tests.lab.cloud.conftest import Zone, make_zone
from traffic.entry.models import Entry, EntryRevision
from traffic.entry.planner import EntryTargetName, PublishedRecords, records_of, swap
from traffic.entry.services import entry_adopt, entry_run, entry_shares_plan
from traffic.region_shares.services.overrides import Terms, evacuation_start
from traffic.routing.models import IngressReport
from traffic.routing.services.ingresses import ingress_create

pytestmark = [pytest.mark.cloud, pytest.mark.django_db]

NAME = "llm.inference.example"
EAST, WEST = "us-east-1", "eu-west-1"


class Operated:
    """Two regions with an ingress each, behind one name."""

    def __init__(self, world: World) -> None:
        self.world, self.now = world, NOW
        self.zone: Zone = make_zone(world)
        self.calls = Calls(world)
        self.silent: set[str] = set()
        for number, name in enumerate((EAST, WEST)):
            region = rows.region(name)
            ingress = ingress_create(region=region, address=f"10.0.0.{number}", port=8080, now=NOW)
            report = {"connected": True, "revision": 1, "connection_changed_at": NOW - timedelta(hours=1)}
            IngressReport.objects.create(ingress=ingress, **report)
            base = {
                "account": world.account, "zones": {}, "node_group": "", "node_profile": "", "node_role": "",
                "hosted_zone": self.zone.id.rpartition("/")[2], "entry_name": NAME,
                "load_balancer": f"{name}.elb.amazonaws.com", "load_balancer_zone": "Z26RNL4JYFTOTI",
            }  # fmt: skip
            state = CloudRegionState.READY.value
            CloudRegion.objects.create(region=region, aws_region=name, stack="s", state=state, base=base)
        lease_take(name=LISTENING_LEASE, holder="web", ttl_s=1e6, now=NOW - timedelta(hours=1))

    def pass_by(self, seconds: float = 5.0) -> None:
        """Let time pass, and make a pass of the loop at its end."""
        self.world.clock.advance(seconds)
        self.now += timedelta(seconds=seconds)
        heard = IngressReport.objects.exclude(ingress__region_id__in=self.silent)
        heard.update(last_seen_at=self.now)
        assert entry_run(now=self.now, call=self.calls)

    def settle(self) -> None:
        """Until what was published is in force, and its pause is over."""
        for _ in range(2):
            self.pass_by(61)

    def standing(self) -> PublishedRecords:
        found = self.zone.sets()
        texts = [each for each in found if each["Type"] == "TXT"]
        return PublishedRecords(tuple(each for each in found if each["Type"] == "A"), texts[0] if texts else None)

    def states(self) -> list[str]:
        return list(EntryRevision.objects.order_by("revision").values_list("state", flat=True))

    def held(self) -> str:
        return Entry.objects.get().held

    def incidents(self) -> list[str]:
        found = Incident.objects.filter(kind="entry-held", state=IncidentState.OPEN.value)
        return list(found.values_list("summary", flat=True))

    def write_as_another(self) -> None:
        """Another control plane publishes, by the same rules."""
        standing = self.standing()
        targets = {EAST: EntryTargetName("other.example", "Z1")}
        self.zone.change_checked(
            swap(NAME, standing, records_of(NAME, {EAST: 255}, targets), 99, secrets.token_hex(16))
        )


@pytest.fixture
def operated(world: World) -> Operated:
    return Operated(world)


def evacuate(operated: Operated, region: str, mode: str) -> None:
    evacuation_start(region=region, mode=mode, confirm=region, terms=Terms(7200, "cooling fails", "ada", operated.now))


def test_weights_are_published_pending_and_then_in_force(operated: Operated) -> None:
    operated.pass_by()
    assert operated.zone.weights() == {EAST: 127, WEST: 128}
    assert (operated.states(), operated.held()) == (["pending"], "")
    operated.pass_by(59)
    assert operated.states() == ["pending"]
    operated.pass_by(1)
    assert operated.states() == ["in_force"]
    kinds = Event.objects.filter(kind__startswith="entry.").order_by("id").values_list("kind", flat=True)
    assert list(kinds) == ["entry.published", "entry.in_force"]


def test_what_is_as_wanted_costs_two_calls_in_half_a_minute(operated: Operated) -> None:
    operated.pass_by()
    operated.settle()
    before = len(operated.world.calls)
    for _ in range(12):
        operated.pass_by(5)
    assert len(operated.world.calls) - before == 4


def test_planned_shares_move_clients_once(operated: Operated) -> None:
    operated.pass_by()
    operated.settle()
    entry_shares_plan(name=NAME, shares={EAST: 3.0}, actor="ada", now=operated.now)
    operated.pass_by()
    operated.settle()
    assert operated.zone.weights() == {EAST: 191, WEST: 64}
    assert operated.states() == ["replaced", "in_force"]


def test_an_evacuated_region_gets_nobody_at_once_and_the_last_one_is_never_0(operated: Operated) -> None:
    operated.pass_by()
    operated.settle()
    evacuate(operated, EAST, "real")
    operated.pass_by()
    assert operated.zone.weights() == {EAST: 0, WEST: 255}
    operated.settle()
    evacuate(operated, WEST, "real")
    operated.pass_by()
    operated.settle()
    assert min(operated.zone.weights().values()) > 0, "both are evacuated, and both live: rather as planned than nobody"
    operated.silent.add(EAST)
    operated.pass_by(50)
    operated.pass_by()
    assert operated.zone.weights() == {EAST: 0, WEST: 255}


def test_a_drill_and_one_deployments_evacuation_leave_dns_alone(operated: Operated) -> None:
    operated.pass_by()
    operated.settle()
    evacuate(operated, EAST, "drill")
    operated.settle()
    assert operated.states() == ["in_force"]


def test_of_six_writers_at_once_one_wins_and_the_others_change_nothing(operated: Operated) -> None:
    operated.pass_by()
    standing = operated.standing()
    targets = {EAST: EntryTargetName("a.example", "Z1"), WEST: EntryTargetName("b.example", "Z1")}

    def write(number: int) -> str:
        records = records_of(NAME, {EAST: number, WEST: 255 - number}, targets)
        changes = swap(NAME, standing, records, 2, f"{number:032x}")
        batch = {"HostedZoneId": operated.zone.id, "ChangeBatch": {"Changes": changes}}
        try:
            Calls(operated.world)("route53", "ChangeResourceRecordSets", "us-east-1", **batch)
        except Refused as refusal:
            return refusal.code
        return ""

    with ThreadPoolExecutor(6) as writers:
        got = list(writers.map(write, range(1, 7)))
    assert sorted(got) == ["", *["InvalidChangeBatch"] * 5]
    winner = got.index("") + 1
    assert operated.zone.weights() == {EAST: winner, WEST: 255 - winner}
    assert f"{winner:032x}" in operated.standing().value


def test_a_writer_that_was_overtaken_changes_nothing_and_asks_a_person(operated: Operated) -> None:
    operated.pass_by()
    operated.settle()
    entry_shares_plan(name=NAME, shares={EAST: 3.0}, actor="ada", now=operated.now)
    operated.calls.before["ChangeResourceRecordSets"] = operated.write_as_another
    operated.pass_by()
    assert operated.zone.weights() == {EAST: 255}
    assert operated.states() == ["in_force", "lost"]
    operated.pass_by()
    assert "which this control plane did not write" in operated.held()
    assert len(operated.incidents()) == 1
    operated.settle()
    assert operated.zone.weights() == {EAST: 255}, "it is held for as long as it takes"

    seen = Entry.objects.get().seen
    entry_adopt(name=NAME, seen=seen, actor="ada", now=operated.now)
    operated.pass_by()
    assert operated.zone.weights() == {EAST: 191, WEST: 64}
    operated.settle()
    assert (operated.held(), operated.incidents()) == ("", [])


def test_a_persons_change_of_one_record_is_seen_and_kept(operated: Operated) -> None:
    operated.pass_by()
    operated.settle()
    record = next(each for each in operated.standing().records if each["SetIdentifier"] == EAST)
    operated.zone.change({"Action": "UPSERT", "ResourceRecordSet": {**record, "Weight": 3}})
    evacuate(operated, EAST, "real")
    operated.pass_by()
    assert operated.zone.weights() == {EAST: 3, WEST: 128}
    assert "are not those that revision 1 wrote" in operated.held()


@pytest.mark.parametrize("ending", [Ending.RESET, Ending.CUT])
def test_an_answer_that_was_lost_is_found_by_its_token(operated: Operated, ending: Ending) -> None:
    operated.world.faults.append(Fault("ChangeResourceRecordSets", when=When.AFTER, ending=ending))
    operated.pass_by()
    assert operated.states() == ["sending"]
    assert "did not answer" in operated.held()
    operated.pass_by()
    assert (operated.states(), operated.held()) == (["pending"], "")
    operated.pass_by(120)
    assert operated.states() == ["in_force"]
    assert operated.world.count("ChangeResourceRecordSets") == 1


def test_a_call_that_never_arrived_is_made_again_under_another_number(operated: Operated) -> None:
    operated.world.faults.append(Fault("ChangeResourceRecordSets", ending=Ending.RESET))
    operated.pass_by()
    operated.pass_by()
    assert operated.states() == ["lost", "pending"]
    assert "rev=2 token=" in operated.standing().value


def test_a_busy_route53_is_asked_again(operated: Operated) -> None:
    operated.world.faults.append(Fault("ChangeResourceRecordSets", code="PriorRequestNotComplete"))
    operated.pass_by()
    assert (operated.states(), operated.incidents()) == (["lost"], [])
    operated.pass_by()
    assert operated.states() == ["lost", "pending"]


def test_a_batch_that_is_refused_twice_asks_a_person_and_is_not_repeated_at_once(operated: Operated) -> None:
    operated.world.faults.append(Fault("ChangeResourceRecordSets", code="InvalidChangeBatch", times=2))
    for _ in range(4):
        operated.pass_by()
    assert operated.world.count("ChangeResourceRecordSets") == 1
    assert len(operated.incidents()) == 1
    operated.pass_by(31)
    operated.pass_by(31)
    assert operated.states() == ["lost", "lost", "pending"]
    assert operated.incidents() == []


def test_records_that_were_there_before_us_are_not_touched(operated: Operated) -> None:
    theirs = {"Name": NAME, "Type": "A", "TTL": 60, "ResourceRecords": [{"Value": "192.0.2.1"}]}
    operated.zone.change({"Action": "CREATE", "ResourceRecordSet": theirs})
    operated.pass_by()
    assert "1 address records that this control plane did not write" in operated.held()
    entry_adopt(name=NAME, seen=Entry.objects.get().seen, actor="ada", now=operated.now)
    operated.pass_by()
    assert operated.zone.weights() == {EAST: 127, WEST: 128}


def test_a_region_that_is_no_more_loses_its_record(operated: Operated) -> None:
    operated.pass_by()
    operated.settle()
    CloudRegion.objects.filter(region_id=WEST).delete()
    operated.pass_by()
    assert operated.zone.weights() == {EAST: 255}


def test_stacks_that_contradict_each_other_are_said(operated: Operated) -> None:
    other = CloudRegion.objects.get(region_id=WEST)
    other.base["entry_name"] = "other.inference.example"
    other.save()
    operated.pass_by()
    assert "correct its stack" in operated.held()
    assert operated.zone.sets() == []


def test_without_an_entry_a_pass_calls_nobody(operated: Operated) -> None:
    CloudRegion.objects.all().delete()
    assert Region.objects.exists()

    def fails(*_: Any, **__: Any) -> dict[str, Any]:
        raise AssertionError("called")

    assert not entry_run(now=operated.now, call=fails)
