"""How the relay keeps packets, and loses them."""

import os
from collections.abc import Iterator
from random import Random

import pytest

from lab.hosts import relay
from lab.hosts.conditions import Slowness
from lab.hosts.relay import DelayLine, Orders

FRAME = bytes(26) + bytes(8) + b"frame "


def test_a_packet_leaves_after_its_delay_by_the_router_that_it_came_from() -> None:
    line = DelayLine(lambda _: Slowness(0.03), Random(1))
    line.take(1, FRAME, 10.0)

    assert line.wait_s(10.01) == pytest.approx(0.02)
    assert list(line.due(10.029)) == []
    assert list(line.due(10.031)) == [(1, FRAME)]
    assert line.wait_s(10.031) is None


def test_packets_of_one_path_stay_in_order_and_quicker_ones_overtake() -> None:
    delays = iter([0.03, 0.03, 0.01])
    line = DelayLine(lambda _: Slowness(next(delays)), Random(1))
    for number in range(3):
        line.take(0, FRAME + bytes([number]), 5.0)

    assert [frame[-1] for _, frame in line.due(6.0)] == [2, 0, 1]


def test_the_share_that_is_lost_is_lost() -> None:
    line = DelayLine(lambda _: Slowness(0.0, 0.2), Random(1))
    for _ in range(5000):
        line.take(0, FRAME, 0.0)

    assert 900 < 5000 - len(list(line.due(0.0))) < 1100


def test_a_full_queue_loses_what_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "MOST_HELD", 2)
    line = DelayLine(lambda _: Slowness(1.0), Random(1))
    for _ in range(3):
        line.take(0, FRAME, 0.0)

    assert len(list(line.due(2.0))) == 2


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def test_the_newest_whole_order_counts(pipe: tuple[int, int]) -> None:
    orders = Orders(pipe[0])

    os.write(pipe[1], b"one\ntwo\nthr")
    assert orders.read() == "two"
    os.write(pipe[1], b"ee")
    assert orders.read() == ""
    os.write(pipe[1], b"\n")
    assert orders.read() == "three"
