"""A request body on its way: framing, and sending it again."""

import pytest

from engine_agent.proxy.upload import Upload
from engine_agent.proxy.wire import RequestHead


def an_upload(*, length: int | None, chunked: bool, keep_limit_bytes: int = 100) -> Upload:
    return Upload(RequestHead(b"POST", b"/v1/x", [], True, True, length, chunked, False, b"i"), keep_limit_bytes)


def framing_and_body(wire: bytes) -> tuple[bytes, bytes]:
    head, _, body = wire.partition(b"\r\n\r\n")
    return head.rpartition(b"\r\n")[2], body


def test_a_body_that_is_complete_gets_a_length_however_it_came() -> None:
    for length, chunked in ((2, False), (None, True)):
        upload = an_upload(length=length, chunked=chunked)
        assert upload.add(b"{}", complete=True) == b""
        assert framing_and_body(upload.opening(b"e")) == (b"content-length: 2", b"{}")


def test_a_body_with_a_length_is_passed_on_as_it_comes() -> None:
    upload = an_upload(length=4, chunked=False)
    upload.add(b"ab", complete=False)
    assert framing_and_body(upload.opening(b"e")) == (b"content-length: 4", b"ab")
    assert upload.add(b"cd", complete=True) == b"cd"


def test_a_chunked_body_is_passed_on_in_chunks() -> None:
    upload = an_upload(length=None, chunked=True)
    upload.add(b"", complete=False)
    assert framing_and_body(upload.opening(b"e")) == (b"transfer-encoding: chunked", b"")
    assert upload.add(b"ab", complete=False) == b"2\r\nab\r\n"
    assert upload.add(b"", complete=True) == b"0\r\n\r\n"


def test_a_request_without_a_body_has_no_framing() -> None:
    upload = an_upload(length=None, chunked=False)
    upload.add(b"", complete=True)
    assert framing_and_body(upload.opening(b"e")) == (b"x-request-id: i", b"")


def test_a_short_body_can_be_sent_again_with_what_came_since() -> None:
    upload = an_upload(length=4, chunked=False)
    upload.add(b"ab", complete=False)
    upload.opening(b"e")
    upload.add(b"c", complete=False)
    assert upload.repeatable
    upload.rewind()
    assert upload.add(b"d", complete=True) == b""
    assert framing_and_body(upload.opening(b"e")) == (b"content-length: 4", b"abcd")


def test_a_long_body_is_forgotten_once_it_is_on_its_way() -> None:
    upload = an_upload(length=200, chunked=False)
    upload.add(b"x" * 150, complete=False)
    assert upload.opening(b"e").endswith(b"x" * 150)
    assert not upload.repeatable
    with pytest.raises(ValueError, match="forgotten"):
        upload.opening(b"e")
