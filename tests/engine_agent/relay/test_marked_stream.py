"""Streams of every dialect, cut at every event: two runs together give what the first one alone would have given, with
its ids and times."""

import asyncio
import json
import re

import pytest

from engine_agent.protocol.continuation import CONTINUATION_HEADER
from engine_agent.relay.dialects import Dialect, dialect_of
from engine_agent.relay.marked_stream import MOST_EVENT_BYTES, Diverged, MarkedStream, groups_of
from tests.engine_agent.engines.sim.in_process import application
from tests.engine_agent.engines.sim.test_continuing import BODIES, body_of

CHAT = Dialect(b"/v1/chat/completions", (b'"tool_calls"',))


def by_order(answer: bytes) -> bytes:
    """The answer with each id as the number of its first use: an item that only the second run began has its id."""
    names: dict[bytes, bytes] = {}
    return re.sub(
        rb'(?<=_)[0-9a-f]{32}[0-9a-f]*|(?<=")\w+[0-9a-f]{32}[0-9a-f]*(?=")',
        lambda match: names.setdefault(match[0], b"#%d" % len(names)),
        answer,
    )


async def runs_of(name: str) -> tuple[bytes, bytes]:
    """Two runs of a request in different processes at different times: with other ids and times."""
    path, given = BODIES[name]
    async with application() as running:
        answers = []
        for request_id in (b"a", b"b"):
            sent = ((CONTINUATION_HEADER, b"on"), (b"x-request-id", request_id))
            answers.append((await running.send(path, body_of(given), sent=sent))[1])
    later = re.sub(rb'"created(_at)?":\d+', rb'"created\1":7', answers[1])
    return answers[0], later


@pytest.mark.parametrize("name", BODIES)
def test_two_runs_are_one_stream(name: str) -> None:
    first, second = asyncio.run(runs_of(name))
    dialect = dialect_of(BODIES[name][0].encode())
    assert dialect is not None
    whole = re.sub(rb"^: .*\n", b"", first, flags=re.MULTILINE)
    ends = [match.end() for match in re.finditer(rb"\n\n", first)]
    for cut in {*ends, *(end - 3 for end in ends[1:]), *(end + 4 for end in ends[:-1])}:
        run = MarkedStream(dialect)
        shown = run.add(first[:cut])
        again = MarkedStream(dialect, run.events, bytes(run.marks), run.shown)
        for at in range(0, len(second), 700):
            shown += again.add(second[at : at + 700])
        assert by_order(shown) == by_order(whole), cut
        assert again.marks.startswith(run.marks)


def test_a_stream_that_continues_twice_keeps_its_first_ids() -> None:
    first, second = asyncio.run(runs_of("response"))
    dialect = dialect_of(b"/v1/responses")
    assert dialect is not None
    cuts = [match.end() for match in re.finditer(rb"\n\n", first)]
    run = MarkedStream(dialect)
    shown = run.add(first[: cuts[0]])
    run = MarkedStream(dialect, run.events, bytes(run.marks), run.shown)
    shown += run.add(second[: second.index(b"\n\n", len(second) // 2) + 2])
    run = MarkedStream(dialect, run.events, bytes(run.marks), run.shown)
    third = second.replace(b'"created_at":7', b'"created_at":8')
    shown += run.add(third)
    assert set(re.findall(rb'"id":"(resp_\w+)"', shown)) == set(re.findall(rb'"id":"(resp_\w+)"', first))
    assert b'"created_at":8' not in shown
    assert json.loads(shown.rsplit(b"data: ", 1)[1])["type"] == "response.incomplete" or b"response.completed" in shown


def event(text: str, *ids: int) -> bytes:
    return b": tokens %b\ndata: %b\n\n" % (",".join(map(str, ids)).encode(), text.encode())


def test_another_token_in_the_replay_is_noticed() -> None:
    run = MarkedStream(CHAT)
    run.add(event("a", 1) + event("b", 2))
    again = MarkedStream(CHAT, run.events, bytes(run.marks), run.shown)
    with pytest.raises(Diverged):
        again.add(event("a", 1) + event("b", 3) + event("c", 4))


def test_marks_belong_to_whole_events() -> None:
    run = MarkedStream(CHAT)
    assert run.add(event("a", 1) + b": tokens 2\ndata: b") == b"data: a\n\n"
    assert (run.events, groups_of(bytes(run.marks))) == (1, [[1]])


def test_a_mark_of_the_prompt_between_events_is_kept_and_is_no_event() -> None:
    run = MarkedStream(CHAT)
    assert run.add(b"data: created\n\n") == b"data: created\n\n"
    assert run.add(b": prompt 5 abcd\n\n") == b""
    assert (run.events, run.prompt, run.tokens) == (1, b"5:abcd", 0)


def test_comments_of_others_pass_and_are_no_events() -> None:
    run = MarkedStream(CHAT)
    assert run.add(b": keep-alive\n\n" + event("a", 1)) == b": keep-alive\n\ndata: a\n\n"
    assert run.events == 1


def test_text_that_looks_like_a_mark_is_text() -> None:
    run = MarkedStream(CHAT)
    text = r'{"content":"\n: tokens 9\n"}'
    assert run.add(event(text, 1)) == b"data: " + text.encode() + b"\n\n"
    assert groups_of(bytes(run.marks)) == [[1]]


def test_an_endless_event_passes_and_ends_the_continuation() -> None:
    run = MarkedStream(CHAT)
    run.add(event("a", 1))
    shown = b"".join(run.add(b"x" * 65536) for _ in range(MOST_EVENT_BYTES // 65536 + 2))
    assert len(shown) > MOST_EVENT_BYTES
    assert not run.is_whole


def test_what_follows_a_failure_is_kept_for_a_client_that_cannot_continue() -> None:
    run = MarkedStream(CHAT)
    shown = run.add(event("a", 1) + b": broken engine_died\n" + b"data: sorry\n\n" + b"data: [DONE]\n\n")
    assert shown == b"data: a\n\n"
    assert (run.broken, run.farewell) == (b"engine_died", b"data: sorry\n\ndata: [DONE]\n\n")
