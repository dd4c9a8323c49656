"""Requests that try to harm a cell or its other clients. Pure: a fixed corpus, and a generator that a seed drives.

An attack is bytes for one connection, with the time between its pieces and what counts as an acceptable answer. `judge`
evaluates the answer; nothing here opens a connection.
"""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from tests.engine_agent.attacks.framing import CORPUS as FRAMING

CHAT, COMPLETIONS, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
PATHS = (
    CHAT, COMPLETIONS, MESSAGES, "/v1/responses", "/v1/messages/count_tokens", "/v1/embeddings", "/score",
    "/v1/rerank", "/pooling", "/classify", "/tokenize", "/detokenize",
)  # fmt: skip
SLOW_S = 0.2
TOO_LONG = "too long for Expect"
"""An ingress whose parsers have seen many bad bodies waits 60 s for this body."""
MUTATED = "mutated "
"""Prefix of the names of mutations."""


@dataclass(frozen=True, slots=True)
class Attack:
    """One connection's bytes, in `pieces` that are `pause_s` apart.

    `leaves`: the client closes its side after the last piece, so that no answer is due. `may_serve`: some reading of it
    is a valid request, so a 2xx is fine. `is_framing`: HAProxy may answer it in its own words, because it is not HTTP.
    `may_fail`: vLLM answers 500 to a grammar or pattern that it cannot compile, and stays well.
    """

    name: str
    path: str
    pieces: tuple[bytes, ...]
    pause_s: float = 0.0
    leaves: bool = False
    may_serve: bool = False
    is_framing: bool = False
    may_fail: bool = False


def base(path: str, model: str) -> dict[str, Any]:
    """A small valid request for a path."""
    chat = [{"role": "user", "content": "Say hi."}]
    members: dict[str, dict[str, Any]] = {
        CHAT: {"messages": chat, "max_tokens": 2},
        MESSAGES: {"messages": chat, "max_tokens": 2},
        "/v1/messages/count_tokens": {"messages": chat},
        COMPLETIONS: {"prompt": "hi", "max_tokens": 2},
        "/v1/responses": {"input": "hi", "max_output_tokens": 16, "store": False},
        "/score": {"text_1": "a", "text_2": "b"},
        "/v1/rerank": {"query": "a", "documents": ["b"]},
        "/tokenize": {"prompt": "hi"},
        "/detokenize": {"tokens": [1, 2]},
    }
    return {"model": model, **members.get(path, {"input": "hi"})}


def request(path: str, body: bytes, *headers: bytes) -> bytes:
    lines = [b"POST %b HTTP/1.1" % path.encode(), b"Host: x", b"Content-Length: %d" % len(body), *headers]
    return b"\r\n".join([*lines, b"", body])


def nested(depth: int, kind: str) -> bytes:
    """JSON nested `depth` levels: arrays, objects, or both in turn."""
    opened, closed = {"array": (b"[", b"]"), "object": (b'{"a":', b"}"), "both": (b'[{"a":', b"}]")}[kind]
    return opened * depth + b"1" + closed * depth


def with_member(path: str, model: str, name: bytes, value: bytes) -> bytes:
    """The valid request of a path with one more member, as JSON text, at its end."""
    body = base(path, model)
    body.pop(name.decode("latin-1"), None)
    return json.dumps(body).encode()[:-1] + b',"%b":%b}' % (name, value)


NUMBERS = (
    b"1e400", b"-1e400", b"1e-400", b"9" * 400, b"9" * 6000, b"-1", b"0", b"1.5", b"10000", b"2147483648",
    b"9223372036854775808", b"18446744073709551616", b"NaN", b"Infinity", b"-Infinity", b"0x10", b"01", b"1e5", b"-0",
)  # fmt: skip
WRONG_TYPES = (
    b"null", b"true", b'"5"', b'""', b"[]", b"{}", b"[[]]", b'{"a":1}', b'"\\u0000"', b'"\\ud800"', b"[null]",
    b'"' + b"x" * 70_000 + b'"', b"[" + b"1," * 9000 + b"1]", b'["' + b'","'.join([b"s"] * 3000) + b'"]',
)  # fmt: skip
MEMBERS = (
    b"model", b"messages", b"prompt", b"input", b"max_tokens", b"max_completion_tokens", b"n", b"best_of",
    b"temperature", b"top_p", b"top_k", b"min_p", b"seed", b"stop", b"stop_token_ids", b"logprobs", b"top_logprobs",
    b"prompt_logprobs", b"logit_bias", b"tools", b"tool_choice", b"functions", b"response_format",
    b"structured_outputs", b"stream", b"stream_options", b"echo", b"suffix", b"user", b"metadata", b"store",
    b"presence_penalty", b"frequency_penalty", b"repetition_penalty", b"length_penalty", b"min_tokens", b"priority",
    b"truncate_prompt_tokens", b"cache_salt", b"chat_template_kwargs", b"bad_words", b"allowed_token_ids",
    b"kv_transfer_params", b"vllm_xargs", b"thinking", b"system", b"reasoning", b"text", b"dimensions",
    b"encoding_format", b"query", b"documents", b"text_1", b"tokens", b"include", b"background", b"instructions",
    b"add_special_tokens", b"return_token_ids", b"parallel_tool_calls", b"max_output_tokens", b"service_tier",
    b"max_tool_calls",
)  # fmt: skip
DEEP_SCHEMA = b'{"type":"object","properties":{"a":' * 30 + b'{"type":"string"}' + b"}}" * 30
SCHEMAS = (
    b'{"$ref":"#"}',
    b'{"type":"string","pattern":"(a+)+$"}',
    b'{"type":"string","pattern":"(?<=x)((a|b)*){500}"}',
    b'{"type":"string","minLength":100000000}',
    b'{"type":"array","minItems":1000000000}',
    b'{"enum":[' + b",".join(b'"%d"' % n for n in range(6000)) + b"]}",
    b'{"type":"object","properties":{"a":{"$ref":"#/$defs/n"}},"$defs":{"n":{"anyOf":[{"$ref":"#/$defs/n"}]}}}',
    b'{"type":"nothing"}',
    DEEP_SCHEMA,
)
CONTENTS = (
    b"null", b"[]", b"5", b'[{"type":"text"}]', b'[{"type":"image_url","image_url":{"url":"http://127.0.0.1:1/x"}}]',
    b'[{"type":"image_url","image_url":{"url":"file:///etc/passwd"}}]', b'[{"type":"image_url","image_url":{"url":'
    b'"data:image/png;base64,AAAA"}}]', b'[{"type":"nothing","text":"x"}]', b'"\\ud800"', b'"\\u0000"',
    b'[{"type":"input_audio","input_audio":{"data":"AA","format":"wav"}}]', b'"' + b"a " * 40_000 + b'"',
)  # fmt: skip
ROLES = (b'"user"', b'"system"', b'"assistant"', b'"tool"', b'"nobody"', b"null", b"1", b'"\\u0000"')
ODD_TEXTS = (
    b"\xff\xfe", b"\xc0\xaf", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\x00", b"\x1b[31m", b"\\x00", b"\\u12",
    b"\xe2\x80\xae",
)  # fmt: skip
DEPTHS = (40, 65, 130, 500, 1000, 3000, 10_000, 100_000)
HEADS = (
    b"X-A: " + b"a" * 60_000, b"X-A: \x00", b"X-A: \xff\xfe", b"A" * 60_000 + b": a", b"X-Switchyard-Class: nothing",
    b"X-Switchyard-Deadline-Ms: soon", b"X-Switchyard-Deadline-Ms: 1e400", b"X-Switchyard-Deadline-Ms: " + b"9" * 400,
    b"X-Switchyard-Tenant: root", b"X-Switchyard-Server: c-1-g1", b"X-Switchyard-Hop: us-west-2|1|00",
    b"X-Switchyard-Attempt: 9", b"X-Request-Id: " + b"r" * 7000, b"X-Request-Id: \x1b[31m", b"Content-Encoding: gzip",
    b"Content-Type: text/plain; charset=utf-16", b"Expect: 100-continue", b"Expect: nothing", b"Accept: nothing/*",
    b"Authorization: Bearer \xff", b"Authorization: Basic Og==", b"Cookie: " + b"c=1;" * 1500, b"Range: bytes=0-",
    b"Upgrade: websocket\r\nConnection: Upgrade", b"Te: chunked", b"Connection: close, close, keep-alive",
    b"\r\n".join(b"X-%d: 1" % n for n in range(400)), b"Traceparent: 00-" + b"f" * 4000,
)  # fmt: skip


def bodies(path: str, model: str) -> Iterator[Attack]:
    """Nesting, names, numbers, types and encodings in the body of one path."""

    def attack(name: str, body: bytes, *, may_serve: bool = False) -> Attack:
        return Attack(f"{name} {path}", path, (request(path, body),), may_serve=may_serve)

    for depth in DEPTHS:
        for kind in ("array", "object", "both"):
            served = depth <= DEPTHS[1]
            yield attack(
                f"{kind} {depth} deep", with_member(path, model, b"metadata", nested(depth, kind)), may_serve=served
            )
        yield attack(f"unclosed {depth}", b'{"model":"%b","a":' % model.encode() + b"[" * depth)
    name = model.encode()
    yield attack("long name", with_member(path, model, b"m" * 60_000, b"1"), may_serve=True)
    yield attack("long model", b'{"model":"%b"}' % (b"m" * 60_000))
    yield attack("NUL in model", b'{"model":"%b\\u0000zzz"}' % name)
    yield attack("NUL in a name", with_member(path, model, b"a\\u0000b", b"1"), may_serve=True)
    yield attack("raw NUL", with_member(path, model, b"user", b'"\x00"'))
    yield attack("twice", b'{"model":"%b","model":"%b"}' % (name, name))
    yield attack("nested twice", with_member(path, model, b"metadata", b'{"a":1,"a":2}'), may_serve=True)
    many = b"1," + b",".join(b'"%d":1' % number for number in range(9000))
    yield attack("many members", with_member(path, model, b"x", many), may_serve=True)
    for text in ODD_TEXTS:
        yield attack(f"text {text!r}", with_member(path, model, b"user", b'"%b"' % text), may_serve=True)
    for encoding in ("utf-16", "utf-32", "utf-8-sig", "utf-7", "cp037"):
        body = json.dumps(base(path, model))
        yield attack(f"in {encoding}", body.encode(encoding), may_serve=encoding in {"utf-7", "utf-8-sig"})
    for text in (b"", b" ", b"null", b"1", b'"x"', b"[]", b"{", b"}", b"{}" * 500, b"%PDF-1.4", b"<xml/>", b"a=1&b=2"):
        yield attack(f"body {text[:8]!r}", text)


def members(path: str, model: str) -> Iterator[Attack]:
    """Every member with every odd number and wrong type, and texts that engines compile: schemas and patterns."""

    def attack(name: bytes, value: bytes) -> Attack:
        body = with_member(path, model, name, value)
        named = f"{name.decode()}={value[:24].decode('latin-1')} {path}"
        return Attack(
            named, path, (request(path, body),), may_serve=True, may_fail=value.startswith((b'{"grammar"', b'{"regex"'))
        )

    for name in MEMBERS:
        for value in (*NUMBERS, *WRONG_TYPES):
            yield attack(name, value)
    for schema in SCHEMAS:
        wrapped = b'{"type":"json_schema","json_schema":{"name":"x","schema":%b}}' % schema
        yield attack(b"response_format", wrapped)
        yield attack(b"structured_outputs", b'{"json":%b}' % schema)
        yield attack(b"tools", b'[{"type":"function","function":{"name":"f","parameters":%b}}]' % schema)
    for pattern in (rb"(a+)+$", rb"((a{1,99}){1,99}){1,99}", rb"(", rb"\\p{Greek}", rb"(?=a)b", b"x" * 20_000):
        yield attack(b"structured_outputs", b'{"regex":"%b"}' % pattern)
    for grammar in (b"root ::= root", b"root ::= ", b"x", b'root ::= \\"a\\" | root root root'):
        yield attack(b"structured_outputs", b'{"grammar":"%b"}' % grammar)
    yield attack(b"structured_outputs", b'{"choice":[%b]}' % b",".join(b'"%d"' % n for n in range(5000)))
    for role in ROLES:
        for content in CONTENTS:
            yield attack(b"messages", b'[{"role":%b,"content":%b}]' % (role, content))
    yield attack(b"messages", b"[" + b",".join([b'{"role":"user","content":"a"}'] * 3000) + b"]")
    for count in (b"129", b"10000", b"1000000000"):
        yield attack(b"n", count)
        yield attack(b"best_of", count)
    for item in (b"1", b"{}", b'{"type":"x"}', b'{"role":"user","content":1}', b'{"type":"function_call"}'):
        yield attack(b"input", b"[" + b",".join([item] * 2000) + b"]")
        yield attack(b"messages", b"[" + b",".join([item] * 2000) + b"]")
    yield attack(b"prompt", b"[" + b",".join([b'"a"'] * 5000) + b"]")
    yield attack(b"prompt", b"[" + b",".join([b"999999999"] * 20) + b"]")
    yield attack(b"stop", b"[" + b",".join(b'"%d"' % n for n in range(5000)) + b"]")
    yield attack(b"logit_bias", b"{" + b",".join(b'"%d":100' % n for n in range(5000)) + b"}")


def heads(path: str, model: str) -> Iterator[Attack]:
    body = json.dumps(base(path, model)).encode()
    for head in HEADS:
        yield Attack(f"head {head[:40]!r} {path}", path, (request(path, body, head),), may_serve=True, is_framing=True)
    for line in (b"GET", b"PUT", b"OPTIONS", b"X" * 9000, b"post"):
        raw = request(path, body).replace(b"POST", line, 1)
        yield Attack(f"method {line[:8]!r} {path}", path, (raw,), may_serve=True, is_framing=True)
    for end in (b"/", b"//", b"%00", b"?" + b"q" * 9000, b"\x00", b";x", b"/../x", b"%2e%2e/x"):
        raw = request(path, body).replace(path.encode(), path.encode() + end, 1)
        yield Attack(f"target {end[:8]!r} {path}", path, (raw,), may_serve=True, is_framing=True)
    expects = request(path, b"", b"Expect: 100-continue").replace(b"Length: 0", b"Length: 99999999")
    yield Attack(f"{TOO_LONG} {path}", path, (expects,))


def framings(model: str) -> Iterator[Attack]:
    """Where a request ends: the corpus of ambiguous framings, truncated, slow and pipelined requests."""
    for number, raw in enumerate(FRAMING):
        own = raw.replace(b"@KEY@\r\n", b"").replace(b"mine", model.encode())
        yield Attack(f"framing {number}", CHAT, (own,), leaves=True, may_serve=True, is_framing=True)
    body = json.dumps(base(CHAT, model)).encode()
    whole = request(CHAT, body)
    chunked = b"POST %b HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" % CHAT.encode()
    for size in (1, 20, len(whole) - len(body), len(whole) - 5):
        yield Attack(f"cut at {size}", CHAT, (whole[:size],), leaves=True, is_framing=True)
    for cut in (b"", b"5", b"5\r\n", b'5\r\n{"mod', b"%x\r\n%b\r\n" % (len(body), body), b"ffffffff\r\n{", b"zz\r\n"):
        yield Attack(f"chunk cut at {cut[:12]!r}", CHAT, (chunked + cut,), leaves=True, is_framing=True)
    slow = tuple(whole[at : at + 40] for at in range(0, len(whole), 40))
    yield Attack("slow", CHAT, slow, pause_s=SLOW_S, may_serve=True)
    one_by_one = tuple(b"1\r\n%c\r\n" % byte for byte in body)
    yield Attack("chunks of a byte", CHAT, (chunked, *one_by_one, b"0\r\n\r\n"), may_serve=True)
    yield Attack("pipelined", CHAT, (whole * 30,), may_serve=True)
    yield Attack(
        "pipelined with bad ones", CHAT, ((whole + request(CHAT, nested(1000, "array"))) * 10,), may_serve=True
    )
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"
    yield Attack("HTTP/2", CHAT, (preface,), is_framing=True)
    yield Attack("TLS", CHAT, (b"\x16\x03\x01\x00\xa5\x01\x00\x00\xa1\x03\x03" + b"\x00" * 150,), is_framing=True)
    yield Attack("leaves a stream", CHAT, (request(CHAT, body[:-1] + b',"stream":true}'),), leaves=True, may_serve=True)


def everything(model: str, paths: tuple[str, ...] = PATHS) -> Iterator[Attack]:
    """The whole fixed set for some paths."""
    for path in paths:
        yield from bodies(path, model)
        yield from heads(path, model)
    for path in paths:
        yield from members(path, model)
    yield from framings(model)


def corpus(model: str) -> list[Attack]:
    """The attacks of the default run: every body and framing on three paths, and a fixed sample of the members. It does
    not wait for an answer that takes 60 s; the long run does."""
    kept = (CHAT, COMPLETIONS, MESSAGES)
    whole = [attack for path in kept for attack in bodies(path, model)]
    whole += [replace(attack, leaves=attack.name.startswith(TOO_LONG)) for attack in heads(CHAT, model)]
    whole += framings(model)
    sample = random.Random(33).sample([*members(CHAT, model), *members(MESSAGES, model)], 300)
    return [*whole, *sample]


def generated(rng: random.Random, model: str) -> Iterator[Attack]:
    """Yields members of the fixed set and mutations of them, without end."""
    fixed = list(everything(model))
    mutations: tuple[Callable[[random.Random, bytes], bytes], ...] = (_flipped, _cut, _doubled, _inserted)
    while True:
        attack = rng.choice(fixed)
        if rng.random() < 0.5:
            yield attack
            continue
        pieces = tuple(rng.choice(mutations)(rng, piece) for piece in attack.pieces)
        yield replace(
            attack, name=f"{MUTATED}{attack.name}", pieces=pieces, leaves=True, may_serve=True, is_framing=True
        )


def _flipped(rng: random.Random, raw: bytes) -> bytes:
    changed = bytearray(raw)
    for _ in range(rng.randint(1, 8)):
        if changed:
            changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)


def _cut(rng: random.Random, raw: bytes) -> bytes:
    return raw[: rng.randrange(len(raw) + 1)]


def _doubled(rng: random.Random, raw: bytes) -> bytes:
    at, size = rng.randrange(len(raw) + 1), rng.choice((1, 8, 200))
    return raw[: at + size] + raw[at:]


def _inserted(rng: random.Random, raw: bytes) -> bytes:
    at = rng.randrange(len(raw) + 1)
    return (
        raw[:at] + rng.choice((b"\x00", b"\r\n", b"{", b'"', b"\\", b"[" * 2000, b"\xff", b":", b"9" * 300)) + raw[at:]
    )
