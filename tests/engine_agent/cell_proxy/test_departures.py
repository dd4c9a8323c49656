"""Streams leave a cell that drains a few at a time, and try again if they stayed."""

import asyncio

import pytest

from engine_agent.cell_proxy import departures
from engine_agent.cell_proxy.departures import Departures
from tests.engine_agent.fake_control_plane import eventually


class Stream:
    def __init__(self, *, can_leave: bool = True) -> None:
        self.is_leaving = False
        self.told = 0
        self._can_leave = can_leave

    def leave(self) -> None:
        self.told += 1
        self.is_leaving = self._can_leave


def test_a_few_streams_pause_together_and_the_next_follow() -> None:
    leaving, streams = Departures(), [Stream() for _ in range(40)]
    leaving.add(*streams)
    assert [each.told for each in streams] == [1] * departures.AT_ONCE + [0] * (40 - departures.AT_ONCE)
    for stream in streams:
        leaving.ended(stream)
    assert [each.told for each in streams] == [1] * 40


def test_requests_that_cannot_leave_take_no_place() -> None:
    leaving, streams = Departures(), [Stream(can_leave=False) for _ in range(40)]
    leaving.add(*streams, *streams)
    assert [each.told for each in streams] == [2] * 40


def test_a_cell_that_serves_again_keeps_its_streams() -> None:
    leaving, streams = Departures(), [Stream() for _ in range(40)]
    leaving.add(*streams)
    leaving.stop()
    leaving.ended(streams[0])
    assert sum(each.told for each in streams) == departures.AT_ONCE


def test_a_stream_that_stays_is_told_again_and_gives_its_place_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(departures, "AT_ONCE", 1)
    monkeypatch.setattr(departures, "AGAIN_AFTER_S", 0.01)

    async def stay() -> None:
        leaving, stays, goes = Departures(), Stream(), Stream()
        leaving.add(stays, goes)
        for told in (2, 3):
            stays.is_leaving = False
            leaving.stayed(stays)
            assert goes.told == 1
            leaving.ended(goes)
            await eventually(lambda told=told: stays.told == told)  # type: ignore[misc]
        leaving.ended(stays)
        leaving.add(stays)
        assert stays.told == 4

    asyncio.run(stay())
