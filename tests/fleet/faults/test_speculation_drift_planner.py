"""Drift of a deployment's speculation from its calibration."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.faults.planning.drift import (
    DRAFTS_LEAST,
    SHARE_LEAST,
    Guessing,
    SpeculationDriftPlan,
    plan_speculation_drift,
)

CHAINS = {"plan": (1.0, 1.8, 2.4, 2.8, 3.1), "chat": (1.0, 1.4, 1.5, 1.55, 1.6)}


def cell(accepted: int, drafts: int = 2000, guessed: int = 8000, **changes: Any) -> Guessing:
    fields = {"deployment": "d", "version": "toy@1", "covered_s": 3600.0, "chains": CHAINS, **changes}
    return Guessing(drafts=drafts, guessed=guessed, accepted=accepted, **fields)


def sentences(*cells: Guessing, open_about: tuple[str, ...] = ()) -> list[str]:
    return [sentence for _, sentence in plan_speculation_drift(cells, {"d"}, open_about).opened]


def test_below_the_share_one_is_opened_once_and_says_what_was_accepted() -> None:
    """Chat has the worst acceptance: 0.6 of 4 tokens, 1200 of 2000 drafts."""
    told = "d accepts 0.50 of 4.0 guessed tokens in the last hour, 83% of the 0.60 that toy@1 was calibrated to"
    assert sentences(cell(1000)) == [told]
    assert sentences(cell(1000), open_about=("d",)) == []
    assert sentences(cell(int(1200 * SHARE_LEAST) + 1)) == []


def test_fewer_guesses_in_larger_batches_are_held_against_what_so_many_should_bring() -> None:
    assert sentences(cell(880, guessed=3000)) == [], "0.45 expected of 1.5, 0.44 found"
    assert len(sentences(cell(700, guessed=3000))) == 1


@pytest.mark.parametrize(
    "changes", [{"drafts": DRAFTS_LEAST - 1, "guessed": 3000}, {"covered_s": 3000.0}, {"chains": {}}]
)
def test_too_little_is_judged_neither_way(changes: dict[str, Any]) -> None:
    assert sentences(cell(0, **changes)) == []
    assert plan_speculation_drift([cell(5000, **changes)], {"d"}, {"d"}) == SpeculationDriftPlan()


def test_cells_of_a_version_are_added_and_of_two_versions_the_one_that_guessed_most_counts() -> None:
    assert sentences(cell(100, drafts=600, guessed=2400), cell(100, drafts=600, guessed=2400)) != []
    assert sentences(cell(100), cell(6000, drafts=9000, guessed=36000, version="toy@2")) == []


def test_it_is_closed_when_it_is_well_again_or_gone_and_not_in_between() -> None:
    (closed,) = plan_speculation_drift([cell(1200)], {"d"}, {"d"}).closed
    assert closed == ("d", "100% of what toy@1 was calibrated to")
    assert plan_speculation_drift([cell(1110)], {"d"}, {"d"}).closed == ()
    assert plan_speculation_drift([], set(), {"d"}).closed == (("d", "the deployment was deleted"),)


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 10**7), st.booleans())
def test_whatever_is_reported_is_judged(drafts: int, accepted: int, guessed: int, is_open: bool) -> None:
    plan = plan_speculation_drift([cell(accepted, drafts, guessed)], {"d"}, {"d"} if is_open else set())
    assert not (plan.opened and plan.closed)
