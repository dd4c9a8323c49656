"""Request bodies: what they mean, and which field is named when they are wrong."""

import pytest

from engine_agent.engines.sim.openai_requests import BadRequest, parse_chat, parse_completion


def test_a_chat_is_counted_whole_and_answered_to_its_last_message() -> None:
    ask = parse_chat(
        b'{"model": "m", "temperature": 0.7, "messages": [{"role": "system", "content": "be kind"},'
        b'{"role": "user", "content": [{"type": "text", "text": "how are you"}, {"type": "image_url"}]}]}'
    )

    assert (ask.prompt, ask.prompt_tokens, ask.output_limit) == ("how are you", 5, None)
    assert not ask.stream


def test_stream_options_and_the_newer_name_of_max_tokens_are_understood() -> None:
    ask = parse_chat(
        b'{"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 7, "max_tokens": 9,'
        b'"stream": true, "stream_options": {"include_usage": true}, "ignore_eos": true, "seed": 4, "priority": -1}'
    )

    assert (ask.output_limit, ask.stream, ask.include_usage) == (7, True, True)
    assert (ask.exact_length, ask.seed, ask.priority) == (True, 4, -1)


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [(b'"two words"', 2), (b'["two words"]', 2), (b"[5, 6, 7]", 3), (b"[[5, 6, 7]]", 3)],
)
def test_a_completion_takes_one_text_or_one_list_of_token_ids(prompt: bytes, tokens: int) -> None:
    ask = parse_completion(b'{"model": "m", "prompt": %s}' % prompt)

    assert (ask.prompt_tokens, ask.output_limit) == (tokens, 16)


@pytest.mark.parametrize("prompt", [b"3", b"[]", b'["a", "b"]', b'[1, "b"]', b"[true]"])
def test_other_prompts_are_refused_by_name(prompt: bytes) -> None:
    with pytest.raises(BadRequest) as refused:
        parse_completion(b'{"model": "m", "prompt": %s}' % prompt)

    assert refused.value.param == "prompt"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"not json", None),
        (b"\xff\xfe", None),
        (b"[]", None),
        (b'{"messages": [{"role": "user"}]}', "model"),
        (b'{"model": "m"}', "messages"),
        (b'{"model": "m", "messages": []}', "messages"),
        (b'{"model": "m", "messages": [{"content": "x"}]}', "messages"),
        (b'{"model": "m", "messages": [{"role": "user"}], "max_tokens": 0}', "max_tokens"),
        (b'{"model": "m", "messages": [{"role": "user"}], "stream": "yes"}', "stream"),
        (b'{"model": "m", "messages": [{"role": "user"}], "n": 2}', "n"),
    ],
)
def test_a_bad_chat_is_refused_by_the_name_of_its_field(body: bytes, param: str | None) -> None:
    with pytest.raises(BadRequest) as refused:
        parse_chat(body)

    assert refused.value.param == param
    assert refused.value.status == 400
