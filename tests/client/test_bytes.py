"""Events and callbacks, byte by byte."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.webhooks.planner import signature
from switchyard_client import BadCallback, verify_callback
from switchyard_client.events import SseParser

TEXT = st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), max_size=20)
NOW_S = 1_800_000_000


@given(
    st.lists(st.tuples(TEXT, TEXT.map(lambda text: text.strip())), max_size=5),
    st.sampled_from(["\n", "\r\n", "\r"]),
    st.data(),
)
def test_events_are_the_same_however_their_bytes_are_cut(
    events: list[tuple[str, str]], end: str, data: st.DataObject
) -> None:
    wire = "".join(
        f": a comment{end}" + (f"event: {name}{end}" if name else "") + f"data: {json.dumps(text)}{end}{end}"
        for text, name in events
    ).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(wire)), max_size=8)))
    parser, seen = SseParser(), list[tuple[str, bytes]]()
    for begin, stop in zip([0, *cuts], [*cuts, len(wire)], strict=True):
        seen += parser.feed(wire[begin:stop])
    seen += parser.feed(b"\n")  # a CR at the end waits for what follows
    assert seen == [(name, json.dumps(text).encode()) for text, name in events]


def test_data_of_several_lines_is_one() -> None:
    assert list(SseParser().feed(b"data: {\ndata: }\n\nretry: 5\n\n")) == [("", b"{\n}")]


BODY = json.dumps(
    {"delivery": 3, "event": "async_request.ended", "at": "now", "data": {"id": "ar_1", "status": "done"}}
).encode()


def signed(*, by: str = "whs", at: int = NOW_S) -> dict[str, str]:
    return {"X-Switchyard-Timestamp": str(at), "X-Switchyard-Signature": signature(by, at, BODY)}


def test_a_callback_of_the_fleet_is_believed() -> None:
    request = verify_callback(BODY, signed(), "whs", now=NOW_S + 299)
    assert (request.id, request.status, request.has_ended) == ("ar_1", "done", True)


@pytest.mark.parametrize(
    ("body", "headers", "now", "why"),
    [
        (BODY + b" ", signed(), NOW_S, "does not match"),
        (BODY, signed(by="other"), NOW_S, "does not match"),
        (BODY, signed() | {"X-Switchyard-Timestamp": str(NOW_S + 1)}, NOW_S, "does not match"),
        (BODY, signed(), NOW_S + 301, "signed 301 s ago"),
        (BODY, signed(at=NOW_S + 301), NOW_S, "signed -301 s ago"),
        (BODY, {}, NOW_S, "Timestamp is missing"),
        (BODY, signed() | {"X-Switchyard-Timestamp": "1e9"}, NOW_S, "not a whole number"),
        (BODY, {"X-Switchyard-Timestamp": str(NOW_S)}, NOW_S, "does not match"),
    ],
)
def test_any_other_callback_is_refused(body: bytes, headers: dict[str, str], now: int, why: str) -> None:
    with pytest.raises(BadCallback, match=why):
        verify_callback(body, headers, "whs", now=now)
