"""A campaign's schedule, what its users compare, and which broken connections and late passes its faults excuse."""

from collections import Counter
from itertools import islice

import pytest

from bench.chaos.schedule import (
    EXEMPTIONS,
    HANGS_AFTER_S,
    MATRIX,
    PAUSES_S,
    PROCESSES,
    STATE,
    Fault,
    Harm,
    Target,
    kinds,
    schedule,
)
from bench.chaos.users import Attempt, Outcome, Prompt, Request, orders, prompts
from bench.chaos.verdict import FaultWindow, PassSeen, Window, has_trail, late_passes, unexcused
from engine_agent.ingress.settings import Times

EAST, WEST = "http://127.0.0.1:8080", "http://127.0.0.1:8081"
PROMPT = Prompt("chat", "/chat/completions", {})
HAPROXY_KILLED = FaultWindow(10.0, 10.0, Fault(Target.HAPROXY, Harm.KILL), frozenset({EAST}))


def test_a_seed_gives_the_same_faults_and_another_seed_others() -> None:
    first, again, other = (list(islice(schedule(seed), 90)) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_every_kind_comes_before_one_comes_again() -> None:
    assert Counter(islice(schedule(3), len(MATRIX))) == Counter(MATRIX)


def test_the_names_of_all_kinds_differ() -> None:
    assert len(set(map(str, MATRIX))) == len(MATRIX)


def test_each_process_is_killed_and_paused_and_kept_from_writing() -> None:
    done = {(kind.target, kind.harm, kind.lasts_s) for kind in MATRIX}
    for process in PROCESSES:
        assert {harm for target, harm, _ in done if target is process} >= {Harm.KILL, Harm.PAUSE, Harm.CANNOT_WRITE}
        pauses = {lasts_s for target, harm, lasts_s in done if (target, harm) == (process, Harm.PAUSE)}
        assert pauses == set(PAUSES_S)


def test_whoever_keeps_a_state_file_finds_it_torn_and_missing() -> None:
    done = {(kind.target, kind.state, kind.harm) for kind in MATRIX if kind.state}
    wanted = {(target, state) for target, states in STATE.items() for state in states}
    assert done == {(*one, harm) for one in wanted for harm in (Harm.TORN_STATE, Harm.NO_STATE)}


def test_kinds_are_chosen_by_words_of_their_names_and_by_their_pauses() -> None:
    assert {kind.target for kind in kinds(named="slow clients")} == {Target.HAPROXY}
    assert max(kind.lasts_s for kind in kinds(5.0) if kind.harm is Harm.PAUSE and kind.target in PROCESSES) == 5.0


def test_a_haproxy_counts_as_hanging_as_soon_as_its_agent_kills_it() -> None:
    assert Times().silent_after_s == HANGS_AFTER_S


def test_only_faults_of_an_ingress_may_break_connections() -> None:
    exempt = {kind for each in EXEMPTIONS for kind in each.kinds}
    assert exempt <= {(kind.target, kind.harm) for kind in MATRIX}
    assert not {target for target, _ in exempt} & {Target.LEADER, Target.CELL_PROXY, Target.HOST, Target.CELL}


@pytest.mark.parametrize(
    ("outcome", "repeated_at", "url", "fault", "excused"),
    [
        (Outcome.REPEATED, 11.0, EAST, Fault(Target.HAPROXY, Harm.KILL), True),
        (Outcome.REPEATED, 11.0, EAST, Fault(Target.RELAY, Harm.KILL), True),
        (Outcome.REPEATED, 11.0, EAST, Fault(Target.HAPROXY_WORKER, Harm.PAUSE, 30.0), True),
        (Outcome.REPEATED, 11.0, EAST, Fault(Target.HAPROXY_WORKER, Harm.PAUSE, 5.0), False),
        (Outcome.REPEATED, 11.0, EAST, Fault(Target.LEADER, Harm.KILL), False),
        (Outcome.REPEATED, 11.0, WEST, Fault(Target.HAPROXY, Harm.KILL), False),
        (Outcome.REPEATED, 20.0, EAST, Fault(Target.HAPROXY, Harm.KILL), False),
        (Outcome.CUT, 11.0, EAST, Fault(Target.HAPROXY, Harm.KILL), False),
        (Outcome.FAILED, 11.0, EAST, Fault(Target.HAPROXY, Harm.KILL), False),
        (Outcome.WRONG, 11.0, EAST, Fault(Target.HAPROXY, Harm.KILL), False),
    ],
    ids=[
        "HAProxy",
        "relay",
        "hangs",
        "hangs briefly",
        "engine",
        "another ingress",
        "later",
        "cut",
        "without an answer",
        "another answer",
    ],
)
def test_only_streams_that_passed_what_died_may_have_been_repeated(
    outcome: Outcome, repeated_at: float, url: str, fault: Fault, excused: bool
) -> None:
    attempts = [Attempt(url, 6.0, 200), Attempt(WEST, repeated_at, 200, is_repeat=True)]
    request = Request(PROMPT, 5.0, 30.0, outcome, "error", attempts)
    assert (unexcused([request], [FaultWindow(10.0, 10.0, fault, frozenset({EAST}))]) == []) is excused


def test_a_complete_request_needs_no_excuse() -> None:
    assert unexcused([Request(PROMPT, 5.0, 11.0)], [HAPROXY_KILLED]) == []


def test_each_ingress_is_the_first_of_one_client_and_those_of_its_region_come_next() -> None:
    assert orders({"east": ["e1", "e2"], "west": ["w1", "w2"]}) == [
        ["e1", "e2", "w1", "w2"],
        ["e2", "e1", "w1", "w2"],
        ["w1", "w2", "e1", "e2"],
        ["w2", "w1", "e1", "e2"],
    ]


def test_requests_are_greedy_and_of_every_dialect() -> None:
    made = prompts("m")
    assert {prompt.path for prompt in made} == {"/chat/completions", "/completions", "/responses", "/messages"}
    assert {prompt.body["temperature"] for prompt in made} == {0}
    assert {prompt.is_stream for prompt in made} == {True, False}
    assert len({prompt.name for prompt in made}) == len(made)


@pytest.mark.parametrize(
    ("seen", "late"),
    [(PassSeen(30.0, 14.0), False), (PassSeen(30.0, 16.0), True), (PassSeen(120.0, 16.0), False)],
    ids=["young enough", "before the harm", "in it"],
)
def test_a_late_pass_is_excused_only_by_harm_to_who_makes_passes(seen: PassSeen, late: bool) -> None:
    assert bool(late_passes([seen], [Window(100.0, 130.0, "controller: pause")])) is late


def test_a_trail_names_the_node_or_its_cell() -> None:
    rows = [{"kind": "cell.failed", "node": "", "cell": "c-1"}, {"kind": "cell.ready", "node": "", "cell": "c-2"}]
    assert has_trail(["cell.failed"], ["n-1", "c-1"], rows)
    assert not has_trail(["cell.failed"], ["n-2", "c-2"], rows)
