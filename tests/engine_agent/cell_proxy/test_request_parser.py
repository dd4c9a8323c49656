"""Bytes of a client become requests or a refusal, in pieces of any size."""

import pytest

from engine_agent.cell_proxy.refusal import Refusal
from engine_agent.cell_proxy.request_parser import RequestParser
from engine_agent.cell_proxy.settings import Limits
from engine_agent.cell_proxy.wire import (
    Headers,
    RequestHead,
    ResponseHead,
    chunk,
    refusal_response,
    request_head,
    response_bytes,
    response_head,
)

LIMITS = Limits(max_body_bytes=100, max_head_bytes=1000)
GOOD = b"POST /v1/x?q HTTP/1.1\r\nX-Request-Id: me\r\nContent-Length: 2\r\n\r\n{}"


def read(*pieces: bytes) -> RequestParser:
    reader = RequestParser(LIMITS)
    for piece in pieces:
        reader.feed(piece)
    return reader


@pytest.mark.parametrize("cut", [1, 2, 7, len(GOOD)])
def test_a_request_is_the_same_however_it_is_cut(cut: int) -> None:
    (incoming,) = read(*(GOOD[at : at + cut] for at in range(0, len(GOOD), cut))).queue
    head = incoming.head
    assert (head.method, head.target, head.path, head.request_id) == (b"POST", b"/v1/x?q", b"/v1/x", b"me")
    assert (incoming.complete, incoming.take(), incoming.delivered) == (True, b"{}", True)


@pytest.mark.parametrize(
    ("pieces", "status"),
    [
        ([b"NONSENSE\r\n\r\n"], 400),
        ([b"POST /v1/x HTTP/1.1\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n"], 400),
        ([b"POST /v1/x HTTP/1.1\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nxx"], 400),
        ([b"POST /v1/x HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n"], 400),
        ([b"GET /v1/x HTTP/1.1\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n"], 400),
        ([b"CONNECT x:1 HTTP/1.1\r\n\r\n"], 400),
        ([b"GET /v1/x HTTP/1.1\r\nlong: " + b"x" * 1001 + b"\r\n\r\n"], 431),
        ([b"GET /" + b"x" * 1001 + b" HTTP/1.1\r\n\r\n"], 431),
        ([b"GET /v1/x HTTP/1.1\r\nlong: ", *[b"x" * 300] * 4], 431),
        ([b"POST /v1/x HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n0\r\ntrailer: ", *[b"x" * 300] * 4], 431),
    ],
)
def test_input_that_is_wrong_or_endless_breaks_off(pieces: list[bytes], status: int) -> None:
    broken = read(*pieces).broken
    assert broken is not None
    assert broken.status == status


def test_a_body_that_is_or_will_be_too_long_is_marked_and_not_kept() -> None:
    announced = read(b"POST / HTTP/1.1\r\ncontent-length: 101\r\n\r\n").queue[0]
    chunked = read(b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n65\r\n" + b"x" * 101 + b"\r\n").queue[0]
    assert announced.too_large
    assert chunked.too_large
    assert chunked.take() == b""


def test_requests_in_one_read_keep_their_order_and_what_follows_is_judged_after_them() -> None:
    reader = read(GOOD + GOOD + b"NONSENSE\r\n\r\n")
    assert [incoming.complete for incoming in reader.queue] == [True, True]
    assert reader.broken is not None


@pytest.mark.parametrize("given", [b"x" * 129, b"caf\xc3\xa9"])
def test_an_odd_request_id_is_replaced(given: bytes) -> None:
    (incoming,) = read(b"GET /v1/x HTTP/1.1\r\nx-request-id: " + given + b"\r\n\r\n").queue
    assert len(incoming.head.request_id) == 32


@pytest.mark.parametrize(
    ("head", "keep_alive"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", True),
        (b"GET / HTTP/1.1\r\nconnection: close\r\n\r\n", False),
        (b"GET / HTTP/1.0\r\nconnection: keep-alive\r\n\r\n", False),
    ],
)
def test_only_http_1_1_is_kept_alive(head: bytes, keep_alive: bool) -> None:
    assert read(head).queue[0].head.keep_alive is keep_alive


def a_request(headers: Headers) -> RequestHead:
    return RequestHead(b"POST", b"/v1/x?a=1", headers, True, True, 2, False, False, b"id-1")


def an_answer(headers: Headers) -> ResponseHead:
    return ResponseHead(200, b"OK", headers, None, True, True)


def test_headers_of_the_connection_stay_on_their_side() -> None:
    headers = [
        (b"host", b"ingress"),
        (b"connection", b"keep-alive, X-Private"),
        (b"x-private", b"1"),
        (b"transfer-encoding", b"chunked"),
        (b"te", b"trailers"),
        (b"expect", b"100-continue"),
        (b"content-length", b"2"),
        (b"authorization", b"Bearer t"),
    ]
    head = request_head(a_request(headers), host=b"engine:1", framing=b"content-length: 2\r\n")
    assert head == (
        b"POST /v1/x?a=1 HTTP/1.1\r\nhost: engine:1\r\nauthorization: Bearer t\r\n"
        b"x-request-id: id-1\r\ncontent-length: 2\r\n\r\n"
    )


def test_an_answer_keeps_only_the_headers_that_clients_may_see_and_gets_ours() -> None:
    headers = [
        (b"date", b"today"),
        (b"connection", b"close"),
        (b"server", b"uvicorn"),
        (b"x-switchyard-cell", b"fake"),
        (b"x-switchyard-retry", b"1"),
        (b"access-control-allow-origin", b"*"),
        (b"x-engine-build", b"1.2"),
        (b"content-type", b"text/plain"),
    ]
    head = response_head(an_answer(headers), [(b"x-switchyard-cell", b"c-1")], keep_alive=True)
    assert head == b"HTTP/1.1 200 OK\r\ndate: today\r\ncontent-type: text/plain\r\nx-switchyard-cell: c-1\r\n\r\n"
    assert response_head(an_answer([]), [], keep_alive=False).endswith(b"connection: close\r\n\r\n")


def test_an_answer_without_length_and_chunks_lasts_until_close_unless_it_has_no_body() -> None:
    assert ResponseHead(200, b"OK", [], None, False, False).until_close
    assert not ResponseHead(204, b"No Content", [], None, False, False).until_close
    assert not ResponseHead(200, b"OK", [], 0, False, False).until_close


def test_no_bytes_are_no_chunk() -> None:
    assert chunk(b"") == b""
    assert chunk(b"x" * 16) == b"10\r\n" + b"x" * 16 + b"\r\n"


def test_only_a_refusal_that_may_be_retried_says_so() -> None:
    retry = response_bytes(refusal_response(Refusal(503, "c", "m", retry=True)), keep_alive=True)
    assert b"x-switchyard-retry: 1\r\n" in retry
    assert b"retry-after: 1\r\n" in retry
    final = response_bytes(refusal_response(Refusal(413, "c", "m")), keep_alive=False)
    assert final.startswith(b"HTTP/1.1 413 ")
    assert b"retry" not in final
    assert final.endswith(b'{"error":{"message":"m","type":"invalid_request_error","param":null,"code":"c"}}')
