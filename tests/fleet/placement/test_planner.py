"""Which spares form or join a cell: near ones together, large groups whole, deployments spread; network distance; and
the total distance against the exact optimum of small cases."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fleet.placement.planning.distance import (
    Path,
    common_prefix,
    depth_of,
    distance,
    failure_domain,
    free_position,
    shared_prefix,
    total_distance,
)
from fleet.placement.planning.planner import Placed, Placement, PlacementRequest
from fleet.reconcile.planning.snapshot import CellView, FleetView, NodeView
from fleet.reconcile.planning.states import CellState
from tests.fleet.fleets import KIND, cell, fleet, member, node
from tests.fleet.placement.exact_packing import smallest_distance

Parts = list[NodeView | CellView]


def at(name: str, *topology: str, **changes: Any) -> NodeView:
    return node(name, topology=topology, **changes)


def order(count: int, name: str = "c1", **changes: Any) -> PlacementRequest:
    return replace(PlacementRequest(name, "llama", "east", KIND, count), **changes)


def chosen(view: FleetView, *orders: PlacementRequest) -> list[list[str] | None]:
    answers = Placement(view).place(orders)
    found = [answers[request.cell] for request in orders]
    return [[n.id for n in answer.nodes] if isinstance(answer, Placed) else None for answer in found]


def test_a_cell_is_placed_under_the_lowest_common_network_node() -> None:
    assert chosen(fleet(at("a", "s", "r1"), at("b", "s", "r2"), at("c", "s", "r2")), order(2)) == [["b", "c"]]


def test_of_equally_near_groups_the_one_is_broken_that_fits_best() -> None:
    large = [at(name, "s", "r1") for name in "abc"]
    small = [at(name, "s", "r2") for name in "de"]
    assert chosen(fleet(*large, *small), order(2)) == [["d", "e"]]


def test_a_cell_takes_its_odd_node_from_a_group_that_is_broken_already() -> None:
    parts = [at(name, "s", "r1") for name in "abc"]
    whole = [at(name, "s", "r2") for name in "defg"]
    single = [at("x", "s", "r3")]
    assert chosen(fleet(*parts, *whole, *single), order(4, "c1"), order(4, "c2")) == [
        ["d", "e", "f", "g"],
        ["a", "b", "c", "x"],
    ]


def test_a_large_cell_gets_the_tight_group_that_a_small_one_could_break() -> None:
    four = [at(name, "s", "r1") for name in "abcd"]
    pairs = [at("e", "s", "r2"), at("f", "s", "r2"), at("g", "s", "r3")]
    assert chosen(fleet(*four, *pairs), order(2, "c1"), order(4, "c2")) == [["e", "f"], ["a", "b", "c", "d"]]


def test_cells_of_a_deployment_are_spread_over_failure_domains() -> None:
    spares = [at(f"{domain}{index}", domain, f"{domain}-r") for domain in "stu" for index in range(4)]
    cells = chosen(fleet(*spares), *(order(2, f"c{index}") for index in range(3)))
    assert sorted(names[0][0] for names in cells if names) == ["s", "t", "u"]


def test_a_new_cell_avoids_the_failure_domain_of_those_that_run() -> None:
    running: Parts = [member("a", topology=("s", "r1")), member("b", topology=("s", "r1")), cell("c0", "a", "b")]
    spares = [at("x1", "s", "r2"), at("x2", "s", "r2"), at("y1", "t", "r9"), at("y2", "t", "r9")]
    assert chosen(fleet(*running, *spares), order(2)) == [["y1", "y2"]]


def test_nearness_comes_before_spread() -> None:
    running: Parts = [member("a", topology=("s", "r1")), member("b", topology=("s", "r1")), cell("c0", "a", "b")]
    spares = [at("x1", "s", "r2"), at("x2", "s", "r2"), at("y1", "t", "r8"), at("y2", "t", "r9")]
    assert chosen(fleet(*running, *spares), order(2)) == [["x1", "x2"]]


def test_nodes_of_unknown_place_are_used_last_and_can_still_be_placed() -> None:
    assert chosen(fleet(at("a"), at("b", "s", "r1"), at("c", "s", "r1")), order(2)) == [["b", "c"]]
    assert chosen(fleet(at("a"), at("b")), order(2)) == [["a", "b"]]


def test_of_spares_that_are_equally_near_the_cheapest_are_taken_and_the_reason_says_so() -> None:
    spares = [at(name, "s", "r1", price_per_hour=price) for name, price in (("a", 6.0), ("b", 2.5), ("c", 2.0))]
    view = fleet(*spares)
    placed = Placement(view).place([order(2)])["c1"]
    assert isinstance(placed, Placed)
    assert [one.id for one in placed.nodes] == ["c", "b"]
    assert placed.reason.endswith("; at 2.50 $/h, cheaper than the remaining ones at 6.00 $/h")
    assert chosen(fleet(*spares[:2], at("d", "s", "r2"), at("e", "s", "r2")), order(2)) == [["b", "a"]], (
        "nearness first"
    )


def test_only_nodes_with_the_same_software_form_a_cell() -> None:
    old = [at(name, "s", "r1", software={"driver": "1"}, fingerprint="1") for name in "ac"]
    new = [at("b", "s", "r1", software={"driver": "2"}, fingerprint="2")]
    assert chosen(fleet(*old, *new), order(2)) == [["a", "c"]]
    assert chosen(fleet(*old, *new), order(3)) == [None]


def test_software_of_another_engine_does_not_keep_nodes_apart() -> None:
    spares = [
        at(name, "s", "r1", software={"vllm.engine": version, "sim.engine": "1"}, fingerprint=version)
        for name, version in (("a", "0.31"), ("b", "0.32"))
    ]
    assert chosen(fleet(*spares), order(2, engine="sim")) == [["a", "b"]]
    assert chosen(fleet(*spares), order(2, engine="vllm")) == [None]


def test_cells_of_several_engines_never_get_the_same_node() -> None:
    spares = [at(name, "s", "r1") for name in "abc"]
    cells = chosen(fleet(*spares), order(1, "c1", engine="sim"), order(2, "c2", engine="vllm"))
    assert sorted(name for names in cells if names for name in names) == ["a", "b", "c"]


def test_a_tight_cell_is_placed_only_where_all_its_nodes_share_so_many_network_nodes() -> None:
    view = fleet(at("a", "s", "m", "r1"), at("b", "s", "m", "r2"), at("c", "s", "n", "r3"))
    assert chosen(view, order(2, within=3)) == [None]
    assert chosen(view, order(2, within=2)) == [["a", "b"]]
    assert chosen(view, order(3, within=2)) == [None]
    assert chosen(view, order(3, within=1)) == [["a", "b", "c"]]


def test_a_replacement_is_the_spare_nearest_to_those_who_stay() -> None:
    stays = member("x", topology=("s", "r1"))
    spares = [at("far", "s", "r9"), at("near", "s", "r1"), at("other", "t", "r1")]
    repair = order(1, staying=(stays,), is_repair=True)
    assert chosen(fleet(stays, *spares), repair) == [["x", "near"]]


def test_of_equally_near_replacements_one_of_the_smallest_group_goes() -> None:
    stays = member("x", topology=("s", "r1"))
    spares = [at("a", "s", "r2"), at("b", "s", "r2"), at("c", "s", "r3")]
    assert chosen(fleet(stays, *spares), order(1, staying=(stays,), is_repair=True)) == [["x", "c"]]


def test_repairs_choose_before_new_cells() -> None:
    stays = member("x", topology=("s", "r1"))
    spares = [at("a", "s", "r1"), at("b", "s", "r2")]
    new, repair = order(1, "c1"), order(1, "c2", staying=(stays,), is_repair=True)
    assert chosen(fleet(stays, *spares), new, repair) == [["b"], ["x", "a"]]


def test_a_cell_that_lost_everybody_is_placed_anew() -> None:
    assert chosen(fleet(at("a", "s", "r1"), at("b", "s", "r1")), order(2, is_repair=True)) == [["a", "b"]]


def test_a_tight_cell_without_a_near_spare_moves_to_where_there_is_place() -> None:
    stays = member("x", topology=("s", "r1"))
    view = fleet(stays, at("a", "s", "r2"), at("b", "s", "r2"), at("c", "s", "r3"))
    assert chosen(view, order(1, staying=(stays,), within=2, is_repair=True)) == [["a", "b"]]


def test_a_cell_whose_software_no_spare_has_moves_to_nodes_that_agree() -> None:
    stays = member("x", topology=("s", "r1"), software={"driver": "1"}, fingerprint="1")
    spares = [at(name, "s", "r1", software={"driver": "2"}, fingerprint="2") for name in "ab"]
    assert chosen(fleet(stays, *spares), order(1, staying=(stays,), is_repair=True)) == [["a", "b"]]


def test_a_draining_cell_takes_no_share_of_its_failure_domain() -> None:
    leaving = cell("c0", "a", "b", state=CellState.DRAINING)
    running: Parts = [member("a", topology=("s", "r1")), member("b", topology=("s", "r1")), leaving]
    spares = [at("x1", "s", "r2"), at("x2", "s", "r2"), at("y1", "t", "r9"), at("y2", "t", "r9")]
    assert chosen(fleet(*running, *spares), order(2)) == [["x1", "x2"]]


@pytest.mark.slow
def test_the_same_fleet_gets_the_same_answer_in_whatever_order_it_is_given() -> None:
    spares = [at(f"n{index}", "s", f"m{index % 2}", f"r{index % 5}") for index in range(12)]
    orders = [order(size, f"c{index}") for index, size in enumerate((3, 2, 4))]
    assert chosen(fleet(*spares), *orders) == chosen(fleet(*reversed(spares)), *orders)


@pytest.mark.parametrize(
    ("one", "other", "shared", "apart"),
    [
        ((), (), 0, 3),
        (("a", "b", "c"), (), 0, 3),
        (("a",), ("b",), 0, 3),
        (("a", "b", "c"), ("a", "x", "c"), 1, 2),
        (("a", "b", "c"), ("a", "b", "d"), 2, 1),
        (("a", "b", "c"), ("a", "b", "c"), 3, 0),
        (("a",), ("a", "b", "c"), 1, 2),
    ],
)
def test_distance_is_the_levels_that_are_not_shared_and_the_unknown_is_far(
    one: Path, other: Path, shared: int, apart: int
) -> None:
    assert shared_prefix(one, other) == shared
    assert distance(one, other, 3) == distance(other, one, 3) == apart


def test_total_distance_counts_every_pair_of_every_cell() -> None:
    near = [("s", "r1"), ("s", "r1"), ("s", "r2")]
    assert total_distance([near], 2) == 0 + 1 + 1
    assert total_distance([near, [("s", "r1"), ("t", "r1")], [("s", "r1")]], 2) == 2 + 2 + 0


def test_a_pool_is_as_deep_as_its_longest_topology_and_never_flat() -> None:
    assert depth_of([(), ("a", "b"), ("a",)]) == 2
    assert depth_of([(), ()]) == depth_of([]) == 1


def test_what_nodes_share_and_what_fails_with_them() -> None:
    assert common_prefix([("a", "b", "c"), ("a", "b", "d"), ("a", "b", "c")]) == ("a", "b")
    assert (failure_domain(("a", "b")), failure_domain(())) == ("a", "")


def rack(position: int) -> Path:
    """Two machines a rack, two racks a hall."""
    return f"h{position // 4}", f"r{position // 2}"


@pytest.mark.parametrize(
    ("taken", "near", "expected"),
    [
        ([], (), 0),
        ([rack(0), rack(1)], (), 2),
        ([rack(1), rack(3)], (), 1),
        ([rack(0), rack(2)], rack(2), 3),
        ([rack(0), rack(2), rack(3)], rack(2), 1),
        ([rack(0), rack(1), rack(2), rack(3)], rack(2), 4),
        ([("elsewhere",)], rack(9), 8),
    ],
)
def test_a_new_machine_stands_at_the_first_free_place_of_the_nearest(
    taken: list[Path], near: Path, expected: int
) -> None:
    assert free_position(rack, taken, near) == expected


DEPTH = 3
WITHIN = 1.02

places = st.tuples(st.sampled_from("ab"), st.sampled_from("ab"), st.sampled_from("abc"))
machines = st.lists(
    st.one_of(places, places, st.tuples(st.sampled_from("ab"), st.just("a"), st.just("a"))), max_size=12
)
sizes = st.lists(st.integers(1, 6), min_size=1, max_size=4)


def placed(topologies: list[Path], wanted: list[int]) -> list[Placed]:
    view = fleet(*(node(f"n{index:02d}", topology=path) for index, path in enumerate(topologies)), wanted=0)
    orders = [PlacementRequest(f"c{index}", "llama", "east", KIND, size) for index, size in enumerate(wanted)]
    return [answer for answer in Placement(view).place(orders).values() if isinstance(answer, Placed)]


def that_fit(topologies: list[Path], wanted: list[int]) -> list[int]:
    while sum(wanted) > len(topologies):
        wanted = wanted[:-1]
    return wanted


@pytest.mark.slow
@given(topologies=machines, wanted=sizes)
@example(topologies=[("a", "a", x) for x in "aabbcccd"], wanted=[4, 3])
@example(topologies=[tuple(path) for path in ("aaa", "aab", "aba", "abb", "baa", "bab", "bba")], wanted=[3, 2, 2])
def test_random_small_cases_are_within_two_percent_of_the_exact_optimum(
    topologies: list[Path], wanted: list[int]
) -> None:
    wanted = that_fit(topologies, wanted)
    cells = placed(topologies, wanted)
    assert sorted(len(cell.nodes) for cell in cells) == sorted(wanted)
    taken = Counter(member.id for cell in cells for member in cell.nodes)
    assert not taken or max(taken.values()) == 1
    found = total_distance([[member.topology for member in cell.nodes] for cell in cells], DEPTH)
    assert found <= WITHIN * smallest_distance(topologies, wanted, DEPTH)


def test_cells_of_a_deployment_are_on_different_machines_while_another_is_free() -> None:
    """The nodes of a machine with a layout have the machine as their network node."""
    spares = [at(f"{machine}{number}", f"m-{machine}") for machine in "ab" for number in range(3)]
    view = fleet(*spares, at("w"))
    placed = chosen(view, *(order(1, f"c{number}") for number in range(3)))
    assert sorted(names[0][0] for names in placed if names) == ["a", "b", "w"]
    grown = fleet(*spares, member("a9", "c0", topology=("m-a",)), cell("c0", "a9"))
    assert chosen(grown, order(1, "c1")) == [["b0"]]


def test_cells_of_a_deployment_that_share_a_machine_are_on_different_devices_while_another_has_room() -> None:
    def half(name: str, device: str) -> NodeView:
        return at(name, f"m-{name[0]}", shared_device=device)

    spares = [half(f"{machine}{number}", str(number // 2)) for machine in "ab" for number in range(4)]
    orders = [order(1, f"c{number}") for number in range(5)]
    placed = [names[0] for names in chosen(fleet(*spares), *orders) if names]
    assert Counter(name[0] for name in placed[:2]) == Counter("ab")
    assert Counter(int(name[1]) // 2 for name in placed[:4] if name[0] == "a") == Counter((0, 1))
    assert len(set(placed)) == 5
    grown = fleet(half("a1", "0"), half("a2", "1"), replace(half("a0", "0"), spare_since=None), cell("c0", "a0"))
    assert chosen(grown, order(1, "c1")) == [["a2"]]
    assert chosen(grown, order(1, "c1", deployment="qwen")) == [["a1"]]


def test_the_members_of_a_cell_share_a_machine_if_one_has_room() -> None:
    view = fleet(at("a0", "m-a"), at("b0", "m-b"), at("b1", "m-b"))
    assert chosen(view, order(2)) == [["b0", "b1"]]


@given(
    room=st.lists(st.integers(0, 4), min_size=1, max_size=6),
    running=st.lists(st.tuples(st.sampled_from(["llama", "qwen"]), st.integers(0, 5)), max_size=6),
    wanted=st.lists(st.sampled_from(["llama", "qwen"]), min_size=1, max_size=12),
)
def test_no_cell_of_a_deployment_shares_a_machine_while_another_is_free(
    room: list[int], running: list[tuple[str, int]], wanted: list[str]
) -> None:
    """`room`: spares of each machine; `running`: cells that exist; `wanted`: deployments of new cells."""
    spares: Parts = [
        at(f"{number}-{place}", f"m-{number}") for number, free in enumerate(room) for place in range(free)
    ]
    there: Parts = []
    for number, (name, host) in enumerate(running):
        there += [
            member(f"r{number}", f"c{number}", topology=(f"m-{host}",)),
            cell(f"c{number}", f"r{number}", deployment=name),
        ]
    view = fleet(*spares, *there)
    view = replace(view, deployments=dict.fromkeys(("llama", "qwen"), view.deployments["llama"]))
    orders = [order(1, f"n{number}", deployment=name) for number, name in enumerate(wanted)]
    answers = Placement(view).place(orders)
    load = Counter((name, f"m-{host}") for name, host in running)
    left = {f"m-{number}": free for number, free in enumerate(room)}
    placed = [
        (one.deployment, answer.nodes[0].topology[0])
        for one in orders
        if isinstance(answer := answers[one.cell], Placed)
    ]
    for _, where in placed:
        left[where] -= 1
    assert len(placed) == min(len(wanted), sum(room))
    assert min(left.values()) >= 0
    load.update(placed)
    for name, where in placed:
        free = {machine for machine, count in left.items() if count and not load[name, machine]}
        assert load[name, where] == 1 or not free, f"{name} is on {where} again while {sorted(free)} had room"
