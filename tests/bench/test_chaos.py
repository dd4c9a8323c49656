"""A campaign's schedule, and which failed requests a fault excuses."""

from collections import Counter

import pytest

from bench.chaos.schedule import Harm, Target, Window, every_kind, schedule, unexcused
from tests.load import Answer

WINDOW = Window(10.0, 20.0, frozenset({"c-1"}), "n-1: engine: kill -9")


def test_a_seed_gives_the_same_faults_and_another_seed_others() -> None:
    assert schedule(1, 1800, 20) == schedule(1, 1800, 20)
    assert schedule(1, 1800, 20) != schedule(2, 1800, 20)


def test_every_kind_comes_before_one_comes_again() -> None:
    kinds = every_kind()
    faults = schedule(3, 20.0 * len(kinds), 20)
    assert Counter((fault.target, fault.harm, fault.lasts_s) for fault in faults) == Counter(
        (kind.target, kind.harm, kind.lasts_s) for kind in kinds
    )


def test_each_process_is_killed_and_paused_and_what_keeps_state_loses_it() -> None:
    kinds = {(kind.target, kind.harm) for kind in every_kind()}
    assert {target for target, harm in kinds if harm is Harm.KILL} == set(Target)
    assert {target for target, harm in kinds if harm is Harm.PAUSE} == set(Target) - {Target.NODE}
    assert {target for target, harm in kinds if harm is Harm.NO_STATE} == {Target.NODE_AGENT, Target.INGRESS_AGENT}


@pytest.mark.parametrize(
    ("request_", "excused"),
    [
        (Answer(began=5, ended=12, cell="c-1", error="cut"), True),
        (Answer(began=12, ended=13, cell="c-1", error="cut"), True),
        (Answer(began=12, ended=13, cell="c-2", error="cut"), False),
        (Answer(began=12, ended=13, cell="", error="status 503"), False),
        (Answer(began=1, ended=9, cell="c-1", error="cut"), False),
        (Answer(began=21, ended=22, cell="c-1", error="cut"), False),
        (Answer(began=12, ended=13, cell="c-2"), True),
    ],
    ids=["from before", "within", "another cell", "no cell", "before", "after", "did not fail"],
)
def test_only_what_was_under_way_on_a_harmed_cell_is_excused(request_: Answer, excused: bool) -> None:
    assert (unexcused([request_], [WINDOW]) == []) is excused


def test_a_window_without_cells_excuses_all() -> None:
    everything = Window(10.0, 20.0, frozenset(), "i-east: haproxy: kill -9")
    assert unexcused([Answer(began=12, ended=13, error="refused")], [everything]) == []
