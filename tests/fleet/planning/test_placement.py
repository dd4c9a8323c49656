"""Which spares form a cell: near ones together, and large groups stay whole."""

import pytest

from engine_agent.protocol.states import EngineState
from fleet.planning.placement import available_spares, choose_joining, choose_together, shared_prefix
from fleet.planning.snapshot import NodeView
from fleet.planning.states import NodeState
from tests.fleet.planning.fleets import KIND, cell, fleet, member, node


def at(name: str, *topology: str) -> NodeView:
    return node(name, topology=topology)


def names(nodes: tuple[NodeView, ...] | None) -> list[str] | None:
    return None if nodes is None else [n.id for n in nodes]


def test_only_idle_ready_uncordoned_nodes_outside_cells_are_spares() -> None:
    view = fleet(
        node("spare"),
        node("cordoned", cordoned=True),
        node("suspect", state=NodeState.SUSPECT),
        node("away", report={"connected": False}),
        node("stopping", report={"state": EngineState.READY, "cell": "old", "generation": 1}),
        node("elsewhere", region="west"),
        node("other-kind", instance_type="trn1.32xlarge"),
        member("taken"),
        cell("c1", "taken"),
    )
    assert [n.id for n in available_spares(view, "east", KIND)] == ["spare"]


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ((), (), 0),
        (("a",), ("b",), 0),
        (("a", "b"), ("a", "c"), 1),
        (("a", "b"), ("a", "b"), 2),
        (("a",), ("a", "b"), 1),
    ],
)
def test_nearness_is_the_common_prefix(one: tuple[str, ...], other: tuple[str, ...], expected: int) -> None:
    assert shared_prefix(one, other) == expected


def test_a_cell_is_placed_under_the_lowest_common_network_node() -> None:
    spares = [at("a", "s", "r1"), at("b", "s", "r2"), at("c", "s", "r2")]
    assert names(choose_together(spares, 2)) == ["b", "c"]


def test_of_equally_near_groups_the_smallest_is_broken() -> None:
    large = [at(name, "s", "r1") for name in "abc"]
    small = [at(name, "s", "r2") for name in "de"]
    assert names(choose_together(large + small, 2)) == ["d", "e"]


def test_too_few_spares_place_nothing() -> None:
    assert choose_together([at("a", "s")], 2) is None
    assert choose_joining([], [at("x", "s")], 1) is None


def test_a_replacement_is_the_spare_nearest_to_those_who_stay() -> None:
    spares = [at("far", "s", "r9"), at("near", "s", "r1"), at("other", "t", "r1")]
    assert names(choose_joining(spares, [at("x", "s", "r1")], 1)) == ["near"]


def test_a_cell_that_lost_everybody_is_placed_anew() -> None:
    assert names(choose_joining([at("a", "s", "r1"), at("b", "s", "r1")], [], 2)) == ["a", "b"]


def test_nodes_without_topology_can_still_be_placed() -> None:
    assert names(choose_together([at("a"), at("b")], 2)) == ["a", "b"]
