"""A campaign's schedule, and which failed requests and late passes its faults excuse."""

from collections import Counter
from dataclasses import replace

import pytest

from bench.chaos.campaign import FOREVER, PassSeen, Window, has_trail, late_passes, unexcused
from bench.chaos.schedule import MATRIX, PROCESSES, STATE, Harm, Target, kinds, schedule
from lab.steady_load import Answer

EAST, WEST = "http://127.0.0.1:8080", "http://127.0.0.1:8081"
CELL_HARMED = Window(10.0, 20.0, "n-1: engine: kill -9", cells=frozenset({"c-1"}))
CELLS = {EAST: frozenset({"c-1"}), WEST: frozenset({"c-2"})}


def test_a_seed_gives_the_same_faults_and_another_seed_others() -> None:
    assert schedule(1, 1800, 20) == schedule(1, 1800, 20)
    assert schedule(1, 1800, 20) != schedule(2, 1800, 20)


def test_every_kind_comes_before_one_comes_again() -> None:
    faults = schedule(3, 20.0 * len(MATRIX), 20)
    assert Counter(replace(fault, at_s=0.0) for fault in faults) == Counter(MATRIX)


def test_the_names_of_all_kinds_differ() -> None:
    assert len(set(map(str, MATRIX))) == len(MATRIX)


def test_each_process_is_killed_and_paused_and_kept_from_writing() -> None:
    done = {(kind.target, kind.harm, kind.lasts_s) for kind in MATRIX}
    for process in PROCESSES:
        assert {harm for target, harm, _ in done if target is process} >= {Harm.KILL, Harm.PAUSE, Harm.CANNOT_WRITE}
        assert {lasts_s for target, harm, lasts_s in done if (target, harm) == (process, Harm.PAUSE)} == {5, 15, 60}


def test_whoever_keeps_a_state_file_finds_it_torn_and_missing() -> None:
    done = {(kind.target, kind.state, kind.harm) for kind in MATRIX if kind.state}
    wanted = {(target, state) for target, states in STATE.items() for state in states}
    assert done == {(*one, harm) for one in wanted for harm in (Harm.TORN_STATE, Harm.NO_STATE)}


def test_kinds_are_chosen_by_words_of_their_names_and_by_their_pauses() -> None:
    assert {kind.target for kind in kinds(named="slow clients")} == {Target.HAPROXY}
    assert max(kind.lasts_s for kind in kinds(15.0) if kind.harm is Harm.PAUSE) == 15.0


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
    assert (unexcused([request_], [CELL_HARMED], CELLS) == []) is excused


def test_what_no_cell_answered_is_excused_only_where_none_was_left() -> None:
    nobody = Answer(began=12, ended=13, error="status 503", url=EAST)
    other_cell = Window(11.0, FOREVER, "n-2: engine: kill -9", cells=frozenset({"c-2"}))
    other_ingress = Window(11.0, FOREVER, "i-west: haproxy: pause", ingresses=frozenset({WEST}))
    assert unexcused([nobody], [CELL_HARMED], CELLS) == [nobody]
    assert unexcused([nobody], [CELL_HARMED, other_cell], CELLS) == []
    assert unexcused([nobody], [CELL_HARMED, other_ingress], CELLS) == []
    assert unexcused([nobody], [other_cell], CELLS) == [nobody]
    assert unexcused([nobody], [CELL_HARMED, other_cell], {}) == [nobody]


def test_what_was_sent_to_an_ingress_that_was_harmed_is_excused_and_to_another_not() -> None:
    window = Window(10.0, 20.0, "i-east: haproxy: kill -9", ingresses=frozenset({EAST}))
    refused = [Answer(began=12, ended=13, error="refused", url=url) for url in (EAST, WEST)]
    assert unexcused(refused, [window], CELLS) == refused[1:]


@pytest.mark.parametrize(
    ("seen", "late"),
    [(PassSeen(30.0, 14.0), False), (PassSeen(30.0, 16.0), True), (PassSeen(120.0, 16.0), False)],
    ids=["young enough", "before the harm", "in it"],
)
def test_a_late_pass_is_excused_only_by_harm_to_who_makes_passes(seen: PassSeen, late: bool) -> None:
    windows = [Window(100.0, 130.0, "controller: pause", passes=True), Window(0.0, 50.0, "n-1: engine: kill -9")]
    assert bool(late_passes([seen], windows)) is late


def test_a_trail_names_the_node_or_its_cell() -> None:
    rows = [{"kind": "cell.failed", "node": "", "cell": "c-1"}, {"kind": "cell.ready", "node": "", "cell": "c-2"}]
    assert has_trail(["cell.failed"], ["n-1", "c-1"], rows)
    assert not has_trail(["cell.failed"], ["n-2", "c-2"], rows)


def test_a_stream_that_passed_a_harmed_ingress_on_its_way_to_another_region_is_excused() -> None:
    window = Window(10.0, 20.0, "i-east: haproxy: kill -9", ingresses=frozenset({EAST}))
    passed = Answer(began=12, ended=13, cell=min(CELLS[EAST]), error="cut", url=WEST)
    stayed = Answer(began=12, ended=13, cell=min(CELLS[WEST]), error="cut", url=WEST)
    assert unexcused([passed, stayed], [window], CELLS) == [stayed]
