"""Raw requests whose end, target, sender or model two readers could understand in two ways."""

import itertools
from collections.abc import Iterator

MINE = b'{"model":"mine","messages":[]}'
THEIRS = b'{"model":"theirs","smuggled":true}'
PATH = b"/v1/chat/completions"
HIDDEN = b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (PATH, len(THEIRS), THEIRS)
"""A request in place of a body. A reader that ends the first request too early would read it as the next one."""


def request(
    *headers: bytes, body: bytes = MINE, line: bytes = b"POST %b HTTP/1.1" % PATH, length: bool = False
) -> bytes:
    """One request; `@KEY@` stands for the header of a key."""
    own = [b"Content-Length: %d" % len(body)] if length else []
    return b"\r\n".join([line, b"Host: x", b"@KEY@", *own, *headers, b"", body])


def chunked(body: bytes, size: bytes | None = None, end: bytes = b"0\r\n\r\n") -> bytes:
    return b"%b\r\n%b\r\n%b" % (size or b"%x" % len(body), body, end)


def lengths_and_encodings() -> Iterator[bytes]:
    """Content-Length and Transfer-Encoding together, twice, or in odd forms."""
    encodings = [b"chunked", b"Chunked", b" chunked", b"\tchunked", b"chunked ", b"xchunked", b"chunked, identity"]
    encodings += [b"identity, chunked", b"identity", b"chunked;q=1", b'"chunked"', b"chun\x00ked", b"chunked\x0b"]
    for encoding, length_first in itertools.product([*encodings, b"gzip, chunked"], (True, False)):
        both = [b"Content-Length: 4", b"Transfer-Encoding:" + encoding]
        yield request(*(both if length_first else reversed(both)), body=chunked(MINE) + HIDDEN)
    lengths = [b"+30", b"-1", b"0x1e", b"30 ", b"30, 30", b"30, 5", b"30;", b"", b"9" * 25, b"030", b"3\x000"]
    for length in [*lengths, b"30\x0b"]:
        yield request(b"Content-Length: " + length, body=MINE + HIDDEN)
    for one, other in ((30, 30), (30, 5), (5, 30), (0, 30), (30, 0)):
        yield request(b"Content-Length: %d" % one, b"Content-Length: %d" % other, body=MINE + HIDDEN)
    yield request(b"Transfer-Encoding: chunked", b"Transfer-Encoding: identity", body=chunked(MINE) + HIDDEN)
    yield request(b"Transfer-Encoding: identity", b"Transfer-Encoding: chunked", body=chunked(MINE) + HIDDEN)


def header_lines() -> Iterator[bytes]:
    """Names with blanks, folded lines, wrong line endings."""
    names = [b"Content-Length ", b"Content-Length\t", b"Content_Length", b"Content-Length\x00"]
    for name in [*names, b"\xa0Content-Length"]:
        yield request(name + b": 0", body=HIDDEN)
        yield request(name + b": 0", length=True)
    lines = [b"Transfer-Encoding : chunked", b"Transfer-Encoding:\r\n chunked", b"X: y\nTransfer-Encoding: chunked"]
    lines += [b"X: y\rTransfer-Encoding: chunked", b" Transfer-Encoding: chunked", b"no colon", b": no name", b"X\r: y"]
    lines += [b"X: y\r\n\tTransfer-Encoding: chunked", b"Content-Length:\r\n 0", b"X: y\nContent-Length: 0"]
    for line in [*lines, b"X: y\rContent-Length: 0", b"X: y\x00Content-Length: 0"]:
        yield request(line, body=chunked(MINE) + HIDDEN, length=True)
    yield request(body=MINE + HIDDEN).replace(b"\r\n", b"\n")
    yield request(length=True).replace(b"\r\n", b"\r")
    yield request(length=True).replace(b"\r\n\r\n", b"\r\n\n", 1)
    yield b"\r\n\r\n" + request(length=True)


def chunks() -> Iterator[bytes]:
    """Sizes, extensions and trailers."""
    encoding = b"Transfer-Encoding: chunked"
    sizes = [b"1e;a=b", b'1e;a="\r\n0\r\n\r\n"', b"1e ;a", b"0x1e", b"+1e", b"-1", b" 1e", b"01e", b"1e\n", b"1E", b";"]
    for size in [*sizes, b"f" * 17]:
        yield request(encoding, body=chunked(MINE, size) + HIDDEN)
    ends = [b"0\r\nX-Switchyard-Tenant: root\r\n\r\n", b"0\r\nContent-Length: 5\r\n\r\n", b"0\n\n", b"0\r\n", b"\r\n"]
    for end in [*ends, b"00\r\n\r\n", b"0;\r\n\r\n"]:
        yield request(encoding, body=chunked(MINE, end=end) + HIDDEN)
    yield request(encoding, body=b"1e\n%b\n0\n\n" % MINE + HIDDEN)
    yield request(encoding, body=chunked(MINE), line=b"POST %b HTTP/1.0" % PATH)


def targets() -> Iterator[bytes]:
    paths = [b"http://x" + PATH, b"http://elsewhere" + PATH, b"https://x:9" + PATH, b"/" + PATH, b"*", b"x:80"]
    paths += [b"/v1/../v1/chat/completions", b"/v1/chat%2fcompletions", b"/v1/chat/completions%00"]
    paths += [PATH + end for end in (b"/", b"?model=theirs", b"#theirs", b";theirs", b" /v1/models")]
    for path in [*paths, b"/V1/chat/completions", b"\\v1\\chat\\completions"]:
        yield request(line=b"POST %b HTTP/1.1" % path, length=True)
    for method in (b"GET", b"HEAD", b"post", b"TRACE", b"PUT", b"CONNECT"):
        yield request(line=b"%b %b HTTP/1.1" % (method, PATH), body=HIDDEN, length=True)
    for version in (b" HTTP/1.2", b" HTTP/0.9", b"", b"  HTTP/1.1", b" HTTP/1.1 ", b" http/1.1", b" HTTP/2.0"):
        yield request(line=b"POST " + PATH + version, body=HIDDEN, length=True)
    yield b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def surface() -> Iterator[bytes]:
    """Paths other than chat's, and similar spellings."""
    paths = [b"/tokenize", b"/v1/messages", b"/v2/rerank", b"/pooling", b"/v1/messages/count_tokens"]
    for path in paths:
        for spelt in (path, path + b"/", b"/" + path, b"/x/.." + path, path + b"%2f", path.upper(), path + b"\t"):
            yield request(line=b"POST %b HTTP/1.1" % spelt, length=True)
        yield request(line=b"POST %b HTTP/1.1" % path, body=THEIRS, length=True)
        yield request(line=b"POST %b HTTP/1.1" % path, body=chunked(MINE) + HIDDEN)
        yield request(b"X-Api-Key: sw_0_0", line=b"POST %b HTTP/1.1" % path, length=True)
    for path in (b"/v1/load_lora_adapter", b"/collective_rpc", b"/v1/chat/completions/render", b"/sleep", b"/metrics"):
        yield request(line=b"POST %b HTTP/1.1" % path, length=True)
    for header in (b"Content-Encoding: zstd", b"X-Vllm-Priority: -1", b"Origin: https://app.example"):
        yield request(header, length=True)


def senders() -> Iterator[bytes]:
    """Senders, models and destinations of a request."""
    connections = [b"authorization", b"content-length", b"x-switchyard-tenant", b"keep-alive, transfer-encoding"]
    lines = [b"Connection: " + name for name in connections]
    lines += [b"X-Switchyard-Tenant: root", b"X-Switchyard-Model: theirs", b"X-Switchyard-Pool: pool.theirs"]
    lines += [b"X-Switchyard-Key: 0a0a0a0a", b"X-Switchyard-Hop: us-west-2|1|00", b"X-Switchyard-Deployment: theirs"]
    lines += [b"X_Switchyard_Tenant: root", b"X-Switchyard-Affinity: 1", b"X-Switchyard-Unserved: 1", b"Host: y"]
    lines += [b"Expect: 100-continue", b"Content-Encoding: gzip", b"Te: trailers", b"Authorization: Bearer sw_0_0"]
    for line in [*lines, b"Upgrade: h2c\r\nConnection: upgrade, http2-settings"]:
        yield request(line, length=True)
    bodies = [b'{"model":"mine","model":"theirs"}', b'{"model":"theirs","model":"mine"}', b"{'model':'mine'}"]
    bodies += [b'{"mod\\u0065l":"theirs","model":"mine"}', b'{"model":"mine","mod\\u0065l":"theirs"}', b"model=theirs"]
    bodies += [b'\xef\xbb\xbf{"model":"theirs"}', '{"model":"theirs"}'.encode("utf-16")]
    bodies += [
        b'{"model":"mine\\u0000theirs"}',
        b'{"model":"mine"}{"model":"theirs"}',
        b'[{"model":"mine"}]',
        b'{"a":{"model":"mine"},"model":"theirs"}',
    ]
    for body in [*bodies, b'{"model":"mine" /* , "model":"theirs" */}']:
        yield request(body=body, length=True)


CORPUS = (*lengths_and_encodings(), *header_lines(), *chunks(), *targets(), *surface(), *senders())
