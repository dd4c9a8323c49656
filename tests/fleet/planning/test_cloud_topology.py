"""Which machines are asked for: everyone soon, nobody too often, and a path is what EC2 said."""

from datetime import timedelta

from hypothesis import given
from hypothesis import strategies as st

from fleet.planning.call_budget import TOPOLOGY_PAGE, PlacedMachine, path_of, topology_batches
from fleet.planning.placement.distance import distance
from tests.fleet.planning.fleets import NOW, ago

FULL = ("use1-az1", "nn-1", "nn-2", "nn-3")


def test_a_path_is_the_zone_then_what_is_known_below_it() -> None:
    assert path_of("use1-az1", ["nn-1", "nn-2", "nn-3"]) == FULL
    assert path_of("use1-az1", []) == path_of("use1-az1", [""], "cb-1") == ("use1-az1",)
    assert path_of("use1-az1", ["nn-1"], "cb-1") == ("use1-az1", "nn-1", "cb-1")
    unknown = path_of("use1-az1", [])
    assert distance(unknown, unknown, 4) == 3, "only their zone is shared: below it nobody knows"


def test_those_never_asked_for_come_first_then_the_unknown_and_then_the_known() -> None:
    machines = [
        PlacedMachine("known", ago(9000), ago(901), FULL),
        PlacedMachine("fresh", ago(9000), ago(899), FULL),
        PlacedMachine("unknown", ago(100), ago(61), FULL[:1]),
        PlacedMachine("just asked", ago(100), ago(59)),
        PlacedMachine("new", ago(5)),
    ]
    assert topology_batches(machines, NOW) == (("new", "unknown", "known"),)


def test_what_stays_unknown_is_asked_for_half_as_often_each_time_but_every_15_minutes() -> None:
    asked, moments, now = None, [], ago(0)
    for _ in range(7200):
        if topology_batches([PlacedMachine("i", ago(0), asked)], now):
            asked = now
            moments.append(int((now - ago(0)).total_seconds()))
        now += timedelta(seconds=1)
    assert moments == [0, 60, 120, 240, 480, 960, 1860, 2760, 3660, 4560, 5460, 6360]


@given(st.integers(0, 450))
def test_all_that_join_are_asked_for_once_in_as_few_calls_as_there_can_be(count: int) -> None:
    machines = [PlacedMachine(f"i-{number}", NOW) for number in range(count)]
    asked = topology_batches(machines, NOW)
    assert len(asked) == -(-count // TOPOLOGY_PAGE)
    assert sorted(name for batch in asked for name in batch) == sorted(machine.id for machine in machines)
