"""The cache log for readers that are near, far behind, or of an earlier process."""

import asyncio

import pytest

from engine_agent.engines.usage_ledger import CacheLog
from engine_agent.protocol.proxy_messages import BlocksRemoved, BlocksStored, CacheCleared, decode_blocks


def test_a_reader_gets_what_is_new_and_one_from_elsewhere_gets_all() -> None:
    log = CacheLog(16)
    happened = (BlocksStored(0, (1, 2)), BlocksStored(2, (3,), "a"))
    log.add(happened)
    whole = log.after("another", 7)
    assert (whole.is_whole, whole.upto, whole.events) == (True, 2, happened)
    log.add((BlocksRemoved((3,)),))
    news = log.after(whole.life, whole.upto)
    assert (news.is_whole, news.upto, news.events) == (False, 3, (BlocksRemoved((3,)),))
    assert log.after(whole.life, 3).events == ()
    assert log.after(whole.life, 99).is_whole, "more than there was: it is not ours"


def test_a_reader_too_far_behind_gets_all_as_it_is() -> None:
    log = CacheLog(16, kept_blocks=4)
    life = log.after("", 0).life
    for block in range(1, 9):
        log.add((BlocksStored(0, (block,)),))
    log.add((BlocksRemoved((1, 2)),))
    late = log.after(life, 1)
    assert late.is_whole
    assert {block for event in late.events if isinstance(event, BlocksStored) for block in event.blocks} == set(
        range(3, 9)
    )


def test_a_whole_list_keeps_who_is_behind_whom() -> None:
    log = CacheLog(16, kept_blocks=3)
    log.add((BlocksStored(0, (1, 2, 3)), BlocksStored(1, (4, 5)), BlocksRemoved((2,))))
    events = log.after("", 0).events
    assert events == (BlocksStored(0, (1,)), BlocksStored(2, (3,)), BlocksStored(1, (4, 5)))


def test_what_was_lost_for_good_empties_the_list() -> None:
    log = CacheLog(16)
    log.add((BlocksStored(0, (1,)),))
    before = log.after("", 0)
    log.forget()
    assert log.after(before.life, before.upto).events == (CacheCleared(),)
    assert log.blocks == frozenset()


@pytest.mark.asyncio
async def test_a_question_waits_for_news_and_a_cache_too_large_is_not_listed() -> None:
    log = CacheLog(16, most_blocks=2)
    known = log.after("", 0)
    asking = asyncio.create_task(log.answer(known.life, known.upto, hold_s=60))
    await asyncio.sleep(0)
    assert not asking.done()
    log.add((BlocksStored(0, (1,), "x"),))
    status, body = await asking
    assert (status, decode_blocks(body).events) == (200, (BlocksStored(0, (1,), "x"),))
    log.add((BlocksStored(1, (2, 3)),))
    assert (await log.answer("", 0))[0] == 404
