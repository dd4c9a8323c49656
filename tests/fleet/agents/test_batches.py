import asyncio
from collections.abc import Sequence

import pytest

from fleet.agents.consumers.limits import BATCH, Batches

pytestmark = pytest.mark.asyncio


class Calls:
    """Answers each number with its double, and 13 with an error; `may_answer` delays the answers."""

    def __init__(self) -> None:
        self.made: list[list[int]] = []
        self.may_answer = asyncio.Event()
        self.breaks = False

    async def __call__(self, questions: list[int]) -> Sequence[int | Exception]:
        self.made.append(questions)
        await self.may_answer.wait()
        if self.breaks:
            raise OSError("away")
        return [ValueError("13") if each == 13 else 2 * each for each in questions]


async def asked(batches: Batches[int, int], questions: Sequence[int]) -> list[asyncio.Task[int]]:
    tasks = [asyncio.create_task(batches.ask(each)) for each in questions]
    for _ in range(3):  # they start, then the call runs, and all wait
        await asyncio.sleep(0)
    return tasks


async def test_who_asks_during_a_call_shares_the_next_one() -> None:
    calls = Calls()
    batches = Batches(calls)
    first = await asked(batches, [1])
    others = await asked(batches, range(20, BATCH + 23))
    calls.may_answer.set()
    assert await asyncio.gather(*first, *others) == [2, *(2 * each for each in range(20, BATCH + 23))]
    assert [len(each) for each in calls.made] == [1, BATCH, 3]


async def test_questions_soon_after_a_call_share_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleet.agents.consumers.limits.CALLS_APART_S", 1.0)
    monkeypatch.setattr("fleet.agents.consumers.limits.monotonic", lambda: 0.0)
    calls = Calls()
    calls.may_answer.set()
    batches = Batches(calls)
    assert await batches.ask(1) == 2
    assert await asyncio.gather(*await asked(batches, [2]), *await asked(batches, [3])) == [4, 6]
    assert calls.made == [[1], [2, 3]]


async def test_an_error_is_that_of_its_question_or_of_the_whole_call() -> None:
    calls = Calls()
    calls.may_answer.set()
    batches = Batches(calls)
    answers = await asyncio.gather(*(batches.ask(each) for each in (1, 13, 2)), return_exceptions=True)
    assert (answers[0], str(answers[1]), answers[2]) == (2, "13", 4)
    calls.breaks = True
    answers = await asyncio.gather(*(batches.ask(each) for each in (1, 2)), return_exceptions=True)
    assert [str(each) for each in answers] == ["away", "away"]


async def test_who_gave_up_keeps_no_other_from_an_answer() -> None:
    calls = Calls()
    batches = Batches(calls)
    gone, other = await asked(batches, [1, 2])
    gone.cancel()
    calls.may_answer.set()
    assert await other == 4
