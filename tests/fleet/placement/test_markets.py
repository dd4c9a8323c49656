"""Cells use only machines of their deployment's markets; enough of those are bought, and no more."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.capacity.planning.pools import ANY, Market, Markets, may_use
from fleet.placement.planning.supply import Need, Warm, market_shares
from fleet.reconcile.planning.decisions import Decision, LaunchNodes, RetireNode, StartCell
from fleet.reconcile.planning.planner import plan_reconcile
from fleet.reconcile.planning.snapshot import DeploymentView, FleetView
from fleet.reconcile.planning.states import CellState, NodeState, ProviderAction
from tests.fleet.fleets import KIND, NOW, SETTINGS, ago, cell, fleet, member, node
from tests.fleet.world import World

RESERVED: Markets = frozenset({Market.RESERVED})
ON_DEMAND: Markets = frozenset({Market.ON_DEMAND})
SPOT: Markets = frozenset({Market.SPOT})
FIRM = RESERVED | ON_DEMAND
CHOICES = st.sampled_from([ANY, RESERVED, ON_DEMAND, SPOT, FIRM, ON_DEMAND | SPOT])
BOUGHT = st.sampled_from([ANY, RESERVED, ON_DEMAND, SPOT])
PENDING = cell("c1", state=CellState.PENDING, generation=0)


def with_markets(view: FleetView, **markets: Markets) -> FleetView:
    """Deployments of one cell in the region, each with its markets."""
    llama = view.deployments["llama"]
    return replace(view, deployments={name: replace(llama, name=name, markets=own) for name, own in markets.items()})


def waiting(of: str) -> Any:
    return replace(PENDING, id=f"c-{of}", deployment=of)


def only(decisions: tuple[Decision, ...], kind: type[Any]) -> list[Any]:
    return [decision for decision in decisions if isinstance(decision, kind)]


def test_a_cell_that_refuses_spot_buys_a_machine_beside_a_spare_of_spot() -> None:
    view = fleet(node("s", markets=SPOT), PENDING, nodes_per_cell=1)
    decisions = plan_reconcile(with_markets(view, llama=FIRM), SETTINGS, NOW)
    assert not only(decisions, StartCell)
    assert [(d.count, d.markets) for d in only(decisions, LaunchNodes)] == [(1, FIRM)]
    reason = "needs 1 local.cpu; 0 are spare; 1 other spare is of a market that its deployment does not use"
    assert reason in {getattr(decision, "reason", "") for decision in decisions}


def test_the_strictest_cell_gets_the_machine_that_it_alone_needs() -> None:
    view = fleet(node("d", markets=ON_DEMAND), node("s", markets=SPOT), waiting("a"), waiting("b"), nodes_per_cell=1)
    decisions = plan_reconcile(with_markets(view, a=ANY, b=ON_DEMAND), SETTINGS, NOW)
    assert {(d.cell, d.nodes) for d in only(decisions, StartCell)} == {("c-a", ("s",)), ("c-b", ("d",))}
    assert not only(decisions, LaunchNodes)


def test_a_repair_keeps_to_the_markets_of_its_deployment() -> None:
    broken = cell("c1", "a", "b", state=CellState.LOST)
    view = fleet(member("a", markets=FIRM), member("b", state=NodeState.LOST), broken, node("s", markets=SPOT))
    decisions = plan_reconcile(with_markets(view, llama=FIRM), SETTINGS, NOW)
    assert not only(decisions, StartCell)
    assert [(d.near, d.markets) for d in only(decisions, LaunchNodes)] == [(("spine", "rack-1"), FIRM)]
    found = plan_reconcile(replace(with_markets(view, llama=FIRM | SPOT)), SETTINGS, NOW)
    assert [d.nodes for d in only(found, StartCell)] == [("a", "s")]


def test_warm_spares_are_bought_where_all_may_use_them() -> None:
    view = fleet(node("s", markets=SPOT), wanted=0, warm=1)
    assert not plan_reconcile(with_markets(view, a=FIRM, b=RESERVED), SETTINGS, NOW)
    view = with_markets(fleet(node("s", markets=SPOT), wanted=1, warm=1), a=FIRM, b=RESERVED | SPOT)
    assert [d.markets for d in only(plan_reconcile(view, SETTINGS, NOW), LaunchNodes)] == [RESERVED]


def test_a_machine_that_may_turn_out_to_be_of_spot_does_not_count_for_who_refuses_it() -> None:
    coming = node("j", state=NodeState.JOINING, report={"connected": False}, markets=FIRM | SPOT)
    view = with_markets(fleet(coming, PENDING, nodes_per_cell=1), llama=FIRM)
    assert [d.count for d in only(plan_reconcile(view, SETTINGS, NOW), LaunchNodes)] == [1]
    promised = with_markets(fleet(replace(coming, markets=FIRM), PENDING, nodes_per_cell=1), llama=FIRM)
    assert not only(plan_reconcile(promised, SETTINGS, NOW), LaunchNodes)


def test_of_a_unit_that_others_need_a_part_of_no_order_is_taken_back() -> None:
    report = {"connected": False, "last_seen_at": None}
    unit = [
        replace(
            node(f"o{n}", state=NodeState.JOINING, state_since=ago(60), report=report, markets=ON_DEMAND),
            ordered=ProviderAction.LAUNCH,
            unit="u-1",
        )
        for n in range(2)
    ]
    view = with_markets(fleet(*unit, PENDING, nodes_per_cell=1), llama=ON_DEMAND)
    assert not only(plan_reconcile(view, SETTINGS, NOW), RetireNode)


def test_machines_change_hands_where_that_leaves_nobody_without() -> None:
    one, other = node("d", markets=ON_DEMAND), node("r", markets=RESERVED)
    needs = {FIRM: _need(1), ON_DEMAND | SPOT: _need(1)}
    for free in ([one, other], [other, one]):
        shares = {share.markets: share.free for share in market_shares(needs, Warm(), free, [])}
        assert shares == {FIRM: (other,), ON_DEMAND | SPOT: (one,), ANY: ()}


def _need(count: int) -> Need:
    return Need(nodes=count, missing=Counter({(): count}))


@given(
    needs=st.dictionaries(CHOICES, st.integers(0, 4), max_size=4),
    bought=st.lists(BOUGHT, max_size=8),
    coming=st.lists(CHOICES, max_size=4),
    warm=st.tuples(st.integers(0, 3), CHOICES),
)
def test_everything_is_in_one_share_and_none_gets_more_than_it_needs_or_what_it_refuses(
    needs: Mapping[Markets, int], bought: list[Markets], coming: list[Markets], warm: tuple[int, Markets]
) -> None:
    free = [node(f"f{n}", markets=markets) for n, markets in enumerate(bought)]
    orders = [node(f"j{n}", markets=markets) for n, markets in enumerate(coming)]
    shares = market_shares({markets: _need(n) for markets, n in needs.items()}, Warm(*warm), free, orders)
    given_out = [one.id for share in shares for one in (*share.free, *share.coming)]
    assert sorted(given_out) == sorted(one.id for one in (*free, *orders))
    assert shares[-1].markets == ANY
    for share in shares[:-1]:
        has = (*share.free, *share.coming)
        assert all(may_use(share.markets, one.markets) for one in has)
        assert len(has) <= needs.get(share.markets, 0) + share.warm


@given(bought=st.lists(BOUGHT, min_size=6, max_size=6), wanted=st.integers(0, 4), warm=st.integers(0, 2))
def test_markets_of_machines_change_nothing_where_no_deployment_states_any(
    bought: list[Markets], wanted: int, warm: int
) -> None:
    def plan(markets: list[Markets]) -> tuple[Decision, ...]:
        spares = [node(f"n{n}", topology=("s", f"r{n % 3}"), markets=own) for n, own in enumerate(markets)]
        cells = [replace(PENDING, id=f"c{n}") for n in range(wanted)]
        return plan_reconcile(fleet(*spares, *cells, wanted=wanted, warm=warm), SETTINGS, NOW)

    assert plan(bought) == plan([ANY] * len(bought))


class MarketWorld(World):
    """Each bought machine is in one of the markets of its order."""

    def __init__(self, view: FleetView, picks: list[int]) -> None:
        super().__init__(view)
        self.picks = picks
        self.launched = 0

    def apply(self, decision: Decision) -> None:
        known = set(self.store.nodes)
        super().apply(decision)
        for name in sorted(self.store.nodes.keys() - known):
            one = self.store.nodes[name]
            markets = sorted(one.markets or Market)
            bought = markets[self.picks[self.launched % len(self.picks)] % len(markets)]
            self.launched += 1
            self.store.nodes[name] = replace(one, markets=frozenset({bought}))
        if isinstance(decision, StartCell):
            self._check_stands(decision)

    def _check_stands(self, decision: StartCell) -> None:
        wanted = self.store.deployments[self.store.cells[decision.cell].deployment].markets
        assert all(may_use(wanted, self.store.nodes[name].markets) for name in decision.nodes), decision


@pytest.mark.slow
@given(
    choices=st.lists(CHOICES, min_size=1, max_size=3),
    size=st.integers(1, 2),
    warm=st.integers(0, 2),
    picks=st.lists(st.integers(0, 5), min_size=1, max_size=8),
    kills=st.lists(st.tuples(st.integers(3, 20), st.integers(0, 9)), max_size=3),
)
def test_every_cell_gets_machines_that_it_may_use_and_none_is_left_over(
    choices: list[Markets], size: int, warm: int, picks: list[int], kills: list[tuple[int, int]]
) -> None:
    view = fleet(wanted=1, nodes_per_cell=size, warm=warm)
    stated = dict(zip(("llama", "b", "c"), choices, strict=False))
    own = {name: DeploymentView(name, KIND, size, {"east": 1}, markets=markets) for name, markets in stated.items()}
    world = MarketWorld(replace(view, deployments=own), picks)
    wanted = len(choices) * size + warm
    for tick in range(120):
        for _, index in (kill for kill in kills if kill[0] == tick):
            world.kill(index)
        world.tick()
    assert {one.deployment for one in world.cells(CellState.READY)} == set(own)
    # A cell that may use any machine may take one bought for another cell, which then gets another one.
    assert world.launched <= 2 * wanted + len(kills) * size
    for _ in range(3):
        world.tick(SETTINGS.surplus_after_s)
    assert len(world.store.nodes) == wanted
    assert {one.deployment for one in world.cells(CellState.READY)} == set(own)
