"""Token buckets; credential lookups of unauthenticated connections; the queue of hellos; whether a web process is
behind; and the causes of orders."""

import heapq
import random

import pytest

from engine_agent.node.connection import retry_after_s
from engine_agent.protocol.messages import Cause, Desired
from fleet.agents.consumers.limits import (
    AT_ONCE,
    BEHIND_MOST_S,
    CROWD,
    LATE_BY,
    LATEST_S,
    OF_EACH,
    PACE_OVER_S,
    SETTLES_WITHIN_S,
    SUPPOSED_PER_S,
    UNKNOWN_BURST,
    UNKNOWN_PER_S,
    Backlog,
    CredentialFilter,
    CredentialVerdict,
    Delays,
    HelloQueue,
    HelloSlot,
    PendingCauses,
    RetryLater,
    TokenBucket,
    credential_of,
)
from kernel.secrets import PREFIX_DIGITS


def test_a_burst_is_allowed_and_then_the_rate() -> None:
    bucket = TokenBucket(per_s=2, burst=3, now=0)
    assert [bucket.take(0) for _ in range(4)] == [True, True, True, False]
    assert not bucket.take(0.4)
    assert bucket.take(0.6)


def test_what_weighs_more_takes_more() -> None:
    bucket = TokenBucket(per_s=10, burst=100, now=0)
    assert [bucket.take(0, 60) for _ in range(2)] == [True, False]
    assert bucket.take(2, 60)


def test_what_is_not_used_is_saved_up_to_the_burst_only() -> None:
    bucket = TokenBucket(per_s=10, burst=2, now=0)
    assert [bucket.take(1000) for _ in range(3)] == [True, True, False]


UNKNOWN, KNOWN = "0" * PREFIX_DIGITS, "a" * PREFIX_DIGITS


def credential(prefix: str) -> str:
    return f"sw_{prefix}_{'5e' * 24}"


def credential_filter(at: list[float]) -> CredentialFilter:
    return CredentialFilter(now=lambda: at[0])


@pytest.mark.parametrize(
    "header",
    [
        "",
        "Bearer",
        "Bearer ",
        "Bearer nonsense",
        "Basic YTpi",
        f"Bearer sw_{UNKNOWN}_11",
        f"Bearer {credential(f'{UNKNOWN[:-1]}g')}",
        f"Bearer {credential(UNKNOWN[1:])}",
        f"Bearer {credential(UNKNOWN + '0')}",
        f"Bearer {credential(UNKNOWN)}0",
        f"Bearer {credential(UNKNOWN)}\n",
        f"Bearer {credential(UNKNOWN)} {credential(UNKNOWN)}",
        "Bearer sw_" + "0" * 100_000,
    ],
)
def test_what_is_no_credential_of_ours_is_refused(header: str) -> None:
    assert credential_filter([0.0]).check(header) is CredentialVerdict.REFUSED


def test_a_known_credential_is_looked_up_despite_a_flood_of_unknown_ones() -> None:
    known = credential_filter([0.0])
    known.add_prefixes([KNOWN])
    strangers = [known.check(f"Bearer {credential(f'{number:0{PREFIX_DIGITS}x}')}") for number in range(2000)]
    assert strangers.count(CredentialVerdict.LOOKED_UP) == UNKNOWN_BURST
    assert strangers.count(CredentialVerdict.LATER) == 2000 - UNKNOWN_BURST
    assert known.check(f"bearer  {credential(KNOWN)} ") is CredentialVerdict.LOOKED_UP


def test_a_new_credential_is_looked_up_before_it_is_known_of_and_after_a_flood() -> None:
    at = [0.0]
    fresh = credential_filter(at)
    header = f"Bearer {credential(UNKNOWN)}"
    while fresh.check(header) is CredentialVerdict.LOOKED_UP:
        pass
    at[0] = 1.0
    assert [fresh.check(header) for _ in range(int(UNKNOWN_PER_S) + 1)][-2:] == [
        CredentialVerdict.LOOKED_UP,
        CredentialVerdict.LATER,
    ]


def test_what_is_judged_ahead_takes_no_look_up() -> None:
    ahead = credential_filter([0.0])
    header = f"Bearer {credential(UNKNOWN)}"
    assert {ahead.check(header, counts=False) for _ in range(1000)} == {CredentialVerdict.LOOKED_UP}
    assert ahead.check(header) is CredentialVerdict.LOOKED_UP


def test_the_credential_is_what_stands_behind_the_scheme() -> None:
    assert credential_of(f"BEARER  {credential(UNKNOWN)} ") == credential(UNKNOWN)
    assert credential_of("Basic YTpi") == ""


SERVED_PER_S = 200.0
GIVES_UP_AFTER_S = 10.0


def test_no_credential_holds_the_places_of_others() -> None:
    hello_queue = HelloQueue(now=lambda: 0.0)
    own = [hello_queue.begin("a") for _ in range(OF_EACH + 1)]
    assert [isinstance(each, RetryLater) for each in own] == [False] * OF_EACH + [True]
    assert isinstance(hello_queue.begin("b"), HelloSlot)


def test_an_end_makes_room_once() -> None:
    hello_queue = HelloQueue(now=lambda: 0.0)
    first, *_ = [hello_queue.begin(str(number)) for number in range(AT_ONCE)]
    assert isinstance(first, HelloSlot)
    first.end()
    first.end()
    assert isinstance(hello_queue.begin("x"), HelloSlot)
    assert isinstance(hello_queue.begin("y"), RetryLater)


def test_many_hellos_within_seconds_are_a_crowd() -> None:
    now = [0.0]
    hello_queue = HelloQueue(now=lambda: now[0])
    slots = [hello_queue.begin(str(number)) for number in range(CROWD)]
    before = hello_queue.is_crowded
    slots.append(hello_queue.begin("x"))
    assert (before, hello_queue.is_crowded) == (False, True)
    for slot in slots:
        assert isinstance(slot, HelloSlot)
        slot.end()
    assert hello_queue.is_crowded
    now[0] = PACE_OVER_S
    assert not hello_queue.is_crowded


def test_there_is_a_line_until_the_last_who_was_sent_away_must_have_come_again() -> None:
    now = [0.0]
    hello_queue = HelloQueue(now=lambda: now[0])
    under_way = [hello_queue.begin(str(number)) for number in range(AT_ONCE)]
    told = hello_queue.begin("x")
    assert isinstance(told, RetryLater)
    for each in under_way:
        assert isinstance(each, HelloSlot)
        each.end()
    assert hello_queue.has_waiting
    now[0] = LATE_BY + 0.1
    assert not hello_queue.has_waiting


def test_one_credential_makes_no_line() -> None:
    hello_queue = HelloQueue(now=lambda: 0.0)
    for _ in range(2 * OF_EACH):
        hello_queue.begin("a")
    assert not hello_queue.has_waiting


def test_each_that_is_sent_away_gets_a_later_place_and_none_waits_for_ever() -> None:
    hello_queue = HelloQueue(now=lambda: 0.0)
    for number in range(AT_ONCE):
        hello_queue.begin(str(number))
    waits = [hello_queue.begin("x") for _ in range(10_000)]
    seconds = [wait.after_s for wait in waits if isinstance(wait, RetryLater)]
    assert seconds[:2] == [1 / SUPPOSED_PER_S, 2 / SUPPOSED_PER_S]
    assert seconds == sorted(seconds)
    assert seconds[-1] == LATEST_S


def test_a_fleet_that_comes_at_once_is_in_soon_and_nobody_gives_up_waiting() -> None:
    """5,000 agents within a second at a process that handles 200 hellos a second."""
    crowd = ReconnectingAgents(agents=5000, seed=7)
    crowd.run()
    assert len(crowd.served_after_s) == 5000
    assert max(crowd.waited_s) < GIVES_UP_AFTER_S
    assert max(crowd.served_after_s) < 2 * 5000 / SERVED_PER_S
    assert crowd.tries < 5 * 5000


class ReconnectingAgents:
    """Agents on virtual time at a process that handles hellos one after the other in a fixed time."""

    def __init__(self, agents: int, seed: int) -> None:
        self.now, self.tries, self._free_at = 0.0, 0, 0.0
        self.waited_s: list[float] = []
        self.served_after_s: list[float] = []
        self._draw = random.Random(seed)
        self._hello_queue = HelloQueue(now=lambda: self.now)
        self._events: list[tuple[float, int, HelloSlot | None]] = [
            (self._draw.random(), agent, None) for agent in range(agents)
        ]
        heapq.heapify(self._events)

    def run(self) -> None:
        while self._events:
            self.now, agent, hello_slot = heapq.heappop(self._events)
            if hello_slot is not None:
                hello_slot.end()
                self.served_after_s.append(self.now)
            else:
                self._try(agent)

    def _try(self, agent: int) -> None:
        self.tries += 1
        answer = self._hello_queue.begin(str(agent))
        if isinstance(answer, HelloSlot):
            self._free_at = max(self.now, self._free_at) + 1 / SERVED_PER_S
            self.waited_s.append(self._free_at - self.now)
            heapq.heappush(self._events, (self._free_at, agent, answer))
        else:
            stated = str(max(1, round(answer.after_s)))
            heapq.heappush(self._events, (self.now + retry_after_s(stated, self._draw.random()), agent, None))


LATE = Delays(turned_away=True)


@pytest.mark.parametrize(
    ("delays", "keeps_up"),
    [
        (Delays(), True),
        (Delays(lag_s=1, unanswered_s=1, unstored_s=2), True),
        (Delays(lag_s=2), False),
        (Delays(unanswered_s=3), False),
        (Delays(unstored_s=4), False),
        (LATE, False),
    ],
)
def test_one_long_delay_is_enough(delays: Delays, keeps_up: bool) -> None:
    assert Backlog().keeps_up(delays, 0.0) is keeps_up


def test_it_has_caught_up_once_no_agent_can_still_be_on_its_way() -> None:
    backlog = Backlog()
    assert not backlog.keeps_up(LATE, 100.0)
    assert not backlog.keeps_up(Delays(), 100.0 + SETTLES_WITHIN_S - 1)
    assert not backlog.keeps_up(LATE, 105.0)
    assert not backlog.keeps_up(Delays(), 105.0 + SETTLES_WITHIN_S - 1)
    assert backlog.keeps_up(Delays(), 105.0 + SETTLES_WITHIN_S)
    assert backlog.keeps_up(Delays(), 112.0)


def test_overload_that_comes_again_and_again_is_no_storm() -> None:
    """An attacker may cause it to hide a dead node."""
    backlog = Backlog()
    kept_up = [backlog.keeps_up(LATE if second % 60 < 50 else Delays(), float(second)) for second in range(3600)]
    assert sum(not kept for kept in kept_up) < BEHIND_MOST_S + 0.1 * 3600


def test_overload_that_lasts_is_no_storm() -> None:
    backlog = Backlog()
    kept_up = [backlog.keeps_up(LATE, 100.0 + second) for second in range(200)]
    assert kept_up == [second >= BEHIND_MOST_S for second in range(200)]


ORDER = Desired("n-1", 3, None)
HINT = {"type": "agent.desired", "nodes": ["n-1", "n-2"], "cause": {"request_id": "r-1", "traceparent": "00-a-b-01"}}


def test_the_next_order_carries_its_cause_and_the_one_after_does_not() -> None:
    causes = PendingCauses()
    causes.record(HINT)
    assert causes.attach("n-1", ORDER) == Desired("n-1", 3, None, cause=Cause("r-1", "00-a-b-01"))
    assert causes.attach("n-1", ORDER) == ORDER
    assert causes.attach("n-3", ORDER) == ORDER


def test_hints_without_a_cause_change_nothing() -> None:
    causes = PendingCauses()
    for hint in ({"type": "agent.table", "region": "eu"}, {**HINT, "cause": {}}, {**HINT, "cause": "x"}):
        causes.record(hint)
    assert causes.attach("n-1", ORDER) == ORDER
