"""Supervision over minutes of virtual time: the watcher is stopped, wakes up late and cannot start processes, and its
children die and hang. SWITCHYARD_SEEDS=5000 pytest tests/engine_agent/node/planning/test_supervision_over_time.py"""

import os
from dataclasses import dataclass, field, replace
from random import Random

import pytest

from controlplane.embedded.supervisor import LONGEST_S, deaths_in_a_row, wait_before_restart_s
from engine_agent.ingress.supervisor import RestartBackoff
from engine_agent.node import watch
from engine_agent.node.planning.converge import plan_convergence
from engine_agent.node.planning.node import (
    LIMITS,
    Failure,
    Membership,
    NodeSnapshot,
    RunningProcess,
    StartEngine,
    StartProxy,
    StopEngine,
    StopProxy,
    next_in_a_row,
)
from engine_agent.protocol.messages import Health
from engine_agent.protocol.states import Phase
from engine_agent.protocol.watchdog import AwakeClock, Watchdog
from tests.engine_agent.orders import assignment

SEEDS = range(int(os.environ.get("SWITCHYARD_SEEDS", "10")))
LASTS_S = 600.0
LOOK_S = 1.0
STARTS_A_MINUTE = 8
"""Waits of 0, 1, 2, 4, 8, 16 and 30 s, and one more at either end."""
STOPS_S = (5.0, 15.0, 60.0, 3600.0)
MEMBER = Membership("c-1", 1, 0)


@dataclass
class Child:
    """A watched process. `hung_s`: since when, in the watcher's awake time."""

    started_s: float
    hung_s: float | None = None


@dataclass
class Watched:
    """One agent without contact, its engine and its cell proxy, polled each second."""

    chance: Random
    ticks_s: float = 1000.0
    awake: AwakeClock = field(init=False)
    engine: Child | None = None
    proxy: Child | None = None
    seen: watch.ProbeResults = field(default_factory=watch.ProbeResults)
    failures: dict[str, Failure] = field(default_factory=dict)
    died_s: dict[str, float] = field(default_factory=dict)
    starts_s: dict[str, list[float]] = field(default_factory=lambda: {"engine": [], "proxy": []})

    def __post_init__(self) -> None:
        self.awake = AwakeClock(lambda: self.ticks_s)

    def run(self) -> None:
        until_s = self.ticks_s + LASTS_S
        while self.ticks_s < until_s:
            self._let_things_happen()
            self._look()
            self._judge_promises()

    def _let_things_happen(self) -> None:
        """Of the children, and of the one who watches them."""
        now_s = self.awake.now_s()
        if self.engine and self.chance.random() < 0.01:
            self._ended("engine", now_s)
        if self.proxy and self.chance.random() < 0.01:
            self._ended("proxy", now_s)
        if self.proxy and self.proxy.hung_s is None and self.chance.random() < 0.005:
            self.proxy.hung_s = now_s
        self.ticks_s += LOOK_S + (self.chance.choice(STOPS_S) if self.chance.random() < 0.02 else 0.0)

    def _ended(self, kind: str, now_s: float) -> None:
        child = self.engine if kind == "engine" else self.proxy
        assert child is not None
        stably = now_s - child.started_s >= LIMITS.stable_after_s
        in_a_row = next_in_a_row(self.failures.get(kind), stably)
        self.failures[kind] = Failure(MEMBER, f"the {kind} ended", now_s, in_a_row)
        self.died_s[kind] = now_s
        if kind == "engine":
            self.engine = None
        else:
            self.proxy, self.seen = None, watch.without_proxy(self.seen)

    def _look(self) -> None:
        now_s = self.awake.now_s()
        if self.proxy:  # one in fifty questions is lost, as with a pause of a collector
            lost = self.proxy.hung_s is not None or self.chance.random() < 0.02
            failed = watch.ProbeFailure("no answer within 1 s", is_down=False)
            since_s = self.seen.proxy_silent_since_s
            answered = replace(self.seen, proxy_silent_since_s=None, proxy_phase=Phase.SERVE)
            self.seen = watch.after_proxy(self.seen, failed, now_s) if lost else answered
            assert not lost or since_s is None or self.seen.proxy_silent_since_s == since_s
        for step in plan_convergence(assignment(), self._snapshot(), self.awake.now_s(), LIMITS):
            match step:
                case StartEngine():
                    self._start("engine", now_s)
                case StartProxy():
                    self._start("proxy", now_s)
                case StopProxy():
                    assert self.proxy is not None
                    assert self.proxy.hung_s is not None, "a healthy cell proxy was ended"
                    self._ended("proxy", now_s)
                case StopEngine():
                    raise AssertionError("an engine that was well was ended")

    def _start(self, kind: str, now_s: float) -> None:
        assert (self.engine if kind == "engine" else self.proxy) is None, f"a second {kind}"
        self.starts_s[kind].append(now_s)
        child = Child(now_s)
        if kind == "engine":
            self.engine = child
        else:
            self.proxy, self.seen = child, watch.without_proxy(self.seen)
        if self.chance.random() < 0.1:  # the disk is full, the address is taken, …
            self._ended(kind, now_s)
        elif kind == "engine":
            self.failures.pop("engine", None)
            self.died_s.pop("engine", None)
        else:
            self.died_s.pop("proxy", None)

    def _snapshot(self) -> NodeSnapshot:
        def running(child: Child | None, pid: int) -> RunningProcess | None:
            return RunningProcess(MEMBER, pid, child.started_s) if child else None

        return NodeSnapshot(
            engine=running(self.engine, 10),
            proxy=running(self.proxy, 11),
            health=Health(ok=True),
            was_ready=True,
            proxy_phase=self.seen.proxy_phase,
            proxy_silent_since_s=self.seen.proxy_silent_since_s,
            failure=self.failures.get("engine"),
            proxy_failure=self.failures.get("proxy"),
            no_contact_since_s=1000.0,
        )

    def _judge_promises(self) -> None:
        now_s = self.awake.now_s()
        for kind, died_s in self.died_s.items():
            # A proxy is started with its engine and may have to wait for it.
            waits = 2 if kind == "proxy" else 1
            assert now_s - died_s <= waits * (LIMITS.backoff_max_s + 4 * LOOK_S), f"the {kind} stays down"
        hung_s = self.proxy.hung_s if self.proxy else None
        if self.proxy and hung_s is not None:
            patience_s = LIMITS.proxy_silent_s + max(0.0, LIMITS.proxy_start_s - (hung_s - self.proxy.started_s))
            assert now_s - hung_s <= patience_s + 4 * LOOK_S, "a cell proxy that hangs was not found"
        for kind, starts in self.starts_s.items():
            assert sum(now_s - start <= 60.0 for start in starts) <= STARTS_A_MINUTE, f"a storm of starts of the {kind}"


@pytest.mark.parametrize("seed", SEEDS)
def test_a_node_ends_nothing_healthy_and_starts_again_what_died(seed: int) -> None:
    Watched(Random(seed)).run()


@pytest.mark.parametrize("seed", SEEDS)
def test_an_ingress_ends_no_healthy_haproxy_and_starts_a_dead_one_in_time(seed: int) -> None:
    """As `HaproxySupervisor` does at each look: judge by earlier questions, start if it is time, ask."""
    chance, ticks_s = Random(seed), [1000.0]
    awake, watchdog, restarts = AwakeClock(lambda: ticks_s[0]), Watchdog(patience_s=10.0), RestartBackoff()
    alive, hung_s, died_s, starts = False, None, awake.now_s(), list[float]()
    while ticks_s[0] < 1000.0 + LASTS_S:
        ticks_s[0] += 0.25 + (chance.choice(STOPS_S) if chance.random() < 0.005 else 0.0)
        now_s = awake.now_s()
        if alive and chance.random() < 0.01:
            alive, died_s = False, now_s
        if alive and hung_s is None and chance.random() < 0.001:
            hung_s = now_s
        if alive and watchdog.is_silent(now_s):
            assert hung_s is not None, "a healthy HAProxy was killed"
            alive, died_s = False, now_s
        if not alive:
            restarts.note_exit(ticks_s[0], chance.random())
            if restarts.may_start(ticks_s[0]):
                restarts.note_start(ticks_s[0])
                starts.append(ticks_s[0])
                watchdog.answered()
                alive, hung_s = chance.random() < 0.9, None
            assert now_s - died_s <= 60.0, "it stays down"
            continue
        if hung_s is None and chance.random() < 0.99:
            watchdog.answered()
        else:
            ticks_s[0] += 2.0
            watchdog.missed(now_s)
        assert hung_s is None or now_s - hung_s <= 20.0, "one that hangs was not found"
        assert sum(ticks_s[0] - start <= 60.0 for start in starts) <= 60, "a storm of starts"


@pytest.mark.parametrize("seed", SEEDS)
def test_the_launcher_starts_a_dead_service_within_its_longest_wait_and_never_in_a_storm(seed: int) -> None:
    chance, now_s, deaths, starts = Random(seed), 0.0, 0, list[float]()
    while now_s < LASTS_S:
        starts.append(now_s)
        ran_s = chance.choice([0.0, 0.1, 5.0, 29.0, 31.0])
        deaths = deaths_in_a_row(deaths, ran_s)
        wait_s = wait_before_restart_s(deaths)
        assert 0 < wait_s <= LONGEST_S
        now_s += ran_s + wait_s
        assert sum(now_s - start <= 60.0 for start in starts) <= 12
