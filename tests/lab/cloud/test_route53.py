"""Route 53's batches in the cloud of tests: all or nothing, which is all that six writers have to agree by."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from lab.cloud.server import World
from tests.lab.cloud.conftest import Zone, make_zone, record, refusal, text

pytestmark = pytest.mark.cloud


@pytest.fixture
def zone(world: World) -> Zone:
    """With revision 1 of two regions' weights."""
    zone = make_zone(world)
    zone.change(text("CREATE", 1), record("UPSERT", "us-east-1", 153), record("UPSERT", "eu-west-1", 102))
    return zone


def test_a_batch_that_names_what_is_there_is_carried_out(zone: Zone) -> None:
    zone.change(text("DELETE", 1), text("CREATE", 2), record("UPSERT", "us-east-1", 26))

    assert zone.weights() == {"us-east-1": 26, "eu-west-1": 102}


@pytest.mark.parametrize(
    "refused",
    [
        text("DELETE", 9),
        text("CREATE", 2),
        record("DELETE", "us-east-1", 152),
        record("DELETE", "us-east-1", 153, address="192.0.2.99"),
        record("DELETE", "ap-south-2", 1),
        record("UPSERT", "us-east-1", 256),
    ],
)
def test_one_change_that_does_not_fit_stops_the_whole_batch(zone: Zone, refused: dict[str, object]) -> None:
    before = zone.sets()
    batch = [record("UPSERT", "eu-west-1", 255), refused]

    assert refusal(zone.change_checked, changes=batch) == "InvalidChangeBatch"
    assert zone.sets() == before


def test_of_six_writers_at_once_one_wins(zone: Zone) -> None:
    def write(weight: int) -> str:
        batch = [text("DELETE", 1), text("CREATE", 2), record("UPSERT", "us-east-1", weight)]
        return refusal(zone.change_checked, changes=batch)

    with ThreadPoolExecutor(6) as writers:
        got = list(writers.map(write, range(6)))
    assert sorted(got) == ["", *["InvalidChangeBatch"] * 5]
    assert zone.weights()["us-east-1"] == got.index("")


def test_an_alias_is_deleted_by_its_target(zone: Zone) -> None:
    target = {"HostedZoneId": "Z1", "DNSName": "nlb.example.", "EvaluateTargetHealth": True}
    alias = {
        "Name": "llm.inference.example",
        "Type": "AAAA",
        "SetIdentifier": "us-east-1",
        "Weight": 1,
        "AliasTarget": target,
    }
    zone.change({"Action": "CREATE", "ResourceRecordSet": alias})

    other = {**alias, "AliasTarget": {**target, "DNSName": "other.example."}}
    assert (
        refusal(zone.change_checked, changes=[{"Action": "DELETE", "ResourceRecordSet": other}]) == "InvalidChangeBatch"
    )
    zone.change({"Action": "DELETE", "ResourceRecordSet": alias})
    assert zone.weights() == {"us-east-1": 153, "eu-west-1": 102}


def test_a_change_is_pending_for_a_minute(world: World, zone: Zone) -> None:
    change = zone.change(record("UPSERT", "us-east-1", 26))

    seen = []
    for seconds in (0, 59, 1):
        world.clock.advance(seconds)
        seen.append(zone.route53.get_change(Id=change)["ChangeInfo"]["Status"])
    assert seen == ["PENDING", "PENDING", "INSYNC"]
    assert refusal(zone.route53.get_change, Id="/change/CNONE") == "NoSuchChange"


def test_five_requests_a_second(world: World, zone: Zone) -> None:
    world.limits.enforced = True

    got = [refusal(zone.route53.get_change, Id="/change/CNONE") for _ in range(6)]
    assert got == [*["NoSuchChange"] * 5, "Throttling"]
