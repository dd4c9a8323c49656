"""The leader's HTTP as clients meet it."""

import json
from contextlib import ExitStack
from typing import Any

import httpx
import openai
import pytest

from tests.asking import CLIENT
from tests.engine_agent.engines.sim.cells import CHAT, ENDLESS, MODEL, Member, until

pytestmark = pytest.mark.processes


def events(text: str) -> list[Any]:
    return [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: {")]


def test_a_golden_prompt_gets_its_fixed_answer(leader: Member) -> None:
    asked = {**CHAT, "messages": [{"role": "user", "content": "ping"}]}

    answer = leader.chat(asked).json()

    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "pong"}
    assert answer["choices"][0]["finish_reason"] == "stop"
    counts = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    assert answer["usage"] == {**counts, "prompt_tokens_details": {"cached_tokens": 0}}


def test_a_stream_has_vllms_shape(leader: Member) -> None:
    asked = {**CHAT, "stream": True, "max_tokens": 3, "stream_options": {"include_usage": True}}

    answer = leader.chat(asked)

    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.text.endswith("data: [DONE]\n\n")
    role, first, second, third, usage = events(answer.text)
    assert {event["object"] for event in (role, first, usage)} == {"chat.completion.chunk"}
    assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [event["choices"][0]["finish_reason"] for event in (first, second, third)] == [None, None, "length"]
    assert usage["choices"] == []
    counts = {"prompt_tokens": 4, "completion_tokens": 3, "total_tokens": 7}
    assert usage["usage"] == {**counts, "prompt_tokens_details": {"cached_tokens": 0}}


def test_the_streamed_text_is_the_whole_text(leader: Member) -> None:
    whole = leader.chat(CHAT).json()["choices"][0]["message"]["content"]
    streamed = events(leader.chat({**CHAT, "stream": True}).text)

    assert "".join(event["choices"][0]["delta"]["content"] for event in streamed) == whole


def test_the_official_client_streams_chats_and_completes_prompts(leader: Member) -> None:
    with openai.OpenAI(base_url=f"{leader.url}/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == [MODEL]
        chat = client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "ping"}], stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chat) == "pong"
        pieces = client.completions.create(model=MODEL, prompt="tell me", max_tokens=5, stream=True)
        assert len("".join(piece.choices[0].text for piece in pieces).split()) == 5
        with pytest.raises(openai.NotFoundError, match="`other` does not exist"):
            client.chat.completions.create(model="other", messages=[{"role": "user", "content": "ping"}])


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "message"),
    [
        ("/v1/chat/completions", b"{", 400, None, "not JSON"),
        ("/v1/chat/completions", b'{"model": "sim-70b"}', 400, "messages", "`messages`"),
        ("/v1/completions", b'{"model": "sim-70b"}', 400, "prompt", "`prompt`"),
        ("/v1/completions", b'{"model": "x", "prompt": "hi"}', 404, "model", "`x` does not exist"),
        ("/v1/completions", b'{"model": "sim-70b", "prompt": "hi", "max_tokens": 9000}', 400, "max_tokens", "8192"),
        ("/v1/chat/completions", b" " * (4 * 1024 * 1024 + 1), 413, None, "exceeds"),
        ("/v1/embeddings", b"{}", 400, "model", "`model`"),
        ("/v1/embeddings", b'{"model": "sim-70b", "input": "%s"}' % (b"a " * 8193), 400, "input", "8192"),
        ("/v1/responses", b'{"model": "x", "input": "hi"}', 404, "model", "`x` does not exist"),
        ("/v1/audio/transcriptions", b"{}", 404, None, "Not Found"),
        ("/v1/models", b"{}", 405, None, "Method Not Allowed"),
    ],
)
def test_errors_are_openais(
    leader: Member, path: str, body: bytes, status: int, param: str | None, message: str
) -> None:
    answer = CLIENT.post(f"{leader.url}{path}", content=body)

    assert answer.status_code == status
    error = answer.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert message in error["message"]


def test_a_prompt_longer_than_the_context_is_refused_by_name(leader: Member) -> None:
    answer = CLIENT.post(f"{leader.url}/v1/completions", json={"model": MODEL, "prompt": "word " * 8192})

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")


def test_a_request_ends_when_its_client_leaves(leader: Member) -> None:
    with leader.streaming(ENDLESS):
        assert leader.metric("vllm:num_requests_running") == 1
        assert leader.metric("vllm:kv_cache_usage_perc") > 0

    until(lambda: leader.metric("vllm:num_requests_running") == 0, leader.output)


def test_all_answers_end_when_their_client_leaves(leader: Member) -> None:
    with leader.streaming({**ENDLESS, "n": 3}):
        until(lambda: leader.metric("vllm:num_requests_running") == 3, leader.output)

    until(lambda: leader.metric("vllm:num_requests_running") == 0, leader.output)


def test_requests_beyond_the_batch_wait_and_give_up_their_place_when_the_client_leaves(leader: Member) -> None:
    with ExitStack() as streams:
        for _ in range(4):
            streams.enter_context(leader.streaming(ENDLESS))
        with pytest.raises(httpx.ReadTimeout):
            leader.chat(CHAT, timeout_s=0.3)
        until(lambda: leader.metric("vllm:num_requests_waiting") == 0, leader.output)
        assert leader.metric("vllm:num_requests_running") == 4

    until(lambda: leader.metric("vllm:num_requests_running") == 0, leader.output)


def test_tokens_and_times_are_counted(leader: Member) -> None:
    names = ("prompt_tokens_total", "generation_tokens_total", "time_to_first_token_seconds_count")
    before = [leader.metric(f"vllm:{name}") for name in (*names, "inter_token_latency_seconds_count")]

    leader.chat({**CHAT, "max_tokens": 6}).raise_for_status()

    after = [leader.metric(f"vllm:{name}") for name in (*names, "inter_token_latency_seconds_count")]
    assert [new - old for new, old in zip(after, before, strict=True)] == [4, 6, 1, 5]
