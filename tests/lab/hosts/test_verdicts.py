"""What a trial calls wrong: requests that failed, streams that broke off where nothing was done, and restarts."""

from dataclasses import replace
from typing import Any

import pytest

from lab.hosts.load import Stream
from lab.hosts.trials import (
    Harmed,
    count,
    engines,
    other_texts,
    paused,
    restarted,
    spread,
    unexcused,
    wrong_events,
)

HARMED = Harmed(hosts=frozenset({"n1"}), nodes=frozenset({"n-1"}), cells=frozenset({"c1"}))


def stream(**changes: Any) -> Stream:
    usual = {"began": 0.0, "ended": 1.0, "cell": "c2", "host": "i1", "served_in": "east", "tries": 1}
    return Stream("east", **{**usual, **changes})


def test_a_stream_may_break_off_on_a_cell_of_the_host_or_through_it() -> None:
    streams = [stream(), stream(cell="c1", error="broke off"), stream(host="n1", error="broke off")]
    assert unexcused(streams, HARMED) == []
    assert str(count(streams, HARMED)) == (
        "3 streams: 0 failed, 0 broke off elsewhere, 2 broke off on what was harmed, 0 answered at another try, "
        "0 in another region"
    )


def test_a_stream_that_crossed_regions_runs_through_the_ingress_there_as_well() -> None:
    harmed = Harmed(hosts=frozenset({"i3"}), nodes=frozenset({"i-3"}))
    crossed = stream(served_in="west", chosen_by="i-3", error="broke off")
    assert unexcused([crossed], harmed) == []
    assert (count([crossed], harmed).excused, count([crossed], harmed).crossed) == (1, 1)
    by_another = stream(served_in="west", chosen_by="i-4", error="broke off")
    assert unexcused([by_another], harmed) == ["east through i1 on c2 by i-4: broke off"]
    assert count([by_another], harmed).broken == 1
    assert unexcused([stream(cell="", chosen_by="i-3", error="status 503")], harmed) == ["east through i1: status 503"]


def test_a_request_that_nobody_answered_is_wrong_wherever_it_was_sent() -> None:
    failed = stream(cell="", host="n1", tries=6, error="status 503")
    assert unexcused([failed], HARMED) == ["east through n1: status 503"]
    assert count([failed], HARMED).failed == 1


def test_a_stream_of_another_cell_that_broke_off_is_wrong() -> None:
    broken = stream(error="broke off")
    assert unexcused([broken, broken], HARMED) == ["east through i1 on c2: broke off"]
    assert count([broken], HARMED).broken == 1


def test_an_answer_at_another_try_is_counted_and_not_wrong() -> None:
    assert unexcused([stream(tries=2)], HARMED) == []
    assert count([stream(tries=2)], HARMED).later == 1


def test_where_streams_continue_only_those_of_clients_of_the_host_may_break_off() -> None:
    harmed = replace(HARMED, nodes=frozenset({"n-1", "i-3"}), continues=True)
    through = stream(host="n1", error="broke off")
    on_the_cell = stream(cell="c1", error="broke off")
    over_it = stream(served_in="west", chosen_by="i-3", error="broke off")
    assert unexcused([through], harmed) == []
    assert len(unexcused([through, on_the_cell, over_it], harmed)) == 2


def test_each_complete_stream_has_the_text_of_those_before() -> None:
    before, after = stream(text="one two"), stream(ended=9.0, text="one two")
    assert other_texts([before, after, stream(ended=9.0, text="one", error="broke off")], at=2.0) == []
    differs = stream(ended=9.0, text="one one two")
    assert other_texts([before, after, differs], at=2.0) == ["1 of 3 complete streams have another text"]
    assert other_texts([after], at=2.0) == ["there are 0 texts before anything happened"]


def test_pauses_are_those_of_streams_that_ran_on_the_cell_at_the_time() -> None:
    there = stream(cell="c1", began=1.0, ended=9.0, longest_pause_s=4.0)
    others = [replace(there, ended=1.5), replace(there, began=3.0), replace(there, error="broke off"), stream()]
    assert paused([replace(there, longest_pause_s=5.0), there, *others], HARMED, at=2.0) == [4.0, 5.0]


def node(name: str, cell: str | None, generation: int, pid: int | None) -> dict[str, Any]:
    return {"id": name, "cell": cell, "engine": {"generation": generation, "pid": pid}}


@pytest.mark.parametrize(
    ("after", "said"),
    [
        (node("n-2", "c2", 4, 40), []),
        (node("n-2", "c2", 4, 41), ["the engine of c2 on n-2 is no longer process 40 of generation 4"]),
        (node("n-2", "c2", 5, 40), ["the engine of c2 on n-2 is no longer process 40 of generation 4"]),
        (node("n-2", None, 0, None), ["the engine of c2 on n-2 is no longer process 40 of generation 4"]),
    ],
)
def test_other_cells_go_on_in_the_same_processes(after: dict[str, Any], said: list[str]) -> None:
    before = engines([node("n-1", "c1", 4, 40), node("n-2", "c2", 4, 40), node("n-3", None, 0, None)])
    assert restarted(before, engines([after]), HARMED) == said


def test_only_what_was_harmed_may_be_lost_or_restarted() -> None:
    def event(kind: str, node: str = "", cell: str = "") -> dict[str, str]:
        return {"kind": kind, "node": node, "cell": cell, "message": "why"}

    ours = [event("node.lost", "n-1"), event("cell.failed", cell="c1"), event("node.ready", "n-2")]
    assert list(wrong_events(ours, HARMED)) == []
    others = [event("node.lost", "n-2"), event("cell.starting", cell="c2")]
    assert list(wrong_events(others, HARMED)) == ["node.lost: why", "cell.starting: why"]


def test_times_are_said_with_their_spread() -> None:
    assert spread([3.0, 1.0, 2.0]) == "median 2.0 s (1.0 to 3.0 s, of 3)"
    assert spread([]) == "never"
