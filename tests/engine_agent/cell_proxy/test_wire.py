"""Heads and framing as bytes."""

from engine_agent.cell_proxy.refusal import Refusal
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
