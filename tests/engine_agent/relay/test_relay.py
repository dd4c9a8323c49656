"""The relay with scripted cells: what a client gets when a cell dies, leaves, stalls or lies."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from engine_agent.protocol.continuation import broken_mark, prompt_mark, tokens_mark
from engine_agent.protocol.ingress_messages import RefusedAccount
from engine_agent.relay import continuable, server
from tests.engine_agent.fake_control_plane import eventually
from tests.engine_agent.relay.rig import (
    CHAT,
    PROMPT,
    WORDS,
    Request,
    Rig,
    cell,
    chunked,
    event,
    head,
    refusing,
    relaying,
    words_of,
)

FAREWELL = b'data: {"error": {"code": "engine_died"}}\n\n'


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(continuable, "AGAIN_AFTER_S", 0.01)
    monkeypatch.setattr(server, "SWEEP_S", 0.02)


def play(folder: Path, *cells: Any, then: Callable[[Rig], Awaitable[None]]) -> None:
    async def run() -> None:
        async with relaying(folder, *cells) as rig:
            await then(rig)

    asyncio.run(run())


def test_an_undisturbed_stream_loses_its_marks_and_nothing_else(tmp_path: Path) -> None:
    async def check(rig: Rig) -> None:
        answer = await rig.ask()
        whole = b"".join(event(number).partition(b"\n")[2] for number in range(len(WORDS)))
        assert answer.content == whole + b"data: [DONE]\n\n"
        assert "x-switchyard-version" not in answer.headers
        assert rig.requests[0].headers["x-switchyard-continuation"] == "on"
        assert rig.counts == {"requests": 1, "open": rig.counts["open"], "kept_bytes": 0, "relayed": 1, "repeated": 0}

    play(tmp_path, cell("a"), then=check)


@pytest.mark.parametrize("upto", [1, 3, 7])
@pytest.mark.parametrize("ending", [b"", broken_mark("engine_died") + FAREWELL])
def test_a_stream_continues_at_another_cell(tmp_path: Path, upto: int, ending: bytes) -> None:
    async def check(rig: Rig) -> None:
        answer = await rig.ask()
        assert words_of(answer.content) == WORDS
        assert b"error" not in answer.content
        assert b'"created": 2' not in answer.content, "times are those of the first run"
        again = rig.requests[1]
        assert again.groups == [[number] for number in range(upto)]
        assert again.headers["x-switchyard-replayed"] == str(upto)
        assert (again.headers["x-switchyard-avoided"], again.headers["x-switchyard-version"]) == ("a", "1")
        assert again.headers["x-switchyard-pool"] == "pool.demo"
        why = "engine_died" if ending else "connection_lost"
        assert rig.counts[f"continued:{why}"] == 1
        counted = again.headers.get("x-switchyard-replay-counted")
        assert counted == (str(upto) if ending else None), "a cell that dies with its proxy counts nothing"

    play(tmp_path, cell("a", upto, ending=ending), cell("b", created=2), then=check)


def test_a_stream_continues_several_times_and_then_ends(tmp_path: Path) -> None:
    async def check(rig: Rig) -> None:
        assert await rig.text() == WORDS
        assert len(rig.requests) == 4
        assert not rig.failed

    async def lost(rig: Rig) -> None:
        answer = await rig.ask()
        assert words_of(answer.content) == WORDS[:5]
        assert b'"code":"attempts"' in answer.content
        assert rig.counts["cut:attempts"] == 1

    dying = [cell(f"c{number}", number) for number in (1, 2, 3)]
    play(tmp_path, *dying, cell("d"), then=check)
    play(tmp_path, cell("b", 2), cell("c", 3), cell("d", 4), cell("e", 5), cell("f"), then=lost)


def test_refusals_are_tried_again_until_a_cell_is_free(tmp_path: Path) -> None:
    async def check(rig: Rig) -> None:
        assert await rig.text() == WORDS
        assert rig.counts["refused:no_cell"] == 2
        attempts = [each.headers["x-switchyard-attempt"] for each in rig.requests]
        assert attempts == ["short-1", "short-1-0", "short-1-1", "short-1-1"], "HAProxy sends a 425 elsewhere"

    play(tmp_path, cell("a", 2), refusing(503), refusing(425), cell("b"), then=check)


def test_a_stream_ends_as_its_cell_ended_it_if_no_engine_continues_it(tmp_path: Path) -> None:
    async def check(rig: Rig) -> None:
        answer = await rig.ask()
        assert words_of(answer.content) == WORDS[:2]
        assert answer.content.endswith(FAREWELL)
        assert (rig.counts["refused:engine_refused"], rig.counts["cut:engine_refused"]) == (3, 1)
        assert rig.failed == [RefusedAccount("demo", 0, "0a1b", "batch", 1)], "its cell has passed the failure on"

    ending = broken_mark("engine_died") + FAREWELL
    play(tmp_path, cell("a", 2, ending=ending), refusing(409), then=check)


def test_only_cells_of_the_same_version_continue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(continuable, "CONTINUES_WITHIN_S", 0.05)

    async def check(rig: Rig) -> None:
        assert words_of((await rig.ask()).content) == WORDS[:2]
        assert rig.counts["cut:no_cell"] == 1

    play(tmp_path, cell("a", 2), cell("b", version="2"), then=check)


def test_a_cell_that_repeats_something_else_does_not_continue(tmp_path: Path) -> None:
    async def other(_request: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(head("liar") + chunked(tokens_mark([99]) + event(0).partition(b"\n")[2] + event(1) + event(2)))

    async def check(rig: Rig) -> None:
        assert await rig.text() == WORDS
        assert rig.counts["refused:diverged"] == 1

    play(tmp_path, cell("a", 2), other, cell("b"), then=check)


def test_a_stream_leaves_a_cell_that_drains(tmp_path: Path) -> None:
    left = asyncio.Event()

    async def leaving(_request: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(head("a") + chunked(b": prompt 3 0\n" + event(0)) + chunked(event(1)))
        writer.write(chunked(b": leaving\n\n"))
        await writer.wait_closed()
        left.set()

    async def check(rig: Rig) -> None:
        assert await rig.text() == WORDS
        assert rig.counts["continued:leaving"] == 1

    play(tmp_path, leaving, cell("b"), then=check)


def test_a_stream_stays_where_it_is_if_no_other_cell_takes_it(tmp_path: Path) -> None:
    async def leaving(_request: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(head("a") + chunked(b": prompt 3 0\n" + event(0)) + chunked(b": leaving\n\n" + event(1)))
        for number in range(2, len(WORDS)):
            writer.write(chunked(event(number)))
            await asyncio.sleep(0.01)
        writer.write(b"0\r\n\r\n")

    async def check(rig: Rig) -> None:
        assert await rig.text() == WORDS
        assert rig.counts["refused:no_cell"] == 1
        assert not any(name.startswith(("continued", "cut")) for name in rig.counts)

    play(tmp_path, leaving, refusing(503), then=check)


def test_a_silent_stream_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(continuable, "STALLED_AFTER_S", 0.1)

    async def stalls(_request: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(head("a") + chunked(b": prompt 3 0\n" + event(0)))
        await writer.wait_closed()

    async def check(rig: Rig) -> None:
        assert await rig.text() == WORDS
        assert rig.counts["continued:stalled"] == 1

    play(tmp_path, stalls, cell("b"), then=check)


def test_each_token_is_counted_by_one_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host without power, an engine that dies, a cell that drains, and a cell whose answer is dropped."""
    monkeypatch.setattr(continuable, "STALLED_AFTER_S", 0.1)
    ending = broken_mark("engine_died") + FAREWELL

    async def powerless(_request: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(head("a") + chunked(b"".join([prompt_mark(PROMPT), event(0), event(1)])))
        await writer.wait_closed()

    async def drains(_request: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(head("c") + chunked(b"".join([prompt_mark(PROMPT), *map(event, range(5)), b": leaving\n\n"])))
        await writer.wait_closed()

    async def lies(_request: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(head("d") + chunked(prompt_mark(PROMPT) + event(1) + event(2) * 9))
        await writer.wait_closed()

    async def check(rig: Rig) -> None:
        assert await rig.text() == WORDS
        sent = [
            (each.headers.get("x-switchyard-replayed"), each.headers.get("x-switchyard-replay-counted"))
            for each in rig.requests
        ]
        assert sent == [(None, None), ("2", None), ("4", "4"), ("4", "4"), ("5", "5"), ("6", "5")]

    cells = powerless, cell("b", 4, ending=ending), lies, drains, cell("e", 6), cell("f")
    play(tmp_path, *cells, then=check)


def test_a_cell_that_keeps_its_stream_counts_it_later(tmp_path: Path) -> None:
    async def stays(_request: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(head("a") + chunked(prompt_mark(PROMPT) + event(0)) + chunked(b": leaving\n\n" + event(1)))
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.close()

    async def check(rig: Rig) -> None:
        assert await rig.text() == WORDS
        assert [each.headers.get("x-switchyard-replay-counted") for each in rig.requests] == [None, "1", None]

    play(tmp_path, stays, refusing(503), cell("b"), then=check)


def test_an_answer_that_is_not_streamed_is_repeated(tmp_path: Path) -> None:
    async def half(_request: Request, writer: asyncio.StreamWriter) -> None:
        named = b"x-switchyard-deployment: demo\r\n"
        writer.write(b"HTTP/1.1 200 OK\r\n%bcontent-length: 10\r\n\r\n12345" % named)
        await writer.drain()
        writer.close()

    async def whole(request: Request, writer: asyncio.StreamWriter) -> None:
        assert "switchyard_continuation" not in request.body
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n1234567890")

    async def check(rig: Rig) -> None:
        assert (await rig.ask(stream=False)).content == b"1234567890"
        assert rig.counts["repeated"] == 1

    play(tmp_path, half, whole, then=check)


@pytest.mark.parametrize(
    ("more", "code"),
    [
        ({"n": 2}, "several_answers"),
        ({"best_of": 2}, "several_answers"),
        ({"prompt": ["a", "b"]}, "several_answers"),
        ({"use_beam_search": True}, "beam_search"),
        ({"echo": True}, "prompt_logprobs"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"prompt_embeds": "x"}, "prompt_embeddings"),
        ({"include": ["message.output_text.logprobs"]}, "logprobs_of_response"),
    ],
)
def test_requests_that_cannot_continue_end_as_without_a_relay(tmp_path: Path, more: Any, code: str) -> None:
    async def check(rig: Rig) -> None:
        answer = await rig.ask(**more)
        assert words_of(answer.content) == WORDS[:2]
        assert answer.content.endswith(FAREWELL)
        assert (len(rig.requests), rig.counts[f"cut:{code}"], rig.counts[f"unable:{code}"]) == (1, 1, 1)
        assert "x-switchyard-continuation" not in rig.requests[0].headers
        assert not rig.failed, "its cell counts the failure"

    play(tmp_path, cell("a", 2, ending=broken_mark("engine_died") + FAREWELL), cell("b"), then=check)


def test_a_seed_continues_at_engines_that_mark_it(tmp_path: Path) -> None:
    async def check(rig: Rig) -> None:
        assert await rig.text(seed=1, temperature=0.5, include=["other"]) == WORDS

    play(tmp_path, cell("a", 2), cell("b"), then=check)


def test_engines_without_marks_end_their_streams_themselves(tmp_path: Path) -> None:
    async def unmarked(_request: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(head("a") + chunked(event(0).partition(b"\n")[2]))
        await writer.drain()
        writer.close()

    async def check(rig: Rig) -> None:
        answer = await rig.ask()
        assert words_of(answer.content) == WORDS[:1]
        assert b'"code":"no_marks"' in answer.content
        assert rig.counts["cut:no_marks"] == 1

    play(tmp_path, unmarked, cell("b"), then=check)


@pytest.mark.parametrize("mark", [b": tokens 1],[2\n", b": tokens \n", b": tokens -,-\n"])
def test_marks_that_are_none_never_reach_another_cell(tmp_path: Path, mark: bytes) -> None:
    async def lies(_request: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(head("a") + chunked(b": prompt 3 0\n" + mark + event(0).partition(b"\n")[2]))
        await writer.drain()
        writer.close()

    async def check(rig: Rig) -> None:
        answer = await rig.ask()
        assert b": tokens" not in answer.content
        assert (len(rig.requests), rig.counts["cut:diverged"]) == (1, 1)

    play(tmp_path, lies, cell("b"), then=check)


def test_endless_marks_take_bounded_memory(tmp_path: Path) -> None:
    async def endless(_request: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(head("a") + chunked(b": prompt 3 0\n" + event(0)))
        for _ in range(40):
            writer.write(chunked(tokens_mark(range(10_000)) + event(1).partition(b"\n")[2]))
            await writer.drain()
        writer.close()

    async def check(rig: Rig) -> None:
        answer = await rig.ask()
        assert b"w1" in answer.content
        assert rig.counts["cut:kept_bytes"] == 1

    play(tmp_path, endless, cell("b"), then=check)


def test_a_client_that_does_not_read_stops_its_cell(tmp_path: Path) -> None:
    sent = 0

    async def endless(_request: Request, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(head("a") + chunked(b": prompt 3 0\n" + event(0)))
        text = event(1) * 100
        while not writer.is_closing():
            writer.write(chunked(text))
            await writer.drain()
            sent += len(text)

    async def check(rig: Rig) -> None:
        _, writer = await asyncio.open_unix_connection(str(tmp_path / "1.sock"), limit=1024)
        body = b'{"model":"demo","stream":true}'
        writer.write(b"POST %b HTTP/1.1\r\nhost: x\r\n" % CHAT.encode())
        writer.write(b"content-length: %d\r\n\r\n%b" % (len(body), body))
        before = -1
        while before != sent:
            before = sent
            await asyncio.sleep(0.1)
        assert 0 < sent < 4 * 1024 * 1024
        writer.transport.abort()

    play(tmp_path, endless, then=check)


def test_a_relay_that_stops_finishes_its_streams(tmp_path: Path) -> None:
    go = asyncio.Event()

    async def slow(_request: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(head("a") + chunked(b": prompt 3 0\n" + event(0)))
        await go.wait()
        for number in range(1, len(WORDS)):
            writer.write(chunked(event(number)))
        writer.write(b"0\r\n\r\n")

    async def check(rig: Rig) -> None:
        running = asyncio.create_task(rig.text())
        await eventually(lambda: rig.requests)
        rig.relay.stopping.set()
        await asyncio.sleep(0)
        go.set()
        assert await running == WORDS

    play(tmp_path, slow, then=check)
