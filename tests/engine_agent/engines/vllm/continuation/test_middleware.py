"""Marks and continuations over HTTP, around a stand-in for vLLM's application."""

import asyncio
import json
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from engine_agent.engines.openai_http import App, Receive, Scope, Send
from engine_agent.engines.vllm.continuation import middleware, replay
from engine_agent.engines.vllm.continuation.middleware import BadContinuation, Continuations, split_body
from engine_agent.engines.vllm.continuation.replay import Run
from engine_agent.protocol.continuation import CONTINUATION_HEADER, Continuation, prompt_name

ON = ((CONTINUATION_HEADER, b"on"), (b"x-request-id", b"r1"))
GIVEN = b'{"model": "m",  "stream":true, "text": "say \\"switchyard_continuation\\": now"'
MEMBER = b', "switchyard_continuation": {"prompt": "2:0123456789abcdef", "groups": [[1,2],[3]]}}'


@pytest.fixture(autouse=True)
def without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "install", lambda: "")


def test_the_body_of_the_first_run_is_what_is_left_byte_for_byte() -> None:
    bare, continuation = split_body(GIVEN + MEMBER)
    assert bare == GIVEN + b"}"
    assert continuation is not None
    assert (continuation.prompt, continuation.groups) == ("2:0123456789abcdef", ((1, 2), (3,)))
    assert split_body(GIVEN + b"}") == (GIVEN + b"}", None)
    appended = b', "priority":3,"stream_options":{"include_usage":true}}'
    assert split_body(GIVEN + MEMBER[:-1] + appended) == (GIVEN + appended, continuation)
    nested = b', "metadata": {"a": 1' + MEMBER
    assert split_body(GIVEN + nested + MEMBER) == (GIVEN + nested + b"}", continuation)


@pytest.mark.parametrize(
    "body",
    [
        GIVEN + MEMBER[:-1] + MEMBER,
        GIVEN + MEMBER[:-1] + b', "model": "other"' + MEMBER,
        b'{"switchyard_continuation": {"prompt": "", "groups": []}}',
        b'{"a": 1, "switchyard_continuation": {"prompt": "", "groups": [[-1]]}}',
        b'{"a": 1, "switchyard_continuation": {"prompt": "", "groups": [[true]]}}',
        b'{"a": 1, "switchyard_continuation": {"prompt": "", "groups": [["1"]]}}',
        b'{"a": 1, "switchyard_continuation": {"prompt": "", "groups": [[4294967296]]}}',
        b'{"a": 1, "switchyard_continuation": {"prompt": "", "groups": [[1.5]]}}',
        b'{"a": 1, "switchyard_continuation": {"prompt": 1, "groups": []}}',
        b'{"a": 1, "switchyard_continuation": {"groups": []}}',
        b'{"a": 1, "switchyard_continuation": {"prompt": "", "groups": [], "more": 1}}',
        b'{"a": 1, "switchyard_continuation": []}',
        b'{"a": 1, "switchyard_continuation": {"prompt": "", "groups": [[' + b"1," * 262_144 + b"1]]}}",
        b'{"a": ' + b"[" * 100_000 + b', "switchyard_continuation": {"prompt": "", "groups": []}}',
        b'{"a": 1, "switchyard_continuation": {"prompt"',
    ],
    ids=range(15),
)
def test_a_malformed_continuation_is_named(body: bytes) -> None:
    with pytest.raises(BadContinuation):
        split_body(body)


Serve = Callable[[bytes, Send], Any]


def answered(
    serve: Serve, body: bytes, headers: Sequence[tuple[bytes, bytes]] = ON, pieces: int = 1
) -> tuple[int, bytes]:
    """The answer of an application behind the middleware. Its body comes in so many pieces."""
    size = -(-len(body) // pieces)
    cut = [body[start : start + size] for start in range(0, len(body), size)]
    waiting = [{"type": "http.request", "body": each, "more_body": each is not cut[-1]} for each in cut]
    sent: list[Any] = []

    async def app(_: Scope, receive: Receive, send: Send) -> None:
        message = await receive()
        assert not message["more_body"]
        await serve(message["body"], send)

    async def receive() -> Any:
        return waiting.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": list(headers)}
    asyncio.run(Continuations(app)(scope, receive, send))
    assert [message["type"] for message in sent].count("http.response.start") == 1
    return sent[0]["status"], b"".join(message["body"] for message in sent[1:])


async def begin(send: Send, content_type: bytes = b"text/event-stream; charset=utf-8") -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"Content-Type", content_type)]})


async def event(send: Send, text: bytes, *, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": text, "more_body": more})


def current() -> Run:
    run = replay._current.get()
    assert run is not None
    return run


def output(*ids: int) -> Any:
    return SimpleNamespace(outputs=[SimpleNamespace(token_ids=list(ids))], num_cached_tokens=None)


async def streaming(_: bytes, send: Send) -> None:
    """As vLLM: an event without tokens, two outputs in one event, an output without an event, and the end."""

    async def outputs() -> Any:
        for ids in ((7,), (8, 9), (10,)):
            yield output(*ids)

    run = current()
    run.begin_sequence(SimpleNamespace(n=1))
    await begin(send)
    await event(send, b"data: created\n\n")
    run.begin_marks("2:abcd")
    run.is_accepted = True
    pieces = run.watch(outputs())
    await anext(pieces)
    await event(send, b"data: 7\n\n")
    await anext(pieces)
    await anext(pieces)
    await event(send, b"data: 8 9 10\n\n")
    await event(send, b"data: [DONE]\n\n")
    await event(send, b"", more=False)


STREAM = b"data: created\n\n: prompt 2 abcd\n: tokens 7\ndata: 7\n\n: tokens 8,9,10\ndata: 8 9 10\n\ndata: [DONE]\n\n"


@pytest.mark.parametrize("pieces", [1, 3])
def test_marks_come_before_the_events_that_depend_on_their_tokens(pieces: int) -> None:
    assert answered(streaming, GIVEN + b"}", pieces=pieces) == (200, STREAM)
    assert answered(streaming, GIVEN + MEMBER, pieces=pieces) == (200, STREAM)


@pytest.mark.parametrize("has_event", [True, False])
def test_the_mark_of_the_prompt_is_sent_alone_if_the_client_has_events(has_event: bool) -> None:
    async def serve(_: bytes, send: Send) -> None:
        current().begin_sequence(SimpleNamespace(n=1))
        await begin(send)
        if has_event:
            await event(send, b"data: created\n\n")
        current().begin_marks("2:abcd")
        await current().announce()
        await event(send, b"data: 7\n\n", more=False)

    alone = b"data: created\n\n: prompt 2 abcd\n\ndata: 7\n\n"
    assert answered(serve, GIVEN + b"}") == (200, alone if has_event else b": prompt 2 abcd\ndata: 7\n\n")


@pytest.mark.parametrize(("limit", "pieces"), [(1000, [b"abc"]), (1, [b"a", b"b", b"c"])])
def test_the_events_that_the_client_has_are_sent_in_one_piece(
    limit: int, pieces: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(middleware, "MOST_HELD_BYTES", limit)
    run, sent = Run(Continuation("1:ab", ((1,), (2,)))), []

    async def send(message: Any) -> None:
        sent.append(message)

    async def outputs() -> Any:
        for token in (1, 2, 3):
            yield output(token)

    async def serve() -> None:
        held, words = middleware._Held(send, run), iter((b"a", b"b", b"c"))
        await begin(held)
        run.is_accepted = True
        async for _ in run.watch(outputs()):
            await event(held, next(words))

    asyncio.run(serve())
    assert [message["body"] for message in sent[1:]] == pieces


def test_the_application_gets_the_body_without_the_member() -> None:
    async def serve(body: bytes, send: Send) -> None:
        await begin(send, b"application/json")
        await event(send, body, more=False)

    assert answered(serve, GIVEN + MEMBER) == (200, GIVEN + b"}")


@pytest.mark.parametrize(("calls", "n"), [(2, 1), (1, 2)])
def test_a_stream_of_several_sequences_has_no_marks(calls: int, n: int) -> None:
    run = Run()
    reasons = [run.begin_sequence(SimpleNamespace(n=n)) for _ in range(calls)]
    run.begin_marks("1:ab")
    assert (run.take_marks(), reasons[-1]) == (b"", "it generates several sequences")


def test_json_has_no_marks() -> None:
    async def serve(_: bytes, send: Send) -> None:
        current().begin_sequence(SimpleNamespace(n=1))
        current().begin_marks("1:ab")
        await begin(send, b"application/json")
        await event(send, b"{}", more=False)

    assert answered(serve, GIVEN + b"}") == (200, b"{}")


@pytest.mark.parametrize("starts_first", [True, False])
def test_a_refusal_has_its_own_status_although_the_stream_has_begun(starts_first: bool) -> None:
    async def serve(_: bytes, send: Send) -> None:
        if starts_first:
            await begin(send)
            await event(send, b"data: created\n\n")
        current().refusal = "its prompt is another"
        await event(send, b'data: {"error": {}}\n\n') if starts_first else await begin(send)
        await event(send, b"", more=False)

    status, body = answered(serve, GIVEN + MEMBER)
    assert (status, json.loads(body)["error"]["type"]) == (409, "continuation_refused")
    assert json.loads(body)["error"]["message"] == "this stream cannot continue here: its prompt is another"


def test_an_answer_to_a_bad_request_keeps_its_status() -> None:
    async def serve(_: bytes, send: Send) -> None:
        await send({"type": "http.response.start", "status": 400, "headers": []})
        await event(send, b"{}", more=False)

    assert answered(serve, GIVEN + MEMBER) == (400, b"{}")


async def echo(body: bytes, send: Send) -> None:
    assert replay._current.get() is None
    await begin(send)
    await event(send, body, more=False)


def test_only_a_relay_may_continue() -> None:
    status, body = answered(echo, GIVEN + MEMBER, headers=())
    assert (status, json.loads(body)["error"]["param"]) == (400, "switchyard_continuation")
    for plain in (GIVEN + b"}", b"no JSON with switchyard_continuation", b"[" * 100_000 + b"switchyard_continuation"):
        assert answered(echo, plain, headers=()) == (200, plain)
    assert answered(lambda *_: None, GIVEN + MEMBER[:-1] + MEMBER)[0] == 400


def test_a_vllm_that_cannot_continue_serves_and_refuses_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "install", lambda: "this vLLM has no AsyncLLM._add_request")
    assert answered(echo, GIVEN + b"}") == (200, GIVEN + b"}")
    status, body = answered(echo, GIVEN + MEMBER)
    assert status == 409
    assert b"AsyncLLM._add_request" in body


def test_a_client_that_left_before_its_body_was_complete_is_passed_on() -> None:
    seen: list[str] = []

    async def app(_: Scope, receive: Receive, __: Send) -> None:
        seen.append((await receive())["type"])

    waiting: list[Any] = [
        {"type": "http.request", "body": b"{", "more_body": True},
        {"type": "http.disconnect"},
    ]

    async def receive() -> Any:
        return waiting.pop(0)

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [*ON]}
    asyncio.run(_through(app, scope, receive))
    assert seen == ["http.disconnect"]


async def _through(app: App, scope: Any, receive: Receive) -> None:
    async def send(_: Any) -> None: ...

    await middleware.Continuations(app)(scope, receive, send)


def engine(*, second_runner: bool = False, device: str = "cpu", speculation: Any = None) -> Any:
    model = SimpleNamespace(max_model_len=10, get_vocab_size=lambda: 100)
    config = SimpleNamespace(
        model_config=model,
        use_v2_model_runner=second_runner,
        device_config=SimpleNamespace(device_type=device),
        speculative_config=speculation,
    )
    return SimpleNamespace(vllm_config=config)


def asked(**stated: Any) -> Any:
    plain = {"prompt_logprobs": None, "seed": None, "temperature": 0.0, "output_kind": SimpleNamespace(name="DELTA")}
    params = {**plain, **stated.pop("params", {})}
    return SimpleNamespace(
        **{"prompt_embeds": None, "prompt_token_ids": [1, 2], "sampling_params": SimpleNamespace(**params), **stated}
    )


def repeated(*groups: tuple[int, ...], prompt: str = prompt_name([1, 2])) -> Run:
    return Run(Continuation(prompt, groups))


@pytest.mark.parametrize(
    ("run", "request_", "of", "why"),
    [
        (Run(), asked(), engine(), ""),
        (Run(), asked(prompt_embeds=[0.1]), engine(), "its prompt has embeddings"),
        (
            *(Run(), asked(params={"output_kind": SimpleNamespace(name="CUMULATIVE")}), engine()),
            "its outputs repeat all tokens",
        ),
        (Run(), asked(params={"prompt_logprobs": 1}), engine(), "it asks for log probabilities of its prompt"),
        (Run(), asked(params={"seed": 1, "temperature": 1.0}), engine(), ""),
        (Run(), asked(params={"seed": 1}), engine(device="cuda"), ""),
        (
            *(Run(), asked(params={"seed": 1, "temperature": 1.0}), engine(device="cuda")),
            "this model runner does not repeat the numbers that a seed gave",
        ),
        (Run(), asked(params={"seed": 1, "temperature": 1.0}), engine(device="cuda", second_runner=True), ""),
        (
            *(Run(), asked(params={"seed": 1, "temperature": 1.0}), engine(speculation="ngram")),
            "this model runner does not repeat the numbers that a seed gave",
        ),
        (repeated(), asked(), engine(), ""),
        (repeated((3,), (4, 99)), asked(), engine(), ""),
        (repeated((3,), ()), asked(), engine(), "a group is empty"),
        (repeated((100,)), asked(), engine(), "a token is not in this vocabulary of 100"),
        (repeated((3,) * 9), asked(), engine(), "its 9 tokens exceed the context of 10"),
        (repeated((3,), prompt="2:0"), asked(), engine(), f"its prompt is {prompt_name([1, 2])} here, and was 2:0"),
    ],
)
def test_what_cannot_continue_is_refused_with_the_reason(run: Run, request_: Any, of: Any, why: str) -> None:
    found = replay.why_unmarked(of, request_)
    if not found and run.continuation is not None:
        found = replay.why_refused(of, request_, run.continuation)
    assert found == why
