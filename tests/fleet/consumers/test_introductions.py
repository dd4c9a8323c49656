"""The line before a web process: who comes in, and when the others come again."""

import heapq
import random

from engine_agent.node.connection import come_again_s
from fleet.consumers.introductions import (
    AT_ONCE,
    LATE_BY,
    LATEST_S,
    OF_EACH,
    SUPPOSED_PER_S,
    ComeAgain,
    Introduction,
    Introductions,
)

SERVED_PER_S = 200.0
GIVES_UP_AFTER_S = 10.0


def test_no_credential_holds_the_places_of_others() -> None:
    introductions = Introductions(now=lambda: 0.0)
    own = [introductions.begin("a") for _ in range(OF_EACH + 1)]
    assert [isinstance(each, ComeAgain) for each in own] == [False] * OF_EACH + [True]
    assert isinstance(introductions.begin("b"), Introduction)


def test_an_end_makes_room_once() -> None:
    introductions = Introductions(now=lambda: 0.0)
    first, *_ = [introductions.begin(str(number)) for number in range(AT_ONCE)]
    assert isinstance(first, Introduction)
    first.end()
    first.end()
    assert isinstance(introductions.begin("x"), Introduction)
    assert isinstance(introductions.begin("y"), ComeAgain)


def test_there_is_a_line_until_the_last_who_was_sent_away_must_have_come_again() -> None:
    now = [0.0]
    introductions = Introductions(now=lambda: now[0])
    under_way = [introductions.begin(str(number)) for number in range(AT_ONCE)]
    told = introductions.begin("x")
    assert isinstance(told, ComeAgain)
    for each in under_way:
        assert isinstance(each, Introduction)
        each.end()
    assert introductions.has_line
    now[0] = LATE_BY + 0.1
    assert not introductions.has_line


def test_one_credential_makes_no_line() -> None:
    introductions = Introductions(now=lambda: 0.0)
    for _ in range(2 * OF_EACH):
        introductions.begin("a")
    assert not introductions.has_line


def test_each_that_is_sent_away_gets_a_later_place_and_none_waits_for_ever() -> None:
    introductions = Introductions(now=lambda: 0.0)
    for number in range(AT_ONCE):
        introductions.begin(str(number))
    waits = [introductions.begin("x") for _ in range(10_000)]
    seconds = [wait.after_s for wait in waits if isinstance(wait, ComeAgain)]
    assert seconds[:2] == [1 / SUPPOSED_PER_S, 2 / SUPPOSED_PER_S]
    assert seconds == sorted(seconds)
    assert seconds[-1] == LATEST_S


def test_a_fleet_that_comes_at_once_is_in_soon_and_nobody_gives_up_waiting() -> None:
    """5,000 agents within a second before a process that introduces 200 a second."""
    crowd = Crowd(agents=5000, seed=7)
    crowd.run()
    assert len(crowd.served_after_s) == 5000
    assert max(crowd.waited_s) < GIVES_UP_AFTER_S
    assert max(crowd.served_after_s) < 2 * 5000 / SERVED_PER_S
    assert crowd.tries < 5 * 5000


class Crowd:
    """Agents on virtual time before a process that takes a fixed time for each introduction, one after the other."""

    def __init__(self, agents: int, seed: int) -> None:
        self.now, self.tries, self._free_at = 0.0, 0, 0.0
        self.waited_s: list[float] = []
        self.served_after_s: list[float] = []
        self._draw = random.Random(seed)
        self._introductions = Introductions(now=lambda: self.now)
        self._events: list[tuple[float, int, Introduction | None]] = [
            (self._draw.random(), agent, None) for agent in range(agents)
        ]
        heapq.heapify(self._events)

    def run(self) -> None:
        while self._events:
            self.now, agent, introduction = heapq.heappop(self._events)
            if introduction is not None:
                introduction.end()
                self.served_after_s.append(self.now)
            else:
                self._try(agent)

    def _try(self, agent: int) -> None:
        self.tries += 1
        answer = self._introductions.begin(str(agent))
        if isinstance(answer, Introduction):
            self._free_at = max(self.now, self._free_at) + 1 / SERVED_PER_S
            self.waited_s.append(self._free_at - self.now)
            heapq.heappush(self._events, (self._free_at, agent, answer))
        else:
            stated = str(max(1, round(answer.after_s)))
            heapq.heappush(self._events, (self.now + come_again_s(stated, self._draw.random()), agent, None))
