"""Real vLLM continues streams of another engine: text, ids, usage and end are those of the undisturbed run, wherever
the stream was cut."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine_agent.protocol.messages import Artifact
from engine_agent.protocol.proxy_messages import COUNTED_APART_PATH, EXCHANGE_HEADER, USAGE_PATH
from tests.asking import CLIENT
from tests.engine_agent.engines.vllm.continuation.streams import Stream, cut_after, marked, sent
from tests.engine_agent.engines.vllm.forks import Begin
from tests.engine_agent.engines.vllm.running_cell import RunningCell, plan_of, running_cell

pytestmark = [pytest.mark.long, pytest.mark.vllm, pytest.mark.timeout(3600)]

CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
TOKENS = 24
ASK = [{"role": "user", "content": "Name three cities of Europe, and say what each is known for."}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "people": {"type": "integer"}},
    "required": ["city", "people"],
    "additionalProperties": False,
}
TOOL = {"name": "look_up", "description": "Finds a city", "parameters": SCHEMA}
USAGE = {"stream_options": {"include_usage": True}}
GREEDY = {"messages": ASK, "max_tokens": TOKENS, "temperature": 0, **USAGE}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, GREEDY),
    "chat that ends by itself": (
        CHAT,
        {**GREEDY, "messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 60},
    ),
    "usage in each event": (
        CHAT,
        {**GREEDY, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ),
    "ids": (CHAT, {**GREEDY, "return_token_ids": True}),
    "log probabilities": (CHAT, {**GREEDY, "logprobs": True, "top_logprobs": 2}),
    "penalties": (
        CHAT,
        {**GREEDY, "presence_penalty": 1.5, "frequency_penalty": 1.5, "repetition_penalty": 1.2},
    ),
    "minimum": (CHAT, {**GREEDY, "min_tokens": 20, "messages": [{"role": "user", "content": "Say yes."}]}),
    "seed": (CHAT, {**GREEDY, "temperature": 1.0, "seed": 7}),
    "schema": (
        CHAT,
        {
            **GREEDY,
            "max_tokens": 60,
            "response_format": {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}},
        },
    ),
    "required tool": (
        CHAT,
        {**GREEDY, "max_tokens": 60, "tools": [{"type": "function", "function": TOOL}], "tool_choice": "required"},
    ),
    "free tool": (CHAT, {**GREEDY, "tools": [{"type": "function", "function": TOOL}]}),
    "completion": (
        COMPLETIONS,
        {"prompt": "The capital of France is", "max_tokens": TOKENS, "temperature": 0, "logprobs": 2, **USAGE},
    ),
    "echo": (
        COMPLETIONS,
        {"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0, "echo": True, **USAGE},
    ),
    "prompt of ids": (COMPLETIONS, {"prompt": [504, 3575, 282], "max_tokens": TOKENS, "temperature": 0, **USAGE}),
    "regex": (
        COMPLETIONS,
        {
            "prompt": "Call",
            "max_tokens": TOKENS,
            "temperature": 0,
            "structured_outputs": {"regex": "[0-9]{3}-[0-9]{4} (or [0-9]{3} )*"},
            **USAGE,
        },
    ),
    "response": (
        RESPONSES,
        {"input": ASK[0]["content"], "max_output_tokens": TOKENS, "temperature": 0, "store": False},
    ),
    "response with tool": (
        RESPONSES,
        {
            "input": ASK[0]["content"],
            "max_output_tokens": 60,
            "temperature": 0,
            "store": False,
            "tools": [{"type": "function", **TOOL}],
            "tool_choice": "required",
        },
    ),
    "message": (MESSAGES, {"messages": ASK, "max_tokens": TOKENS, "temperature": 0}),
    "message with tool": (
        MESSAGES,
        {
            "messages": ASK,
            "max_tokens": 60,
            "temperature": 0,
            "tools": [{"name": "look_up", "description": "Finds a city", "input_schema": SCHEMA}],
            "tool_choice": {"type": "any"},
        },
    ),
}


@pytest.fixture(scope="module")
def engines(
    small: Artifact, forked: Begin, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[RunningCell, RunningCell]]:
    """Two engines of one version."""
    plan = plan_of(small, enable_auto_tool_choice=True, tool_call_parser="hermes")
    folder = tmp_path_factory.mktemp("continued")
    with (
        running_cell(plan, folder / "first", nodes=1, begin=forked) as first,
        running_cell(plan, folder / "second", nodes=1, begin=forked) as second,
    ):
        yield first, second


def cuts_of(stream: Stream) -> list[int]:
    count = len(stream.groups)
    return sorted({0, 1, count // 2, count - 1, count})


def check_cuts(path: str, body: dict[str, Any], whole: Stream, url: str) -> None:
    """Repeats a stream at another engine, cut after several groups, and the last one again, when it is cached."""
    for cut in (*cuts_of(whole), cuts_of(whole)[-2]):
        again = marked(url, path, body, (whole.prompt, whole.groups[:cut]))
        assert again.status == 200, (cut, again.body)
        assert again.groups[:cut] == whole.groups[:cut], cut
        assert again.prompt == whole.prompt
        assert again.tokens == whole.tokens, cut
        if body.get("logprobs"):
            assert [fixed for fixed, _ in again.merged()] == [fixed for fixed, _ in whole.merged()], cut
        else:
            assert again.merged() == whole.merged(), cut


@pytest.mark.parametrize("name", CASES)
def test_a_stream_continues_as_if_it_was_not_cut(name: str, engines: tuple[RunningCell, RunningCell]) -> None:
    path, body = CASES[name]
    first, second = engines
    whole = marked(first.url, path, body)
    assert whole.status == 200, whole.body
    assert whole.tokens
    plain = sent(first.url, path, json.dumps({"model": "smollm2", "stream": True, **body}), {})
    assert b"\n: " not in plain.body
    assert plain.merged()[-1][1] == whole.merged()[-1][1]
    check_cuts(path, body, whole, second.url)


def test_log_probabilities_of_new_tokens_are_those_of_the_undisturbed_run(
    engines: tuple[RunningCell, RunningCell],
) -> None:
    path, body = CASES["log probabilities"]
    whole = marked(engines[0].url, path, body)
    again = marked(engines[1].url, path, body, (whole.prompt, whole.groups[:10]))
    repeated = sum(map(len, whole.groups[:10]))  # a busy engine puts several tokens into one

    def listed(stream: Stream) -> list[Any]:
        parts = (event["choices"][0]["logprobs"] for event in stream.events() if event["choices"])
        return [each for part in parts if part for each in part["content"]]

    for found, wanted in zip(listed(again)[repeated:], listed(whole)[repeated:], strict=True):
        assert found["token"] == wanted["token"]
        assert found["logprob"] == pytest.approx(wanted["logprob"], abs=1e-3)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_stop_string_that_crosses_the_cut_is_found(path: str, engines: tuple[RunningCell, RunningCell]) -> None:
    first, second = engines
    body = {"max_tokens": TOKENS, "temperature": 0, **USAGE}
    body |= {"prompt": "The capital of France is"} if path == COMPLETIONS else {"messages": ASK}
    text = "".join(
        (event["choices"][0].get("text") or event["choices"][0].get("delta", {}).get("content") or "")
        for event in marked(first.url, path, body).events()
        if event["choices"]
    )
    middle = len(text) // 2
    stopped = {**body, "stop": [text[middle : middle + 12]]}
    whole = marked(first.url, path, stopped)
    assert len(whole.tokens) < TOKENS
    for cut in range(len(whole.groups) + 1):
        again = marked(second.url, path, stopped, (whole.prompt, whole.groups[:cut]))
        assert (again.tokens, again.merged()) == (whole.tokens, whole.merged()), cut


PROMPT = {"prompt": "The capital of France is", "max_tokens": TOKENS, "temperature": 0}


@pytest.mark.parametrize(
    ("groups", "why"),
    [
        ([[10**9]], b"a token is not in this vocabulary"),
        ([[49152]], b"a token is not in this vocabulary"),
        ([[1], []], b"a group is empty"),
        ([[5]] * 2100, b"exceed the context"),
        ([[5] * 200_000], b"exceed the context"),
        ([[5] * (TOKENS + 1)], b"tokens after its end"),
        ([[5]] * (TOKENS + 1), b"tokens after its end"),
        ([[5], [2], [5]], b"tokens after its end"),
    ],
    ids=range(8),
)
def test_tokens_that_no_run_has_are_refused(
    groups: list[list[int]], why: bytes, engines: tuple[RunningCell, RunningCell]
) -> None:
    """2 is this model's end of a turn."""
    url = engines[1].url
    prompt = marked(url, COMPLETIONS, {**PROMPT, "max_tokens": 1}).prompt
    refused = marked(url, COMPLETIONS, PROMPT, (prompt, groups))
    assert (refused.status, why in refused.body) == (409, True), refused.body
    assert b"continuation_refused" in refused.body


def test_what_cannot_continue_is_refused_and_the_engine_lives_on(engines: tuple[RunningCell, RunningCell]) -> None:
    url = engines[1].url
    prompt = marked(url, COMPLETIONS, {**PROMPT, "max_tokens": 1}).prompt
    for given, cut in (
        (PROMPT, ("5:0123456789abcdef", [[5]])),
        ({**PROMPT, "prompt": "Another"}, (prompt, [[5]])),
        ({**PROMPT, "temperature": 1, "n": 2}, (prompt, [[5]])),
        ({**PROMPT, "prompt": ["a", "b"]}, (prompt, [[5]])),
        ({**PROMPT, "echo": True, "logprobs": 1}, (prompt, [[5]])),
    ):
        refused = marked(url, COMPLETIONS, given, cut)
        assert (refused.status, b"continuation_refused" in refused.body) == (409, True), (given, refused.body)
    contradicting = {**PROMPT, "structured_outputs": {"regex": "[0-9]{4}"}}
    failed = marked(url, COMPLETIONS, contradicting, (prompt, [[504]]))
    assert b'"error"' in failed.body
    injected = {**PROMPT, "vllm_xargs": {"switchyard_emitted": [10**9]}}
    assert sent(url, COMPLETIONS, json.dumps({"model": "smollm2", **injected}), {}).status == 400
    several: dict[str, Any] = {"temperature": 1, "n": 2}
    assert sent(url, COMPLETIONS, json.dumps({"model": "smollm2", **injected, **several}), {}).status == 400
    member = {"switchyard_continuation": {"prompt": prompt, "groups": [[5]]}}
    assert sent(url, COMPLETIONS, json.dumps({"model": "smollm2", **PROMPT, **member}), {}).status == 400
    for unmarked in (several, {"prompt": ["a", "b"]}):
        assert b"\n: " not in marked(url, COMPLETIONS, {**PROMPT, **unmarked}).body
    assert marked(url, COMPLETIONS, PROMPT).tokens
    assert CLIENT.get(f"{url}/health").status_code == 200


def test_a_whole_answer_continues(engines: tuple[RunningCell, RunningCell]) -> None:
    first, second = engines
    whole = marked(first.url, COMPLETIONS, PROMPT)
    answers = [
        json.loads(marked(url, COMPLETIONS, {**PROMPT, "stream": False}, cut).body)
        for url, cut in ((first.url, None), (second.url, (whole.prompt, whole.groups[:9])))
    ]
    assert answers[0]["choices"] == answers[1]["choices"]
    assert answers[0]["usage"] == answers[1]["usage"]


def test_the_second_engine_counts_what_it_read_and_generated(engines: tuple[RunningCell, RunningCell]) -> None:
    """As the cell proxy expects: the ledger states the prompt and the new tokens, the counters of the engine have the
    repeated tokens in the prompt. An answer that was complete is in no counter."""
    first, second = engines
    whole = marked(first.url, COMPLETIONS, PROMPT)
    length = int(whole.prompt.partition(":")[0])
    names = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total")

    def counts() -> tuple[float, ...]:
        apart = CLIENT.get(f"{second.url}{COUNTED_APART_PATH}").json()
        return (*map(second.metric, names), apart["prompt_tokens"], apart["completion_tokens"])

    for cut, grown in ((9, (length + 9, TOKENS - 9, 0, 0)), (TOKENS, (0, 0, -length - TOKENS, 0))):
        before = counts()
        exchange = f"cut-after-{cut}"
        headers = {EXCHANGE_HEADER.decode(): exchange}
        marked(second.url, COMPLETIONS, PROMPT, (whole.prompt, whole.groups[:cut]), headers)
        usage = CLIENT.get(f"{second.url}{USAGE_PATH}?exchange={exchange}").json()
        assert usage == {"prompt_tokens": length, "cached_tokens": 0, "completion_tokens": TOKENS - cut}
        assert tuple(now - then for now, then in zip(counts(), before, strict=True)) == grown


def test_cells_of_several_nodes_continue(small: Artifact, forked: Begin, tmp_path: Path) -> None:
    plan = plan_of(small, nodes=2)
    with running_cell(plan, tmp_path / "cell", nodes=2, begin=forked) as cell:
        for name in ("chat", "penalties", "schema", "seed"):
            path, body = CASES[name]
            whole = marked(cell.url, path, body)
            check_cuts(path, body, whole, cell.url)


def test_a_killed_engines_stream_continues(
    engines: tuple[RunningCell, RunningCell], small: Artifact, forked: Begin, tmp_path: Path
) -> None:
    body = {**GREEDY, "max_tokens": 200, "ignore_eos": True}
    whole = marked(engines[0].url, CHAT, body)
    with running_cell(plan_of(small), tmp_path / "killed", nodes=1, begin=forked) as killed:
        stream = cut_after(killed.url, CHAT, body, 20)
        next(stream)
        core = next(part for part in killed.parts(0) if part.pid != killed.ranks[0].pid)
        core.kill()
        *_, cut = stream
    assert 20 <= len(cut.groups) < 200
    again = marked(engines[1].url, CHAT, body, (cut.prompt, cut.groups))
    assert (again.tokens, again.merged()) == (whole.tokens, whole.merged())
