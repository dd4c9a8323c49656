"""Cells of a deployment on several instance types: where new ones go, and which ones move."""

from collections import Counter
from dataclasses import replace
from typing import Any

from fleet.deployments.planner import ClaimView, QuotaView
from fleet.reconcile.planning.decisions import CreateCell, Decision, DrainCell, LaunchNodes, StartCell, StopCell
from fleet.reconcile.planning.planner import plan_reconcile
from fleet.reconcile.planning.snapshot import CellView, DeploymentView, FleetView, NodeView, RegionView, VersionView
from fleet.reconcile.planning.states import CellState, DisruptionCause, NodeState
from tests.fleet.fleets import LISTENING, NOW, SETTINGS, ago, cell, member, node

TRN, INF = "trn1", "inf2"
PRICES = {TRN: 16.0, INF: 6.0}
"""A dollar per concurrent request on trn1, a dollar and a half on inf2."""


def spec(wanted: int, **changes: Any) -> DeploymentView:
    further = {INF: {"": VersionView(2, ready_timeout_s=900.0, engine="neuron", concurrency=8)}}
    view = DeploymentView("llama", TRN, 1, {"east": wanted}, engine="neuron", concurrency=16, further=further)
    return replace(view, **changes)


def fleet(
    *parts: NodeView | CellView, wanted: int = 2, free: dict[str, int] | None = None, **changes: Any
) -> FleetView:
    """In a region with a fixed pool, unless `is_bought`."""
    is_bought, prices = changes.pop("is_bought", False), changes.pop("prices", PRICES)
    region = RegionView("east", free=None if is_bought else free or {}, prices=prices)
    return FleetView(
        regions={"east": region},
        nodes={part.id: part for part in parts if isinstance(part, NodeView)},
        cells={part.id: part for part in parts if isinstance(part, CellView)},
        deployments={"llama": spec(wanted, **changes)},
        listening_since=LISTENING,
    )


def on(kind: str, name: str, **changes: Any) -> tuple[NodeView | CellView, ...]:
    """A ready cell on a type, with its machines."""
    nodes = [f"n-{name}-{rank}" for rank in range(1 if kind == TRN else 2)]
    members = [replace(member(one, of=name), instance_type=kind) for one in nodes]
    return *members, cell(name, *nodes, instance_type=kind, state_since=ago(400), **changes)


def spare(kind: str, name: str) -> NodeView:
    return node(name, instance_type=kind)


def plan(view: FleetView) -> tuple[Decision, ...]:
    return plan_reconcile(view, SETTINGS, NOW)


def created(view: FleetView) -> list[tuple[str, str]]:
    return [(one.instance_type, one.reason) for one in plan(view) if isinstance(one, CreateCell)]


def test_new_cells_go_where_a_request_is_cheapest_as_far_as_machines_are_there() -> None:
    view = fleet(spare(TRN, "n-1"), spare(INF, "n-2"), spare(INF, "n-3"), wanted=2)
    assert created(view) == [
        (TRN, "2 cells wanted, 0 exist; on trn1: 1 $/h per concurrent request, the lowest of the types with machines"),
        (INF, "2 cells wanted, 0 exist; on inf2: no free machine of trn1"),
    ]


def test_half_a_cell_of_machines_is_no_place_for_one() -> None:
    view = fleet(spare(TRN, "n-1"), spare(INF, "n-2"), wanted=2)
    assert [kind for kind, _ in created(view)] == [TRN, TRN]


def test_a_free_machine_of_the_pool_is_as_good_as_a_spare_and_what_is_kept_for_repair_is_not() -> None:
    view = fleet(spare(TRN, "n-1"), free={INF: 2}, wanted=1)
    kept = replace(view.regions["east"], repair_only={TRN: 1})
    assert [kind for kind, _ in created(view)] == [TRN]
    assert [kind for kind, _ in created(replace(view, regions={"east": kept}))] == [INF]


def test_a_cell_starts_on_machines_of_its_own_type_with_what_its_version_takes_there() -> None:
    pending = cell("c1", state=CellState.PENDING, instance_type=INF, generation=0)
    view = fleet(spare(TRN, "n-1"), spare(INF, "n-2"), spare(INF, "n-3"), pending, wanted=1, claims=stated(1, {INF: 1}))
    (start,) = [one for one in plan(view) if isinstance(one, StartCell)]
    assert set(start.nodes) == {"n-2", "n-3"}


def test_a_cell_that_lost_its_machine_gives_way_to_one_of_a_type_that_has_some() -> None:
    dead = node("n-dead", instance_type=TRN, state=NodeState.LOST)
    lost = cell("c2", "n-dead", instance_type=TRN, state=CellState.LOST)
    view = fleet(*on(TRN, "c1"), dead, lost, spare(INF, "n-2"), spare(INF, "n-3"))
    decisions = plan(view)
    assert [one.instance_type for one in decisions if isinstance(one, CreateCell)] == [INF]
    there = replace(view, cells={**view.cells, "c3": cell("c3", instance_type=INF, state=CellState.PENDING)})
    decisions = plan(there)
    (stop,) = [one for one in decisions if isinstance(one, StopCell)]
    assert (stop.cell, stop.reason) == ("c2", "2 cells wanted, 3 exist")
    assert [one.cell for one in decisions if isinstance(one, StartCell)] == ["c3"]


def test_where_machines_are_bought_a_cell_waits_for_its_type_as_long_as_others_would_make_room() -> None:
    def waiting(seconds: float) -> FleetView:
        pending = cell("c1", state=CellState.PENDING, instance_type=TRN, generation=0, state_since=ago(seconds))
        return fleet(pending, wanted=1, is_bought=True)

    patience_s = SETTINGS.shares.patience_s + waiting(0).regions["east"].limits.boot_s
    assert created(waiting(patience_s - 1)) == []
    (launch,) = [one for one in plan(waiting(patience_s - 1)) if isinstance(one, LaunchNodes)]
    assert launch.instance_type == TRN
    assert [kind for kind, _ in created(waiting(patience_s))] == [INF]


def stated(asked: int, by_type: dict[str, int]) -> dict[str, ClaimView]:
    return {"east": ClaimView(asked, by_type=by_type)}


def test_another_mix_starts_one_there_first_and_drains_one_here_once_that_serves() -> None:
    claims = stated(2, {INF: 1})
    spares = (spare(INF, "n-2"), spare(INF, "n-3"))
    before = fleet(*on(TRN, "c1"), *on(TRN, "c2"), *spares, claims=claims)
    assert [one for one in plan(before) if isinstance(one, DrainCell | StopCell)] == []
    assert [kind for kind, _ in created(before)] == [INF]
    starting = cell("c3", "n-2", "n-3", instance_type=INF, state=CellState.STARTING, state_since=ago(5))
    between = fleet(*on(TRN, "c1"), *on(TRN, "c2"), *spares, starting, claims=claims)
    assert [one for one in plan(between) if isinstance(one, CreateCell | DrainCell | StopCell)] == []
    (drain,) = [
        one
        for one in plan(fleet(*on(TRN, "c1"), *on(TRN, "c2"), *on(INF, "c3"), claims=claims))
        if isinstance(one, DrainCell)
    ]
    assert (drain.cell, drain.cause) == ("c1", DisruptionCause.SCALE)
    assert created(fleet(*on(TRN, "c1"), *on(INF, "c3"), claims=claims)) == []


def test_a_price_moves_a_working_cell_only_where_it_is_a_fifth_lower_for_as_much() -> None:
    there = (*on(INF, "c1"), *on(INF, "c2"), spare(TRN, "n-1"))
    assert [kind for kind, _ in created(fleet(*there))] == [TRN]
    assert created(fleet(*there, prices={TRN: 16.0, INF: 4.5})) == []
    assert (
        created(
            fleet(*on(TRN, "c1"), *on(TRN, "c2"), *(spare(INF, f"n-{n}") for n in (3, 4)), prices={TRN: 16.0, INF: 1.0})
        )
        == []
    )


def test_fewer_cells_are_fewer_of_the_dearest() -> None:
    view = fleet(*on(TRN, "c1"), *on(INF, "c2"), *on(TRN, "c3"))
    (drain,) = [one for one in plan(view) if isinstance(one, DrainCell)]
    assert (drain.cell, drain.reason) == ("c2", "2 cells wanted, 3 exist")


def test_a_quota_of_one_type_sends_cells_to_another() -> None:
    spares = (*(spare(TRN, f"n-{n}") for n in range(3)), *(spare(INF, f"m-{n}") for n in range(4)))
    view = replace(fleet(*spares, wanted=3, team="search"), quotas=(QuotaView("search", TRN, 1),))
    assert Counter(kind for kind, _ in created(view)) == {TRN: 1, INF: 2}


def test_nothing_moves_for_a_price_while_anything_starts() -> None:
    starting = cell("c2", "n-9", "n-8", instance_type=INF, state=CellState.STARTING)
    nodes = [replace(member(name, of="c2"), instance_type=INF) for name in ("n-9", "n-8")]
    assert created(fleet(*on(INF, "c1"), starting, *nodes, spare(TRN, "n-1"))) == []


def test_a_deployment_of_one_type_has_no_choice() -> None:
    view = fleet(spare(INF, "n-2"), spare(INF, "n-3"), wanted=1, further={})
    assert created(view) == [(TRN, "1 cells wanted, 0 exist")]
