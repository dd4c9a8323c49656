"""One ingress a zone, two a region, and none ended that runs."""

from hypothesis import given
from hypothesis import strategies as st

from traffic.planning.ingress import IngressMachine, NewIngress, RemoveIngress, plan_ingress_machines

ZONES = ("a", "b", "c")
there = st.lists(st.builds(IngressMachine, id=st.uuids().map(str), zone=st.sampled_from(ZONES), gone=st.booleans()))


def test_an_empty_region_gets_one_a_zone_and_two_at_least() -> None:
    assert [each.zone for each in plan_ingress_machines(ZONES, ()) if isinstance(each, NewIngress)] == ["a", "b", "c"]
    assert [each.zone for each in plan_ingress_machines(["a"], ()) if isinstance(each, NewIngress)] == ["a", "a"]


def test_one_that_is_gone_is_replaced_in_its_zone() -> None:
    plan = plan_ingress_machines(["a", "b"], [IngressMachine("i-1", "a", gone=True), IngressMachine("i-2", "b")])
    assert plan == (RemoveIngress("i-1", "its machine is gone"), NewIngress("a", "zone a has no ingress"))


@given(st.sets(st.sampled_from(ZONES), min_size=1), there)
def test_what_runs_stays_and_then_nothing_lacks(zones: set[str], machines: list[IngressMachine]) -> None:
    plan = plan_ingress_machines(zones, machines)
    ended = {each.id for each in plan if isinstance(each, RemoveIngress)}
    assert ended == {each.id for each in machines if each.gone}
    new = [IngressMachine(str(n), each.zone) for n, each in enumerate(plan) if isinstance(each, NewIngress)]
    kept = [each for each in machines if not each.gone] + new
    assert {each.zone for each in kept} >= zones
    assert len(kept) >= 2
    assert plan_ingress_machines(zones, kept) == ()


def test_a_region_without_zones_gets_none() -> None:
    assert plan_ingress_machines((), ()) == ()
