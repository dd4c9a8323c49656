"""A request body on its way: framing, what it gains, and sending it again."""

import pytest

from engine_agent.cell_proxy.upload import Upload
from engine_agent.cell_proxy.wire import RequestHead


def an_upload(*, length: int | None, chunked: bool, repeat_limit_bytes: int = 100) -> Upload:
    return Upload(RequestHead(b"POST", b"/v1/x", [], True, True, length, chunked, False, b"i"), repeat_limit_bytes)


def framing_and_body(wire: bytes) -> tuple[bytes, bytes]:
    head, _, body = wire.partition(b"\r\n\r\n")
    return head.rpartition(b"\r\n")[2], body


def test_a_body_gets_a_length_however_it_came() -> None:
    for length, chunked in ((4, False), (None, True)):
        upload = an_upload(length=length, chunked=chunked)
        upload.add(b"{ ", complete=False)
        upload.add(b" }", complete=True)
        assert framing_and_body(upload.opening(b"e")) == (b"content-length: 4", b"{  }")


def test_a_request_without_a_body_has_no_framing() -> None:
    upload = an_upload(length=None, chunked=False)
    upload.add(b"", complete=True)
    assert framing_and_body(upload.opening(b"e")) == (b"x-request-id: i", b"")


def test_a_short_body_can_be_sent_again_with_what_it_gains() -> None:
    upload = an_upload(length=7, chunked=False)
    upload.add(b'{"a":1}', complete=True)
    upload.members = b'"b":2'
    assert upload.repeatable
    for _ in range(2):
        assert framing_and_body(upload.opening(b"e")) == (b"content-length: 13", b'{"a":1,"b":2}')
    assert upload.whole() == b'{"a":1}'


def test_a_long_body_is_released_once_it_is_on_its_way() -> None:
    upload = an_upload(length=200, chunked=False)
    upload.add(b"x" * 200, complete=True)
    assert not upload.repeatable
    assert upload.opening(b"e").endswith(b"x" * 200)
    with pytest.raises(ValueError, match="released"):
        upload.opening(b"e")
