"""When a deployment in a region counts as without a usable cell, and what its incident says."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from fleet.planning.states import CellState
from traffic.planning.unserved import OPEN_AFTER_S, CellStanding, Place, judge_place

NOW = datetime(2026, 11, 29, 12, tzinfo=UTC)
LONG_AGO = NOW - timedelta(hours=1)
DOWN = CellStanding("c1", CellState.READY, LONG_AGO, views={"i-1": "down", "i-2": "up"})
OUT = Place(
    "llama", "east", wanted=1, capacity=0.0, emptied=False, closed=False, cells=(DOWN,), elsewhere=("west",),
    refused={"no_ready_cell": 7, "queue_full": 1}, served=True, since=NOW - timedelta(seconds=OPEN_AFTER_S),
    refused_before={"no_ready_cell": 3, "queue_full": 1},
)  # fmt: skip


def test_after_five_seconds_without_a_usable_cell_the_incident_says_which_and_what_it_cost() -> None:
    unserved = judge_place(OUT, NOW).unserved
    assert unserved is not None
    assert unserved.summary == (
        "No cell of llama in east can serve: c1 is ready, down at its ingresses; requests go to west;"
        " 4 requests failed since"
    )
    assert unserved.evidence["refused"] == {"no_ready_cell": 4}
    assert unserved.evidence["cells"][0]["ingresses"] == {"i-1": "down", "i-2": "up"}
    assert unserved.evidence["since"] == OUT.since.isoformat()  # type: ignore[union-attr]


def test_the_five_seconds_begin_with_the_first_look_that_found_none() -> None:
    first = judge_place(replace(OUT, since=None, refused_before={}), NOW)
    assert first.unserved is None
    assert (first.noted.since, first.noted.refused_before) == (NOW, OUT.refused)
    later = replace(OUT, since=first.noted.since, refused_before=first.noted.refused_before)
    assert judge_place(later, NOW + timedelta(seconds=OPEN_AFTER_S - 0.1)).unserved is None
    assert judge_place(later, NOW + timedelta(seconds=OPEN_AFTER_S)).unserved is not None


@pytest.mark.parametrize(
    "change",
    [
        {"wanted": 0},
        {"closed": True},
        {"served": False},
        {"capacity": 8.0},
        {"cells": (replace(DOWN, on_purpose=True),)},
        {"cells": (replace(DOWN, state=CellState.DRAINING),)},
        {"cells": (replace(DOWN, since=NOW - timedelta(seconds=3)),)},
        {"cells": (replace(DOWN, on_purpose=True), replace(DOWN, id="c2", state=CellState.DRAINING))},
        {"cells": ()},
    ],
    ids=["scaled to 0", "evacuated", "never served", "serves", "a rollout's", "draining", "has just become ready",
         "several, all on purpose", "no row"],
)  # fmt: skip
def test_what_is_meant_to_be_opens_no_incident(change: dict[str, object]) -> None:
    judgement = judge_place(replace(OUT, **change), NOW)  # type: ignore[arg-type]
    assert (judgement.unserved, judgement.noted.since) == (None, None)
    assert judgement.resolution


@pytest.mark.parametrize("state", [CellState.FAILED, CellState.LOST, CellState.STARTING, CellState.PENDING])
def test_a_cell_that_broke_and_comes_again_is_missed_until_it_serves(state: CellState) -> None:
    broken = replace(DOWN, state=state, since=NOW, reason="exit 139", views={})
    unserved = judge_place(replace(OUT, cells=(broken,)), NOW).unserved
    assert unserved is not None
    assert f"c1 is {state} (exit 139)" in unserved.summary


def test_a_region_that_the_autopilot_emptied_is_one_though_its_cells_are_well() -> None:
    well = replace(DOWN, views={"i-1": "up"})
    emptied = replace(OUT, capacity=8.0, emptied=True, cells=(well,), elsewhere=(), refused={})
    unserved = judge_place(emptied, NOW).unserved
    assert unserved is not None
    assert unserved.summary.startswith("The autopilot sends all requests for llama away from east, which has cells")
    assert "no region serves it; no request failed yet" in unserved.summary


def test_what_is_scaled_to_zero_is_cold_when_it_comes_back_and_what_was_evacuated_is_not() -> None:
    assert not judge_place(replace(OUT, wanted=0), NOW).noted.served
    assert judge_place(replace(OUT, closed=True), NOW).noted.served
