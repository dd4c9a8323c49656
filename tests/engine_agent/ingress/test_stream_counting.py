"""Totals of streams over several relays, agents and lives."""

from pathlib import Path

from engine_agent.ingress.stream_counting import FILE, POOLS_PER_REPORT, TURN_S, StreamCounting
from engine_agent.protocol.stream_counts import PoolStreams
from engine_agent.relay.meter import RelayCounts


def read(life: str, **pools: PoolStreams) -> RelayCounts:
    return RelayCounts(life, 1, 0, 0, {}, pools)


def streams(relayed: int, died: int = 0) -> PoolStreams:
    return PoolStreams(relayed, {"engine_died": died} if died else {}, pauses={80: died} if died else {})


def pools_of(counting: StreamCounting) -> dict[str, PoolStreams]:
    report = counting.report(0.0)
    return report.pools if report is not None else {}


def test_counts_of_several_relays_and_lives_add_up(tmp_path: Path) -> None:
    counting = StreamCounting(tmp_path)
    assert counting.report(0.0) is None
    for counts in (read("a", chat=streams(2)), read("b", chat=streams(3, 1)), read("a", chat=streams(2))):
        counting.note(counts)
    assert pools_of(counting) == {"chat": streams(5, 1)}
    counting.note(read("c", chat=streams(1, 1), code=streams(4)))  # the relay `a` died
    assert pools_of(counting) == {"chat": streams(6, 2), "code": streams(4)}


def test_an_agent_that_adopts_relays_counts_only_what_is_new(tmp_path: Path) -> None:
    counting = StreamCounting(tmp_path)
    counting.note(read("a", chat=streams(2, 1)))
    again = StreamCounting(tmp_path)
    again.note(read("a", chat=streams(5, 1)))
    assert pools_of(again) == {"chat": streams(5, 1)}
    first, second = counting.report(0.0), again.report(0.0)
    assert first is not None
    assert second is not None
    assert first.since == second.since


def test_unreadable_totals_begin_anew_under_another_name(tmp_path: Path) -> None:
    before = StreamCounting(tmp_path)
    before.note(read("a", chat=streams(2)))
    (tmp_path / FILE).write_text("{")
    after = StreamCounting(tmp_path)
    after.note(read("a", chat=streams(2)))
    first, second = before.report(0.0), after.report(0.0)
    assert first is not None
    assert second is not None
    assert first.pools == second.pools
    assert first.since != second.since


def test_many_pools_take_turns(tmp_path: Path) -> None:
    counting = StreamCounting(tmp_path)
    names = [f"p{number:04}" for number in range(POOLS_PER_REPORT + 5)]
    counting.note(read("a", **{name: streams(1) for name in names}))
    reports = [counting.report(at * TURN_S) for at in (0, 1, 2)]
    assert [len(each.pools) for each in reports if each is not None] == [POOLS_PER_REPORT, 5, POOLS_PER_REPORT]
