"""A question that says what is known is answered when that changes, or after a moment."""

import asyncio

import pytest

from engine_agent.cell_proxy.settings import ProbeTimes
from engine_agent.node.watch import POLL_INTERVAL_S, PROBE_TIMEOUT_S
from engine_agent.protocol import held_questions
from engine_agent.protocol.held_questions import HOLD_S, OVERDUE_S, StateWatch, held_query, limit_s, state_name, wish_of

LONG_S = 60.0


class Owner:
    def __init__(self) -> None:
        self.reason = ""
        self.watch = StateWatch(lambda: state_name(self.reason))

    def become(self, reason: str) -> None:
        self.reason = reason
        self.watch.changed()

    def ask(self, known: str) -> "asyncio.Task[float]":
        return asyncio.create_task(self.watch.hold(held_query(known).removeprefix("?")))


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than any test: what returns was not waited for."""
    monkeypatch.setattr(held_questions, "HOLD_S", LONG_S)


@pytest.mark.asyncio
@pytest.mark.usefixtures("patient")
async def test_who_knows_nothing_or_something_else_is_answered_at_once() -> None:
    owner = Owner()
    assert [await owner.ask(known) for known in ("", state_name("loading"))] == [0.0, 0.0]


@pytest.mark.asyncio
@pytest.mark.usefixtures("patient")
async def test_everybody_who_waits_hears_of_a_change_at_once() -> None:
    owner = Owner()
    asked = [owner.ask(state_name("")) for _ in range(3)]
    await asyncio.sleep(0)  # all three wait
    owner.become("follower 1 is gone")
    for each in asked:
        assert 0 <= await each < LONG_S


@pytest.mark.asyncio
@pytest.mark.usefixtures("patient")
async def test_a_change_back_before_anybody_looked_is_none() -> None:
    owner = Owner()
    asked = owner.ask(state_name(""))
    await asyncio.sleep(0)
    owner.become("busy")
    owner.become("")
    for _ in range(5):
        await asyncio.sleep(0)
    assert not asked.done()
    owner.become("gone")
    await asked


@pytest.mark.asyncio
async def test_nothing_new_is_an_answer_after_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_questions, "HOLD_S", 0.01)
    assert await Owner().ask(state_name("")) > 0


@pytest.mark.parametrize(
    ("query", "wish"),
    [
        ("unless=aa&for_ms=600", ("aa", 0.6)),
        ("unless=aa&for_ms=999999999", ("aa", HOLD_S)),
        ("unless=aa&for_ms=-1", ("aa", 0.0)),
        ("unless=aa&for_ms=\u00b2", ("aa", 0.0)),
        ("unless=aa&for_ms=x", ("aa", 0.0)),
        ("unless=aa", ("aa", 0.0)),
        ("", ("", 0.0)),
    ],
)
def test_nobody_can_have_an_answer_held_for_long(query: str, wish: tuple[str, float]) -> None:
    assert wish_of(query) == wish


def test_silence_is_noticed_as_soon_as_by_asking_often() -> None:
    """See `docs/architecture.md`, the flow of a failure: two slow probes, a second each."""
    times = ProbeTimes()
    assert limit_s("", 1.0) == 1.0
    assert limit_s("aa", 1.0) == HOLD_S + OVERDUE_S
    assert HOLD_S + OVERDUE_S <= POLL_INTERVAL_S + PROBE_TIMEOUT_S
    assert times.health_interval_s + times.health_timeout_s >= HOLD_S + OVERDUE_S
