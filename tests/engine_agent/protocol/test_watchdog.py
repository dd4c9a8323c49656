"""A watcher notices a silent process, and does not mistake its own pause for silence."""

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_agent.node import watch
from engine_agent.node.planning.converge import plan_convergence
from engine_agent.node.planning.node import LIMITS, Membership, NodeSnapshot, RunningProcess, StopProxy
from engine_agent.protocol.messages import Health
from engine_agent.protocol.states import Phase
from engine_agent.protocol.watchdog import AwakeClock, LateWakeUp, Watchdog
from tests.engine_agent.orders import assignment

PATIENCE_S = 10.0
POLL_S = 0.25
TIMEOUT_S = 2.0
STOPS_S = st.sampled_from([0.0, 0.1, 1.0, 2.1, 5.0, 15.0, 60.0, 3600.0])


@dataclass
class Watched:
    """One watchdog and its process, which answers each check unless it `hangs`."""

    hangs: bool = False
    ticks_s: float = 1000.0
    clock: AwakeClock = field(init=False)
    watchdog: Watchdog = field(default_factory=lambda: Watchdog(patience_s=PATIENCE_S))

    def __post_init__(self) -> None:
        self.clock = AwakeClock(lambda: self.ticks_s)

    def look(self, *, stopped_s: float = 0.0, stopped_while_asking: bool = False) -> bool:
        """One pass, after the watcher was stopped for so long. Whether it judges the other to be silent."""
        self.ticks_s += POLL_S + (0.0 if stopped_while_asking else stopped_s)
        if self.watchdog.is_silent(self.clock.now_s()):
            return True
        asked_at_s = self.clock.now_s()
        if self.hangs or stopped_while_asking:
            self.ticks_s += TIMEOUT_S + (stopped_s if stopped_while_asking else 0.0)
            self.watchdog.missed(asked_at_s)
        else:
            self.watchdog.answered()
        return False


@given(st.lists(st.tuples(STOPS_S, st.booleans()), max_size=60))
def test_a_healthy_process_survives_whatever_happens_to_its_watcher(stops: list[tuple[float, bool]]) -> None:
    watched, asking_before = Watched(), False
    for stopped_s, stopped_while_asking in stops:
        asking = stopped_while_asking and not asking_before  # the next question is asked in peace
        assert not watched.look(stopped_s=stopped_s, stopped_while_asking=asking)
        asking_before = asking


@given(st.lists(STOPS_S, max_size=20))
def test_a_process_that_hangs_is_found_within_its_patience_of_looking(stops: list[float]) -> None:
    watched = Watched(hangs=True)
    for stopped_s in stops:
        watched.look(stopped_s=stopped_s)
    looks = next(number for number in range(100) if watched.look())
    assert looks * (POLL_S + TIMEOUT_S) <= PATIENCE_S + 2 * (POLL_S + TIMEOUT_S)


def test_a_process_that_hangs_is_not_judged_by_the_time_before_it_was_asked() -> None:
    watched = Watched(hangs=True)
    assert not watched.look(stopped_s=3600.0)
    assert not watched.look(stopped_s=3600.0)
    assert watched.watchdog.silent_s(watched.clock.now_s()) < PATIENCE_S


def test_an_answer_ends_the_count() -> None:
    watched = Watched(hangs=True)
    while not watched.look():
        continue
    watched.hangs = False
    watched.watchdog.answered()
    assert not watched.look()
    assert watched.watchdog.silent_s(watched.clock.now_s()) == 0.0


@pytest.mark.parametrize("stopped_s", [15.0, 60.0])
def test_an_agent_that_was_stopped_ends_no_cell_proxy_that_missed_one_question(stopped_s: float) -> None:
    ticks = [1000.0]
    clock = AwakeClock(lambda: ticks[0])
    leader = Membership("c-1", 1, 0)
    serving = NodeSnapshot(
        engine=RunningProcess(leader, 10, clock.now_s() - 100.0),
        proxy=RunningProcess(leader, 11, clock.now_s() - 100.0),
        health=Health(ok=True),
        was_ready=True,
        proxy_phase=Phase.SERVE,
    )
    failed = watch.ProbeFailure("no answer within 1 s", is_down=False)
    seen = watch.after_proxy(watch.ProbeResults(), failed, clock.now_s())
    ticks[0] += stopped_s
    node = replace(serving, proxy_silent_since_s=seen.proxy_silent_since_s)
    steps = plan_convergence(assignment(), node, clock.now_s(), LIMITS)
    assert not [step for step in steps if isinstance(step, StopProxy)]


def test_who_wakes_up_late_lets_others_speak_before_it_judges() -> None:
    own = LateWakeUp(grace_s=2.0)
    looks = [0.0, 1.0, 2.0, 2.25, 60.5, 60.75, 62.25, 62.75]
    assert [own.may_enforce(now_s) for now_s in looks] == [False, False, True, True, False, False, False, True]
