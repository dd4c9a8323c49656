"""Tables of when one more cell may be drained on purpose."""

from dataclasses import replace
from typing import Any

import pytest

from engine_agent.protocol.states import CellRole
from fleet.deployments.planner import UpdatePolicy
from fleet.reconcile.planning.settings import Ledger, LedgerCounts, LedgerLimits, refusal
from fleet.reconcile.planning.snapshot import RolloutView
from fleet.reconcile.planning.states import CellState, DisruptionCause, RolloutState
from tests.fleet.fleets import NOW, ago, cell, fleet

LIMITS = LedgerLimits()
WHOLE = LedgerCounts(
    wanted=8, available=8, open=0, wanted_here=4, available_here=4,
    region_wanted=10, region_open=0, fleet_wanted=20, fleet_open=0, is_available=True,
)  # fmt: skip


def answer(cause: DisruptionCause = DisruptionCause.ROLLOUT, max_unavailable: int = 1, **changes: Any) -> str | None:
    return refusal(replace(WHOLE, **changes), cause, max_unavailable, LIMITS)


@pytest.mark.parametrize(
    ("changes", "max_unavailable", "why"),
    [
        ({}, 1, None),
        ({}, 0, "0 cells of the deployment are down on purpose; the limit is 0"),
        ({"available": 7, "open": 1}, 1, "1 cells of the deployment are down on purpose; the limit is 1"),
        ({"available": 7, "open": 1}, 2, None),
        ({"available": 6, "available_here": 3, "open": 1}, 2, None),
        ({"available": 7, "available_here": 3}, 1, "3 of 4 cells in the region are available"),
        ({"available": 6}, 1, None),
        ({"wanted": 1, "available": 1, "wanted_here": 1, "available_here": 1}, 1,
         "no other cell of the deployment is available"),
        ({"available": 9, "available_here": 5}, 0, None),
        ({"region_open": 2}, 1, "2 cells of the region are down on purpose, which is its budget"),
        ({"fleet_open": 4}, 1, "4 cells of the fleet are down on purpose, which is its budget"),
        ({"available": 9, "available_here": 5, "region_open": 2, "fleet_open": 4}, 0, None),
        ({"available": 7, "available_here": 3, "is_available": False}, 1, None),
    ],
    ids=[
        "whole", "nothing may be away", "one is away by us", "two may be", "one broke here, one is away by us, two may",
        "one broke here", "two broke elsewhere", "the last cell", "a surge stands in", "the region's budget is spent",
        "the fleet's budget is spent", "a surge needs no budget", "a cell that has not proven itself takes nothing",
    ],
)  # fmt: skip
def test_a_rollout_takes_down_no_more_than_the_policy_and_the_budgets_allow(
    changes: dict[str, Any], max_unavailable: int, why: str | None
) -> None:
    assert answer(max_unavailable=max_unavailable, **changes) == why


def test_scaling_down_never_goes_below_what_is_wanted() -> None:
    assert answer(DisruptionCause.SCALE) == "4 of 4 cells in the region are available"
    assert answer(DisruptionCause.SCALE, available=9, available_here=5) is None
    assert answer(DisruptionCause.SCALE, wanted=0, wanted_here=0, available=1, available_here=1) is None


def test_capacity_moves_to_another_region_no_faster_than_it_comes_up_there() -> None:
    east_to_west: dict[str, Any] = {"wanted": 4, "wanted_here": 0, "available": 4, "available_here": 4}
    assert answer(DisruptionCause.SCALE, **east_to_west) is None
    assert answer(DisruptionCause.SCALE, **east_to_west | {"available": 3, "available_here": 3, "open": 1}) is not None


def test_budgets_grow_with_the_region() -> None:
    assert [LIMITS.region(wanted) for wanted in (2, 20, 100, 2500)] == [2, 2, 10, 250]


def test_a_pass_counts_what_it_has_charged_itself() -> None:
    view = fleet(*(cell(f"c{i}") for i in range(3)), wanted=3)
    ledger = Ledger(view, LIMITS, NOW)
    first, second = view.cells["c0"], view.cells["c1"]
    assert ledger.refusal(first, DisruptionCause.ROLLOUT) is None
    ledger.charge(first, DisruptionCause.ROLLOUT)
    assert ledger.refusal(second, DisruptionCause.ROLLOUT) is not None


def test_a_rollouts_own_policy_counts_while_it_is_active() -> None:
    view = fleet(*(cell(f"c{i}") for i in range(3)), wanted=3)
    policy = UpdatePolicy(max_unavailable=2, min_healthy_s=1)
    rollout = RolloutView(1, "llama", "1", "2", RolloutState.RUNNING, 0, ("east",), policy, 1, NOW)
    ledger = Ledger(replace(view, rollouts={"llama": rollout}), LIMITS, NOW)
    for name in ("c0", "c1"):
        assert ledger.refusal(view.cells[name], DisruptionCause.ROLLOUT) is None
        ledger.charge(view.cells[name], DisruptionCause.ROLLOUT)
    assert ledger.refusal(view.cells["c2"], DisruptionCause.ROLLOUT) is not None


def test_a_cell_is_available_once_it_was_ready_for_long_enough() -> None:
    young = cell("c1", state_since=ago(UpdatePolicy().min_healthy_s - 1))
    view = fleet(cell("c0"), young, cell("c2", state=CellState.FAILED), wanted=3)
    ledger = Ledger(view, LIMITS, NOW)
    assert [ledger.is_available(each) for each in view.cells.values()] == [True, False, False]


def test_who_only_reads_prompts_is_no_other_cell_that_answers() -> None:
    alone: dict[str, Any] = {"wanted": 3, "available": 3, "available_prefill": 2, "wanted_here": 3, "available_here": 3}
    only = "no other cell of the deployment is available except prefill cells"
    assert answer(**alone) == only
    assert answer(**alone, is_prefill=True) is None
    assert answer(**alone | {"available_prefill": 1}) is None


def test_a_pass_counts_who_answers() -> None:
    view = fleet(cell("p", role=CellRole.PREFILL), cell("d", role=CellRole.DECODE), wanted=2)
    ledger = Ledger(view, LIMITS, NOW)
    assert "except prefill cells" in (ledger.refusal(view.cells["d"], DisruptionCause.ROLE) or "")
    assert ledger.refusal(view.cells["p"], DisruptionCause.ROLE) is None
    ledger.charge(view.cells["p"], DisruptionCause.ROLE)
    assert ledger.refusal(view.cells["d"], DisruptionCause.ROLE) == "no other cell of the deployment is available"
