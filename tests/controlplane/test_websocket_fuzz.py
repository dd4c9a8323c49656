"""Random input through a WebSocket raises nothing, logs no traceback, and is never taken for another message of an
agent. `SWITCHYARD_FUZZ=5000` tries that many of each.
"""

import asyncio
import json
import logging
import os
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from websockets.frames import Frame, Opcode

from engine_agent.protocol.codec import BadMessage, decode_up
from engine_agent.protocol.ingress_messages import IngressReport
from engine_agent.protocol.messages import Fault, Hello, LogTail, Report
from engine_agent.protocol.request_messages import RequestWindow
from tests.controlplane.test_websocket_protocol import HEAD, Echo, Wire, connection

TRIES = int(os.environ.get("SWITCHYARD_FUZZ", "60"))
QUICK = settings(max_examples=TRIES, deadline=None, suppress_health_check=list(HealthCheck), derandomize=TRIES < 1000)

texts = st.sampled_from([b"", b"{}", b"\xff", b"\xed\xa0\x80", b"\x00", b'{"type":"hello"}', b"[" * 900, b"x" * 70_000])
frames = st.builds(
    lambda opcode, data, fin, reserved: Frame(opcode, data, fin, *reserved),
    st.sampled_from(list(Opcode)),
    texts | st.binary(max_size=140),
    st.booleans(),
    st.sampled_from([(False, False, False), (False, False, False), (True, False, False), (False, False, True)]),
)


def as_bytes(frame: Frame, masked: bool) -> bytes:
    """Unlike the library's own, also what the standard forbids."""
    first = frame.opcode | 0x80 * frame.fin | 0x40 * frame.rsv1 | 0x10 * frame.rsv3
    size = len(frame.data)
    length, more = (size, b"") if size < 126 else (126, size.to_bytes(2)) if size < 65_536 else (127, size.to_bytes(8))
    mask = b"\0\0\0\0" if masked else b""
    return bytes([first, length | 0x80 * masked]) + more + mask + bytes(frame.data)


async def feed(pieces: list[bytes], *, greeted: bool) -> tuple[Echo, Wire, list[Any]]:
    """Give a connection these bytes as they come, and its end."""
    application, raised = Echo(), []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: raised.append(context))
    protocol, wire = connection(application)
    if greeted:
        protocol.data_received(b"GET /live HTTP/1.1\r\n" + HEAD + b"\r\n")
        await asyncio.sleep(0)
    for piece in pieces:
        if wire.closed:
            break
        protocol.data_received(piece)
        await asyncio.sleep(0)
    protocol.connection_lost(None)
    for _ in range(5):
        await asyncio.sleep(0)
    return application, wire, raised


class Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture(scope="module")
def logged() -> Iterator[list[logging.LogRecord]]:
    log, handler = logging.getLogger("uvicorn.error"), Records()
    log.addHandler(handler)
    yield handler.records
    log.removeHandler(handler)


@QUICK
@given(st.lists(st.tuples(frames, st.booleans() | st.just(True)), max_size=5), st.integers(0, 9))
def test_frames_of_any_kind_end_in_order(
    logged: list[logging.LogRecord], sent: list[tuple[Frame, bool]], half: int
) -> None:
    pieces = [as_bytes(frame, masked) for frame, masked in sent]
    if pieces and half:
        pieces[-1] = pieces[-1][:-half]
    _, wire, raised = asyncio.run(feed(pieces, greeted=True))
    assert raised == []
    assert wire.sent.startswith(b"HTTP/1.1 101")
    assert [record.getMessage() for record in logged if record.exc_info or record.levelno >= logging.ERROR] == []


paths = st.sampled_from([b"/agents/ws", b"/agents/ws?a=%00", b"/agents%2Fws", b"/live", b"/%00", b"//", b"*"])
values = st.sampled_from(
    [b"", b"Bearer", b"Bearer sw_00000000000000_" + b"5e" * 24, b"\xff\xfe", b"Bearer \x00", b"x" * 9000]
)
names = st.sampled_from([b"authorization", b"authorization", b"upgrade", b"sec-websocket-key", b"host", b"origin"])


@QUICK
@given(paths, st.lists(st.tuples(names, values), max_size=4), st.binary(max_size=30))
def test_heads_of_any_kind_are_answered(
    logged: list[logging.LogRecord], path: bytes, fields: list[tuple[bytes, bytes]], rest: bytes
) -> None:
    lines = b"".join(name + b": " + value + b"\r\n" for name, value in fields)
    _, wire, raised = asyncio.run(
        feed([b"GET " + path + b" HTTP/1.1\r\n" + lines + HEAD + b"\r\n" + rest], greeted=False)
    )
    assert raised == []
    assert wire.sent[9:12] in {b"101", b"400", b"403", b"426", b"429", b"431", b""}, wire.sent[:200]
    assert [record.getMessage() for record in logged if record.exc_info] == []


plain = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=12)
parts = st.recursive(
    plain, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
)
FIELDS = ["id", "kind", "seq", "observed", "load", "health", "samples"]
kinds = st.sampled_from(["hello", "report", "fault", "logs", "requests", "ingress_report", "desired", "", ["report"]])


@pytest.mark.slow
@QUICK
@given(
    kinds | parts,
    st.dictionaries(st.sampled_from(FIELDS), parts),
)
def test_a_message_is_understood_or_refused(kind: Any, fields: dict[str, Any]) -> None:
    text = json.dumps({"type": kind, **fields})
    for frame in (text, text.encode(), text[:-1], text + text, text.encode("utf-16"), b"\xef\xbb\xbf" + text.encode()):
        with suppress(BadMessage):
            assert isinstance(decode_up(frame), Hello | Report | Fault | LogTail | RequestWindow | IngressReport)
