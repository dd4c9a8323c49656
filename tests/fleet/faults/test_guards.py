"""Limits of simultaneous replacements, and freezes."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.faults.planning.liveness import Guards, plan_liveness
from fleet.faults.planning.planner import plan_faults
from fleet.faults.planning.views import IncidentKind, Rule, RuleMode
from fleet.reconcile.planning.decisions import CordonNode, MoveNode, OpenIncident, ReplaceNode, RequestReplacement
from fleet.reconcile.planning.snapshot import FleetView, NodeView
from fleet.reconcile.planning.states import NodeState
from tests.fleet.faults.faulty import replacement, signal, with_faults
from tests.fleet.fleets import NOW, SETTINGS, ago, cell, fleet, member, node

SILENT = {"connected": False, "last_seen_at": ago(100)}


def names(count: int) -> list[str]:
    return [f"n{number:03d}" for number in range(count)]


def replaced(view: FleetView) -> list[str]:
    return [d.node for d in plan_faults(view, SETTINGS, NOW) if isinstance(d, ReplaceNode | RequestReplacement)]


def incidents(view: FleetView) -> dict[str, Any]:
    return {d.subject: d for d in plan_faults(view, SETTINGS, NOW) if isinstance(d, OpenIncident)}


@pytest.mark.parametrize(("size", "limit"), [(8, 1), (20, 1), (40, 2), (200, 10)])
def test_five_percent_of_a_pool_and_one_node_in_any_case_are_replaced_at_a_time(size: int, limit: int) -> None:
    signatures = ["neuron_dma_error", "nvidia_gpu_lost"]
    accused = [signal(name, signatures[place % 2]) for place, name in enumerate(names(size)[: limit + 1])]
    assert len(replaced(with_faults(fleet(*(node(name) for name in names(size))), *accused))) == limit


def test_what_must_wait_is_cordoned_and_says_what_it_waits_for() -> None:
    under_way = replacement("gone", "c9")
    view = with_faults(fleet(*(node(name) for name in names(8))), signal("n001"), replacements=(under_way,))
    decisions = plan_faults(view, SETTINGS, NOW)
    assert [type(decision) for decision in decisions[:2]] == [OpenIncident, CordonNode]
    assert (
        incidents(view)["n001"].evidence["waits"] == "1 of 1 replacements of its pool local.cpu in east are under way"
    )
    assert replaced(view) == []


def test_one_node_of_a_cell_is_replaced_at_a_time() -> None:
    spares = [node(name) for name in names(40)]
    view = fleet(member("l"), member("f"), *spares, cell("c1", "l", "f"))
    assert replaced(with_faults(view, signal("l"), signal("f", "nvidia_gpu_lost"))) == ["f"]


def test_above_a_fifth_unhealthy_nothing_is_replaced() -> None:
    suspects = [node(name, state=NodeState.SUSPECT, report=SILENT) for name in ("x", "y", "z")]
    view = with_faults(fleet(*suspects, *(node(name) for name in names(9))), signal("n001"))
    frozen = incidents(view)
    assert replaced(view) == []
    assert not any(isinstance(decision, CordonNode) for decision in plan_faults(view, SETTINGS, NOW))
    assert frozen["pool local.cpu in east"].summary == (
        "Nothing is replaced: 4 of 12 nodes of pool local.cpu in east are unhealthy"
    )
    assert frozen["n001"].evidence["waits"].startswith("frozen: 4 of 12 nodes")


def silent_zone(silent: int, size: int) -> FleetView:
    """Two zones; part of one is silent, with an ingress per cell as a second witness."""
    parts: list[Any] = []
    for number in range(size):
        state: dict[str, Any] = {"state": NodeState.SUSPECT} if number < silent else {}
        report = SILENT if number < silent else {}
        parts.append(member(f"a{number}", of=f"c{number}", topology=("zone-a",), report=report, **state))
        parts.append(cell(f"c{number}", f"a{number}"))
    parts += [node(f"b{number}", topology=("zone-b",)) for number in range(4 * size)]
    return with_faults(fleet(*parts, nodes_per_cell=1), down={f"c{number}": "i-east" for number in range(silent)})


def lost(view: FleetView) -> list[str]:
    return [d.node for d in plan_liveness(view, SETTINGS, NOW) if isinstance(d, MoveNode) and d.to is NodeState.LOST]


def test_sixty_percent_of_a_zone_silent_freezes_it_whoever_witnesses() -> None:
    view = silent_zone(6, 10)
    assert lost(view) == []
    summaries = incidents(view)
    assert summaries["zone zone-a in east"].kind is IncidentKind.FROZEN
    assert summaries["a0"].summary == (
        "Node a0 silent for 100 s, and ingress i-east cannot reach its cell c0; "
        "frozen: 6 of 10 nodes of zone zone-a in east are unhealthy"
    )


def test_one_silent_node_of_a_zone_is_lost_by_the_word_of_its_ingress() -> None:
    assert lost(silent_zone(1, 10)) == ["a0"]


def test_a_node_that_its_ingress_still_reaches_is_never_lost() -> None:
    view = silent_zone(1, 10)
    assert lost(with_faults(view, down={})) == []


@pytest.mark.parametrize("mode", [RuleMode.SHADOW, RuleMode.OFF])
def test_silence_condemns_nobody_while_its_rule_is_not_in_force(mode: RuleMode) -> None:
    view = with_faults(silent_zone(1, 10), down={"c0": "i-east"}, modes={Rule.SILENCE: mode})
    assert lost(view) == []
    assert [found.shadow for found in incidents(view).values()] == ([True] if mode is RuleMode.SHADOW else [])


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["ready", "suspect", "faulty", "lost"]), st.booleans(), st.sampled_from(["", "p", "q"])
        ),
        min_size=1,
        max_size=40,
    ),
    st.integers(0, 4),
)
def test_however_faulty_a_pool_is_no_more_than_its_share_is_replaced(
    machines: list[tuple[str, bool, str]], under_way: int
) -> None:
    nodes: list[NodeView] = [
        node(f"n{number}", state=NodeState(state), topology=(place,) if place else ())
        for number, (state, _, place) in enumerate(machines)
    ]
    signals = [signal(one.id) for one, (_, is_accused, _) in zip(nodes, machines, strict=True) if is_accused]
    busy = tuple(replacement(f"old{number}", f"d{number}", id=number) for number in range(under_way))
    view = with_faults(fleet(*nodes), *signals, replacements=busy)
    begun = replaced(view)
    assert len(begun) + under_way <= max(1, under_way, int(0.05 * len(nodes)))
    guards = Guards(view, SETTINGS, NOW)
    assert not begun or not guards.freezes


def shared_machine(size: int, *others: NodeView) -> FleetView:
    """A silent machine with nodes that each serve a cell, and an ingress per cell as a second witness."""
    parts: list[Any] = []
    for number in range(size):
        silent: dict[str, Any] = {"state": NodeState.SUSPECT, "report": SILENT, "topology": ("m-0000000a",)}
        parts += [member(f"a{number}", of=f"c{number}", **silent), cell(f"c{number}", f"a{number}")]
    view = fleet(*parts, *others, nodes_per_cell=1)
    return with_faults(view, down={f"c{number}": "i-east" for number in range(size)})


def test_all_nodes_of_a_lost_machine_are_replaced_together() -> None:
    neighbours = [node(f"b{number}", topology=("m-0000000b",)) for number in range(8)]
    assert lost(shared_machine(8, *neighbours)) == [f"a{number}" for number in range(8)]
    assert incidents(shared_machine(8, *neighbours)).keys().isdisjoint({"zone m-0000000a in east"})


def test_machines_that_fail_together_still_freeze_their_pool() -> None:
    """As many whole machines as the lost machine has nodes."""
    others = [node(f"x{number}", state=NodeState.SUSPECT, report=SILENT) for number in range(4)]
    view = shared_machine(4, *others, *(node(name) for name in names(8)))
    assert lost(view) == []
    assert incidents(view)["pool local.cpu in east"].summary == (
        "Nothing is replaced: 5 of 13 machines of pool local.cpu in east are unhealthy"
    )


def test_a_fault_of_every_node_of_one_machine_is_no_common_cause() -> None:
    shared = [node(f"a{number}", topology=("m-0000000a",)) for number in range(4)]
    view = fleet(*shared, *(node(name) for name in names(4)))
    found = incidents(with_faults(view, *(signal(one.id) for one in shared)))
    assert [(one.kind, one.subject) for one in found.values()] == [(IncidentKind.MACHINE, "m-0000000a")]
