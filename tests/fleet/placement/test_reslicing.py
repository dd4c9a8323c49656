"""Machines get another layout for cells that wait, unless one of these conditions keeps them as they are."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.machines.layouts import parse_layout
from fleet.reconcile.planning.decisions import ChangeLayout
from fleet.reconcile.planning.planner import plan_reconcile
from fleet.reconcile.planning.snapshot import CellView, DeploymentView, FleetView, MachineView, NodeView, RegionView
from fleet.reconcile.planning.states import CellState, NodeState, ProviderAction
from tests.fleet.fleets import LISTENING, NOW, SETTINGS, ago, cell, member, node

SIZES = {"one": 1, "two": 2, "four": 4, "eight": 8}
WAITED_S = SETTINGS.layout_after_s + 5


def machine(name: str = "m-0000000a", layout: str = "8x1", kind: str = "one", **changes: Any) -> MachineView:
    names = tuple(f"{name}-{number}" for number in range(len(parse_layout(layout))))
    view = MachineView(
        id=name,
        region="east",
        layout=layout,
        devices=8,
        are_shares=False,
        sizes=SIZES,
        nodes=names,
        types=frozenset([kind]),
        free_places=0,
        layout_since=ago(600),
    )
    return replace(view, **changes)


def nodes_of(view: MachineView, **changes: Any) -> list[NodeView]:
    """One spare node of the machine's first type for each place."""
    (kind,) = view.types
    return [node(name, instance_type=kind, topology=(view.id,), **changes) for name in view.nodes]


def waits(kind: str, count: int = 1, since_s: float = WAITED_S) -> list[CellView]:
    """Cells of the deployment of this type that wait for their first nodes."""
    return [
        cell(
            f"{kind}{number}",
            state=CellState.PENDING,
            deployment=kind,
            instance_type=kind,
            generation=0,
            state_since=ago(since_s),
        )
        for number in range(count)
    ]


def fleet(
    machines: list[MachineView],
    cells: list[CellView],
    nodes: list[NodeView] | None = None,
    nodes_per_cell: Mapping[str, int] | None = None,
    **region: Any,
) -> FleetView:
    wanted = Counter(one.deployment for one in cells)
    size = nodes_per_cell or {}
    there = [one for machine in machines for one in nodes_of(machine)] if nodes is None else nodes
    return FleetView(
        regions={"east": RegionView("east", free={}, **region)},
        nodes={one.id: one for one in there},
        cells={one.id: one for one in cells},
        deployments={
            name: DeploymentView(name, name, size.get(name, 1), {"east": count}) for name, count in wanted.items()
        },
        listening_since=LISTENING,
        machines=tuple(machines),
    )


def changes(view: FleetView) -> list[ChangeLayout]:
    return [one for one in plan_reconcile(view, SETTINGS, NOW) if isinstance(one, ChangeLayout)]


def layouts(view: FleetView) -> dict[str, str]:
    return {one.machine: one.layout for one in changes(view)}


def test_a_machine_of_spares_is_divided_for_cells_that_wait_for_larger_nodes() -> None:
    [change] = changes(fleet([machine()], waits("two", 4)))
    assert change == ChangeLayout(
        machine="m-0000000a",
        seen="8x1",
        nodes=machine().nodes,
        layout="4x2",
        types=("two",) * 4,
        reason="two0 and 3 more cells wait for nodes, the first for 20 s for two; its 8 nodes are spare and become 4x2"
        " instead of 8x1",
    )


def test_each_layout_of_a_machine_follows_from_what_waits() -> None:
    small, large = machine(), machine(layout="1x8", kind="eight")
    assert layouts(fleet([small], waits("eight"))) == {small.id: "1x8"}
    assert layouts(fleet([large], waits("one"))) == {large.id: "8x1"}
    assert layouts(fleet([large], [*waits("four"), *waits("one", 3)])) == {large.id: "1x4+4x1"}
    whole = replace(large, layout="", nodes=("n-1",))
    assert layouts(fleet([whole], waits("two"))) == {whole.id: "4x2"}
    shares = machine(sizes={"three": 3}, are_shares=True)
    assert layouts(fleet([shares], waits("three"))) == {shares.id: "1x3+1x5"}, "the number of shares stays"
    assert layouts(fleet([machine(sizes={"three": 3})], waits("three"))) == {"m-0000000a": "2x3"}


def busy(view: MachineView, **changed: Any) -> list[NodeView]:
    first, *others = nodes_of(view)
    return [replace(first, **changed), *others]


@pytest.mark.parametrize(
    "kept",
    [
        lambda: fleet([machine()], waits("two", since_s=5)),
        lambda: fleet([machine()], waits("two"), busy(machine(), spare_since=ago(5))),
        lambda: fleet([machine(layout_since=ago(30))], waits("two")),
        lambda: fleet([machine()], waits("two"), busy(machine(), cordoned=True)),
        lambda: fleet([machine()], waits("two"), busy(machine(), ordered=ProviderAction.RESTART_AGENT)),
        lambda: fleet([machine()], waits("two"), busy(machine(), state=NodeState.SUSPECT)),
        lambda: fleet([machine()], waits("two"), nodes_of(machine())[1:]),
        lambda: fleet([machine()], waits("two"), spares={"one": 1}),
        lambda: fleet([machine()], waits("two"), repair_only={"one": 8}),
        lambda: fleet([machine(sizes={"one": 1})], waits("two")),
        lambda: replace(fleet([machine()], waits("two")), layouts_changing={"east": 2}),
        lambda: fleet([machine(), machine("m-0000000b", coming=("two",))], waits("two"), nodes_of(machine())),
    ],
    ids=[
        "the cell waits for a moment only", "a node was in a cell a moment ago", "its layout is new",
        "a node is cordoned", "a node has an order", "a node is silent", "a node is not known",
        "the region keeps a spare",
        "spares are for repairs", "no node of the type fits", "the budget of the region is spent", "a node is coming",
    ],
)  # fmt: skip
def test_a_machine_keeps_its_layout_if(kept: Callable[[], FleetView]) -> None:
    assert layouts(kept()) == {}


def test_a_machine_with_a_cell_keeps_its_layout() -> None:
    view = machine()
    first, *others = nodes_of(view)
    serving = member(first.id, "c1", instance_type="one", topology=(view.id,))
    cells = [cell("c1", first.id, deployment="one", instance_type="one"), *waits("two")]
    assert layouts(fleet([view], cells, [serving, *others])) == {}


def test_spares_that_a_waiting_cell_holds_are_not_divided() -> None:
    view = machine()
    cells = [*waits("one"), *waits("two")]
    assert layouts(fleet([view], cells, nodes_per_cell={"one": 9})) == {}


def test_free_places_are_no_spares_while_a_launch_may_take_them() -> None:
    empty = machine(nodes=(), free_places=8)
    assert layouts(fleet([empty], waits("two"), [])) == {empty.id: "4x2"}
    launched = node("n-1", state=NodeState.JOINING, instance_type="one", report={"connected": False})
    assert layouts(fleet([empty], waits("two"), [replace(launched, ordered=ProviderAction.LAUNCH)])) == {}


def test_a_cell_of_several_nodes_gets_all_of_them_or_none() -> None:
    first, second = machine("m-0000000a"), machine("m-0000000b")
    cells, size = waits("four"), {"four": 4}
    assert layouts(fleet([first], cells, nodes_per_cell=size)) == {}
    assert layouts(fleet([first, second], cells, nodes_per_cell=size)) == {first.id: "2x4", second.id: "2x4"}
    near = fleet([first, second], cells, nodes_per_cell=size)
    near = replace(near, deployments={"four": replace(near.deployments["four"], within=1)})
    assert layouts(near) == {}, "all of its nodes must be on one machine"


def test_spares_of_other_software_are_not_multiplied() -> None:
    old = node("n-1", instance_type="two", software={"driver": "1"}, fingerprint="1")
    new = node("n-2", instance_type="two", software={"driver": "2"}, fingerprint="2")
    view = machine()
    assert layouts(fleet([view], waits("two"), [*nodes_of(view), old, new], nodes_per_cell={"two": 2})) == {}


@given(
    places=st.lists(st.sampled_from([("8x1", "one"), ("4x2", "two"), ("2x4", "four"), ("1x8", "eight")]), max_size=5),
    demand=st.dictionaries(st.sampled_from(sorted(SIZES)), st.tuples(st.integers(1, 9), st.integers(1, 3)), max_size=4),
    taken=st.sets(st.integers(0, 4)),
)
def test_no_node_in_use_is_touched_and_no_device_is_given_twice(
    places: list[tuple[str, str]], demand: dict[str, tuple[int, int]], taken: set[int]
) -> None:
    machines = [machine(f"m-0000000{at}", layout, kind) for at, (layout, kind) in enumerate(places)]
    used = {machines[at].id for at in taken if at < len(machines)}
    nodes = [one for view in machines for one in nodes_of(view, cordoned=view.id in used)]
    cells = [each for kind, (count, _) in demand.items() for each in waits(kind, count)]
    view = fleet(machines, cells, nodes, {kind: size for kind, (_, size) in demand.items()})
    found = changes(view)
    assert len(found) <= SETTINGS.ledger.region(len(cells))
    for change in found:
        sizes = parse_layout(change.layout)
        assert change.machine not in used
        assert sum(sizes) <= 8
        assert [SIZES[kind] for kind in change.types] == list(sizes)
        assert set(change.types) <= set(demand)
    changed = {change.machine: change.types for change in found}
    later = [replace(one, coming=changed.get(one.id)) for one in machines]
    kept = [one for one in nodes if not any(one.id in change.nodes for change in found)]
    again = changes(replace(view, machines=tuple(later), nodes={one.id: one for one in kept}))
    assert not {change.machine for change in again} & set(changed), "the same need is not met twice"
