"""The usage event is taken out of a stream, and nothing else."""

from hypothesis import given
from hypothesis import strategies as st

from engine_agent.proxy.rewrite import UsageEventFilter

TEXT = b'data: {"choices":[{"delta":{"content":"say \\"usage\\": {}"}}]}\n\n'
WITH_NULL = b'data: {"choices":[{"text":"a"}],"usage":null}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":2,"completion_tokens":9}}\n\n'
SPACED = b'data: {"choices": [], "usage": {"prompt_tokens": 2}}\n\n'
DONE = b"data: [DONE]\n\n"


def shown(stream: bytes, sizes: list[int]) -> bytes:
    hider, pieces, at, turn = UsageEventFilter(), [], 0, 0
    while at < len(stream):
        size = sizes[turn % len(sizes)]
        pieces.append(hider.filter(stream[at : at + size], complete=at + size >= len(stream)))
        at, turn = at + size, turn + 1
    return b"".join(pieces)


@given(st.lists(st.sampled_from([TEXT, WITH_NULL]), max_size=4), st.lists(st.integers(1, 90), min_size=1))
def test_however_the_bytes_are_cut_only_the_usage_event_is_missing(events: list[bytes], sizes: list[int]) -> None:
    for usage in (USAGE, SPACED, b""):
        assert shown(b"".join(events) + usage + DONE, sizes) == b"".join(events) + DONE


def test_whole_events_pass_at_once_and_the_beginning_of_one_waits_for_its_end() -> None:
    hider = UsageEventFilter()
    assert hider.filter(TEXT, complete=False) == TEXT
    assert hider.filter(TEXT + USAGE[:10], complete=False) == TEXT
    assert hider.filter(USAGE[10:], complete=False) == b""
    assert hider.filter(DONE, complete=True) == DONE


def test_a_stream_with_other_line_ends_passes_as_it_is() -> None:
    event = b'data: {"choices":[{"text":"a"}]}\r\n\r\n'
    assert UsageEventFilter().filter(event, complete=False) == event


def test_what_never_ends_is_not_held_for_ever() -> None:
    hider = UsageEventFilter()
    long = b"x" * 600_000
    assert hider.filter(long, complete=False) == b""
    assert hider.filter(long, complete=False) == long + long


def test_the_end_of_a_stream_shows_what_was_held() -> None:
    assert UsageEventFilter().filter(b"data: {", complete=True) == b"data: {"
