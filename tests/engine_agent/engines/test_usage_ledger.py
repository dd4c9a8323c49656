"""The ledger of what an engine computed, around an application that computes nothing."""

import asyncio
import json
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from engine_agent.engines.usage_ledger import (
    KEPT,
    CacheLog,
    Receive,
    Scope,
    Send,
    SequenceTokens,
    UsageLedger,
    added,
    note,
    scoped_salt,
)
from engine_agent.protocol.proxy_messages import (
    COUNTED_APART_PATH,
    EVENTS_PATH,
    READ_PATH,
    USAGE_PATH,
    BlocksStored,
    CountedApart,
    ExchangeUsage,
    decode_blocks,
)

pytestmark = pytest.mark.asyncio


@dataclass
class FakeSequence:
    """One sequence; `is_running` until it is stopped or set."""

    answers: SequenceTokens
    is_running: bool = False

    def tokens(self) -> SequenceTokens:
        return self.answers

    async def stop(self) -> None:
        self.is_running = False


@dataclass
class Engine:
    """An application that begins these sequences and answers when it may."""

    sequences: list[FakeSequence] = field(default_factory=list)
    may_answer: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        for sequence in self.sequences:
            note(sequence)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await self.may_answer.wait()
        await send({"type": "http.response.body", "body": b"x"})


@dataclass
class Answer:
    messages: list[MutableMapping[str, Any]] = field(default_factory=list)

    async def send(self, message: MutableMapping[str, Any]) -> None:
        self.messages.append(message)

    @property
    def status(self) -> int:
        return int(self.messages[0]["status"])

    def json(self) -> Any:
        return json.loads(self.messages[1]["body"])


async def get(app: UsageLedger, path: str, query: str = "", exchange: str = "") -> Answer:
    headers = [(b"x-switchyard-exchange", exchange.encode())] if exchange else []
    answer = Answer()
    scope = {"type": "http", "path": path, "query_string": query.encode(), "headers": headers}
    await app(scope, _nothing, answer.send)
    return answer


async def _nothing() -> MutableMapping[str, Any]:
    return {"type": "http.disconnect"}


def sequence(prompt: str = "p", tokens: int = 10, *, read: bool = True, **more: int) -> FakeSequence:
    return FakeSequence(SequenceTokens(prompt, tokens, read, **more))


def started(engine: Engine, exchange: str = "e1") -> tuple[UsageLedger, "asyncio.Task[Answer]"]:
    ledger = UsageLedger(engine)
    return ledger, asyncio.create_task(get(ledger, "/v1/completions", exchange=exchange))


async def test_a_prompt_counts_once_for_all_its_answers_and_the_engines_counters_more_often() -> None:
    several = [
        sequence("a", 10, cached_tokens=4, completion_tokens=3),
        sequence("a", 10, cached_tokens=9, completion_tokens=2, dropped_tokens=1),
        sequence("b", 20, completion_tokens=1),
        sequence("c", 40, read=False),
    ]
    assert added(each.tokens() for each in several) == (ExchangeUsage(30, 4, 6), CountedApart(10, 1))
    complete = sequence("d", 10, unread_tokens=15)
    assert added([complete.tokens()]) == (ExchangeUsage(10, 0, 0), CountedApart(-15, 0))


async def test_the_answer_says_how_long_its_prompts_are_and_the_usage_can_be_asked_for_afterwards() -> None:
    engine = Engine([sequence(completion_tokens=3), sequence(completion_tokens=5)])
    engine.may_answer.set()
    ledger, answering = started(engine)
    assert (await answering).messages[0]["headers"] == [(b"x-switchyard-prompt-tokens", b"10")]
    assert (await get(ledger, USAGE_PATH, "exchange=e1")).json() == {
        "prompt_tokens": 10,
        "cached_tokens": 0,
        "completion_tokens": 8,
    }
    assert (await get(ledger, COUNTED_APART_PATH)).json() == {"prompt_tokens": 10, "completion_tokens": 0}


async def test_who_asks_while_the_answer_runs_waits_for_its_end() -> None:
    engine = Engine([sequence()])
    ledger, answering = started(engine)
    asking = asyncio.create_task(get(ledger, USAGE_PATH, "exchange=e1"))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not asking.done()
    engine.sequences[0].answers = SequenceTokens("p", 10, True, completion_tokens=7)
    answering.cancel()
    assert (await asking).json()["completion_tokens"] == 7


async def test_what_runs_on_after_its_answer_is_stopped_before_it_is_counted() -> None:
    engine = Engine([sequence(completion_tokens=7)])
    engine.sequences[0].is_running = True
    engine.may_answer.set()
    ledger, answering = started(engine)
    await answering
    assert (await get(ledger, USAGE_PATH, "exchange=e1")).json()["completion_tokens"] == 7
    assert not engine.sequences[0].is_running


@pytest.mark.parametrize("query", ["exchange=other", "", "exchange=e1%00"])
async def test_what_nobody_named_is_not_known(query: str) -> None:
    engine = Engine()
    engine.may_answer.set()
    ledger, answering = started(engine)
    await answering
    assert (await get(ledger, USAGE_PATH, query)).status == 404


async def test_requests_without_a_name_pass_untouched_and_old_ones_are_forgotten() -> None:
    engine = Engine([sequence()])
    engine.may_answer.set()
    ledger = UsageLedger(engine)
    assert (await get(ledger, "/v1/completions")).messages[0]["headers"] == []
    for number in range(KEPT + 1):
        await get(ledger, "/v1/completions", exchange=f"e{number}")
    statuses = [(await get(ledger, USAGE_PATH, f"exchange=e{number}")).status for number in (0, 1, KEPT)]
    assert statuses == [404, 200, 200]


async def test_a_question_whether_a_prompt_is_read_waits_until_it_is() -> None:
    unread = SequenceTokens("p", 10, is_read=False)
    engine = Engine([FakeSequence(unread), FakeSequence(unread)])
    app = UsageLedger(engine)
    asking = asyncio.create_task(get(app, READ_PATH, "exchange=one"))  # it may be here before what it is about
    answering = asyncio.create_task(get(app, "/v1/completions", exchange="one"))
    engine.sequences[0].answers = SequenceTokens("p", 10, is_read=True)
    await asyncio.sleep(0)
    assert not asking.done()
    engine.sequences[1].answers = SequenceTokens("p", 10, is_read=True)
    assert (await asking).status == 200
    engine.may_answer.set()
    await answering
    assert (await get(app, READ_PATH, "exchange=one")).status == 200


async def test_a_prompt_that_is_not_read_for_long_and_one_that_nobody_knows_are_told_apart() -> None:
    engine = Engine([FakeSequence(SequenceTokens("p", 10, is_read=False))])
    app = UsageLedger(engine)
    answering = asyncio.create_task(get(app, "/v1/completions", exchange="one"))
    slow, unknown = await asyncio.gather(get(app, READ_PATH, "exchange=one"), get(app, READ_PATH, "exchange=another"))
    assert (slow.status, unknown.status) == (202, 404)
    engine.may_answer.set()
    await answering


async def test_who_asks_what_is_in_the_cache_is_told_where_that_is_known() -> None:
    engine, cache = Engine(), CacheLog(16)
    assert (await get(UsageLedger(engine), EVENTS_PATH)).status == 404
    cache.add((BlocksStored(0, (7,), "e1"),))
    answer = await get(UsageLedger(engine, cache), EVENTS_PATH, "life=none&after=x")
    assert decode_blocks(answer.messages[1]["body"]).events == (BlocksStored(0, (7,), "e1"),)


async def test_salts_of_one_scope_are_never_those_of_another_whatever_a_client_asks_for() -> None:
    salts: dict[tuple[str, str | None], str | None] = {}

    async def answer(scope: Scope, _receive: Receive, send: Send) -> None:
        of = next(value for name, value in scope["headers"] if name == b"x-switchyard-cache-scope").decode()
        for given in (None, "salt", next(iter(salts.values()), None)):
            salts[of, given] = scoped_salt(given)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    ledger = UsageLedger(answer)
    for of in ("tenant:acme", "tenant:umbrella", "tenant:"):
        headers = [(b"x-switchyard-exchange", b"e"), (b"x-switchyard-cache-scope", of.encode())]
        scope = {"type": "http", "path": "/v1/completions", "query_string": b"", "headers": headers}
        await ledger(scope, _nothing, Answer().send)
    assert salts.pop(("tenant:", None)) is None, "nobody's requests share, as ever"
    assert None not in salts.values()
    assert len(set(salts.values())) == len(salts)
    assert scoped_salt("salt") == "salt", "no scope was answers"
