"""What routers drop and hand to the relay, and how long packets take: decisions alone."""

from ipaddress import IPv4Address
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.hosts.conditions import (
    Conditions,
    Cut,
    Lost,
    Paths,
    Slowness,
    dropped,
    read_state,
    relayed,
    rules,
    rules_to_change,
    write_state,
)
from lab.hosts.topology import CORE, OUTSIDE, Host, NoLaboratory, Topology, checked

LAB = Topology()
PAIRS = list(permutations(LAB.hosts.values(), 2))


def arrives(conditions: Conditions, source: str, destination: str) -> bool:
    one, two = (LAB.network_of(name)[0] for name in (source, destination))
    return not any(one in sources and two in destinations for sources, destinations in dropped(LAB, conditions))


def on_the_way(source: Host, destination: Host) -> list[str]:
    """The routers that a packet passes."""
    ends = [LAB.router_of(source), LAB.router_of(destination)]
    return [ends[0]] if ends[0] == ends[1] else list(dict.fromkeys([ends[0], CORE, ends[1]]))


def relays(conditions: Conditions, source: Host, destination: Host) -> int:
    """How many routers on its way hand a packet to the relay."""
    handed = relayed(LAB, conditions)
    return sum(
        any(source.address in sources and destination.address in destinations for sources, destinations in handed[each])
        for each in on_the_way(source, destination)
    )


def test_hosts_are_numbered_region_after_region() -> None:
    ingresses, nodes = (f"i{number}" for number in range(1, 5)), (f"n{number}" for number in range(1, 9))
    assert list(LAB.hosts) == ["c1", "c2", *ingresses, *nodes, "db"]
    assert [LAB.hosts[name].site for name in ("c2", "i2", "i3", "n4", "n5")] == [
        "control", "us-east-1", "us-west-2", "us-east-1", "us-west-2"
    ]  # fmt: skip
    assert len({host.address for host in LAB.hosts.values()}) == len(LAB.hosts)


@pytest.mark.parametrize(
    ("cut", "sent", "received"),
    [
        (Cut("n3"), False, False),
        (Cut("n3", lost=Lost.SENT), False, True),
        (Cut("n3", lost=Lost.RECEIVED), True, False),
        (Cut("n3", "c2"), True, True),
        (Cut("us-east-1", "control"), False, False),
    ],
)
def test_a_cut_drops_what_it_says(cut: Cut, sent: bool, received: bool) -> None:
    conditions = Conditions().with_cut(cut)

    assert arrives(conditions, "n3", "c1") is sent
    assert arrives(conditions, "c1", "n3") is received
    assert arrives(conditions, "n4", "n1")
    assert arrives(conditions.healed("n3").healed("us-east-1"), "n3", "c1")


def test_a_region_that_is_cut_off_from_the_control_plane_still_serves_clients() -> None:
    conditions = Conditions().with_cut(Cut("us-west-2", "control"))

    assert not arrives(conditions, "n5", "c1")
    assert arrives(conditions, OUTSIDE, "i3")
    assert arrives(conditions, "i3", "n5")


def test_a_site_that_is_cut_off_from_all_goes_on_within_itself() -> None:
    conditions = Conditions().with_cut(Cut("us-west-2")).with_cut(Cut("control"))

    assert arrives(conditions, "n5", "n6")
    assert arrives(conditions, "c1", "c2")
    assert not arrives(conditions, "n5", "n1")
    assert not arrives(conditions, OUTSIDE, "i3")


def test_a_host_without_power_stays_so_when_all_is_healed() -> None:
    conditions = Conditions().with_power("n3", on=False).with_cut(Cut("n4")).healed(None)

    assert not arrives(conditions, "n3", "n4")
    assert arrives(conditions, "n4", "n2")
    assert arrives(conditions.with_power("n3", on=True), "n3", "n4")


@given(st.lists(st.sampled_from([*LAB.hosts, *LAB.regions]), max_size=3))
def test_every_packet_that_takes_time_is_relayed_once_and_no_other(slow: list[str]) -> None:
    conditions = Conditions()
    for name in slow:
        conditions = conditions.with_slow(name, Slowness(0.1, 0.02))
    paths = Paths(LAB, conditions)

    for source, destination in PAIRS:
        takes = paths.between(source.address, destination.address)
        assert relays(conditions, source, destination) == (takes != Slowness())


def test_delays_add_up_and_losses_multiply() -> None:
    conditions = Conditions().with_slow("n3", Slowness(0.2, 0.5)).with_slow("us-east-1", Slowness(0.01, 0.5))
    hosts = LAB.hosts
    paths = Paths(LAB, conditions)

    assert paths.between(hosts["n3"].address, hosts["n1"].address) == Slowness(0.2, 0.5)
    assert paths.between(hosts["n3"].address, hosts["n5"].address) == Slowness(0.03 + 0.2 + 0.01, 0.75)
    assert paths.between(hosts["n5"].address, hosts["n6"].address) == Slowness()
    assert paths.between(IPv4Address("10.3.0.1"), hosts["n5"].address) == Slowness()


@pytest.mark.parametrize("slowness", [Slowness(-0.1), Slowness(61), Slowness(loss=1.0), Slowness(loss=-0.1)])
def test_no_delay_or_loss_that_cannot_be(slowness: Slowness) -> None:
    with pytest.raises(NoLaboratory, match="give 0"):
        Conditions().with_slow("n3", slowness)


def test_a_change_of_rules_cuts_before_it_heals() -> None:
    before = rules(dropped(LAB, Conditions().with_cut(Cut("n3"))), ())
    after = rules(dropped(LAB, Conditions().with_cut(Cut("n3", lost=Lost.SENT)).with_cut(Cut("n4"))), ())

    assert [line.split()[1] for line in rules_to_change(before, after)] == ["add", "add", "del"]
    assert rules_to_change(after, after) == []


def test_processes_understand_each_other() -> None:
    conditions = Conditions(off=frozenset({"n1"})).with_cut(Cut("n3", "c1", Lost.SENT)).with_slow("n4", Slowness(0.1))

    assert read_state(write_state(LAB, conditions)) == (LAB, conditions)


@pytest.mark.parametrize(
    ("topology", "complaint"),
    [
        (Topology(regions=()), "0 regions"),
        (Topology(regions=("core",)), "'core'"),
        (Topology(regions=("n1",)), "the name of a host"),
        (Topology(regions=("a" * 16,)), "at most 15"),
        (Topology(regions=("a", "a")), "another name"),
        (Topology(nodes=100), "100 nodes in a region: give 0 to 99"),
        (Topology(controls=0), "give 1 to 99"),
    ],
)
def test_a_topology_that_cannot_be_is_refused_by_name(topology: Topology, complaint: str) -> None:
    with pytest.raises(NoLaboratory, match=complaint):
        checked(topology)


def test_an_unknown_name_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(NoLaboratory, match=r"no host 'n9'.*c1, c2"):
        LAB.host("n9")
    with pytest.raises(NoLaboratory, match=r"'eu-west-1'.*us-west-2, outside"):
        LAB.network_of("eu-west-1")
