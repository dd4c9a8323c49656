"""The meaning of requests, by family of paths."""

import pytest

from engine_agent.engines.sim.api.chat import parse_chat
from engine_agent.engines.sim.api.completions import parse_completion
from engine_agent.engines.sim.api.messages import parse_count, parse_messages
from engine_agent.engines.sim.api.responses import parse_responses
from engine_agent.engines.sim.planning.generation_request import OutputForm, Stops, ToolChoice
from engine_agent.protocol.request_bodies import BadRequest


def test_a_chat_is_counted_whole_and_answered_to_its_last_message() -> None:
    ask = parse_chat(
        b'{"model": "m", "temperature": 0.7, "messages": [{"role": "system", "content": "be kind"},'
        b'{"role": "user", "content": [{"type": "text", "text": "how are"}, {"type": "text", "text": "you"}]}]}'
    )

    assert (ask.prompt.answered, ask.prompt.tokens, ask.output_limit) == ("how are you", 5, None)
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

    assert (ask.prompt.tokens, ask.output_limit) == (tokens, 16)


@pytest.mark.parametrize("prompt", [b"3", b"[]", b'[1, "b"]', b"[true]", b"[-1]", b"[[1], []]", b'""', b"null"])
def test_other_prompts_are_refused_by_name(prompt: bytes) -> None:
    with pytest.raises(BadRequest) as refused:
        parse_completion(b'{"model": "m", "prompt": %s}' % prompt)

    assert refused.value.param == "prompt"


def test_several_prompts_are_read_each_for_itself() -> None:
    texts = parse_completion(b'{"model": "m", "prompt": ["a b", "c"], "n": 2, "max_tokens": 3}')
    ids = parse_completion(b'{"model": "m", "prompt": [[5, 6], [7]]}')

    assert [prompt.tokens for prompt in texts.prompts] == [2, 1]
    assert (texts.choices, texts.output_limit) == (2, 3)
    assert [prompt.answered for prompt in ids.prompts] == ["5 6", "7"]


TOOL = b'{"type": "function", "function": {"name": "add", "description": "two", "parameters": {"type": "object"}}}'
USER = b'{"role": "user", "content": "hi"}'


def chat(more: bytes, messages: bytes = USER) -> bytes:
    return b'{"model": "m", "messages": [%s], %s}' % (messages, more)


@pytest.mark.parametrize(
    ("more", "choice"),
    [
        (b'"tools": [%s]' % TOOL, ToolChoice("auto")),
        (b'"tools": [%s], "tool_choice": "none"' % TOOL, ToolChoice()),
        (
            b'"tools": [%s], "tool_choice": "required", "parallel_tool_calls": false' % TOOL,
            ToolChoice("required", "", False),
        ),
        (
            b'"tools": [%s], "tool_choice": {"type": "function", "function": {"name": "add"}}' % TOOL,
            ToolChoice("named", "add"),
        ),
        (b'"tool_choice": "none"', ToolChoice()),
    ],
)
def test_tools_and_their_choice(more: bytes, choice: ToolChoice) -> None:
    assert parse_chat(chat(more)).tool_choice == choice


def test_tools_are_read_before_the_conversation_and_results_of_tools_are_known() -> None:
    called = (
        b'{"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": '
        b'{"name": "add", "arguments": "{}"}}]}'
    )
    ask = parse_chat(chat(b'"tools": [%s]' % TOOL, USER + b"," + called + b', {"role": "tool", "content": "5"}'))

    assert ask.prompt.texts == ('add two {"type":"object"}', "hi", "add {}", "5")
    assert (ask.prompt.follows_tool, ask.prompt.answered) == (True, "5")


SCHEMA = {"type": "object"}


@pytest.mark.parametrize(
    ("more", "form"),
    [
        (b'"response_format": {"type": "text"}', None),
        (
            b'"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}',
            OutputForm("json", SCHEMA, "response_format"),
        ),
        (b'"structured_outputs": {"json": {"type": "object"}}', OutputForm("json", SCHEMA, "structured_outputs")),
        (
            b'"structured_outputs": {"json": "{\\"type\\": \\"object\\"}"}',
            OutputForm("json", SCHEMA, "structured_outputs"),
        ),
        (b'"structured_outputs": {"choice": ["a"]}', OutputForm("choice", ["a"], "structured_outputs")),
        (b'"structured_outputs": {"regex": "a+"}', OutputForm("regex", "a+", "structured_outputs")),
    ],
)
def test_what_the_text_must_be(more: bytes, form: OutputForm | None) -> None:
    assert parse_chat(chat(more)).form == form


def test_stops_are_one_text_or_several() -> None:
    one = parse_chat(chat(b'"stop": "x", "include_stop_str_in_output": true'))
    several = parse_chat(chat(b'"stop": ["x", "y"], "stop_token_ids": [3]'))

    assert one.stops == Stops(("x",), frozenset(), True)
    assert several.stops == Stops(("x", "y"), frozenset({3}))


@pytest.mark.parametrize(
    ("more", "param"),
    [
        (b'"n": 129', "n"),
        (b'"structured_outputs": {"grammar": "a"}', "structured_outputs"),
        (b'"structured_outputs": {"choice": []}', "structured_outputs"),
        (b'"structured_outputs": {"choice": ["a"], "regex": "b"}', "structured_outputs"),
        (b'"structured_outputs": {"json": "{"}', "structured_outputs"),
        (b'"response_format": {"type": "json_schema"}', "response_format"),
        (b'"response_format": {"type": "structural_tag"}', "response_format"),
        (b'"response_format": {"type": "xml"}', "response_format"),
        (b'"stream_options": {"include_usage": true}', "stream_options"),
        (b'"stop": ["a", ""]', "stop"),
        (b'"min_tokens": 5, "max_tokens": 4', "min_tokens"),
        (b'"top_logprobs": 2', "top_logprobs"),
        (b'"logprobs": true, "top_logprobs": 21', "top_logprobs"),
        (b'"stream": true, "prompt_logprobs": 1', "prompt_logprobs"),
        (b'"tools": []', "tools"),
        (b'"tools": [{"type": "function", "function": {"name": ""}}]', "tools"),
        (b'"tool_choice": "auto"', "tool_choice"),
        (b'"tools": [%s], "tool_choice": "any"' % TOOL, "tool_choice"),
        (b'"tools": [%s], "tool_choice": {"type": "function", "function": {"name": "b"}}' % TOOL, "tool_choice"),
        (b'"reasoning_effort": "great"', "reasoning_effort"),
        (b'"max_completion_tokens": 0', "max_completion_tokens"),
        (b'"seed": 9223372036854775808', "seed"),
        (b'"x": ' + b"[" * 100_000 + b"]" * 100_000, None),
    ],
)
def test_what_is_not_done_is_refused_by_name(more: bytes, param: str | None) -> None:
    with pytest.raises(BadRequest) as refused:
        parse_chat(chat(more))

    assert (refused.value.param, refused.value.status) == (param, 400)


@pytest.mark.parametrize(
    ("more", "param"),
    [
        (b'"suffix": "x"', "suffix"),
        (b'"prompt_embeds": "x"', "prompt_embeds"),
        (b'"max_tokens": 0', "max_tokens"),
        (b'"logprobs": -1', "logprobs"),
        (b'"n": 128', "n"),
    ],
)
def test_what_completions_do_not_do_is_refused_by_name(more: bytes, param: str) -> None:
    with pytest.raises(BadRequest) as refused:
        parse_completion(b'{"model": "m", "prompt": ["a", "b", "c"], %s}' % more)

    assert refused.value.param == param


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
    ],
)
def test_a_bad_chat_is_refused_by_the_name_of_its_field(body: bytes, param: str | None) -> None:
    with pytest.raises(BadRequest) as refused:
        parse_chat(body)

    assert refused.value.param == param
    assert refused.value.status == 400


def test_messages_of_anthropic() -> None:
    body = (
        b'{"model": "m", "max_tokens": 9, "system": [{"type": "text", "text": "be kind"}], "stop_sequences": ["x"],'
        b'"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": [{"type": "tool_use",'
        b'"id": "1", "name": "add", "input": {"a": 1}}]}, {"role": "user", "content": [{"type": "tool_result",'
        b'"tool_use_id": "1",'
        b'"content": [{"type": "text", "text": "5"}]}]}], "tools": [{"name": "add",'
        b'"input_schema": {"type": "object"}}],'
        b'"tool_choice": {"type": "any", "disable_parallel_tool_use": true}}'
    )
    ask = parse_messages(body)

    assert ask.prompt.texts == ('add  {"type":"object"}', "be kind", "hi", 'add {"a":1}', "5")
    assert (ask.prompt.follows_tool, ask.output_limit, ask.stops.texts) == (True, 9, ("x",))
    assert ask.tool_choice == ToolChoice("required", "", False)
    assert parse_count(body)[1].tokens == ask.prompt.tokens == 8


@pytest.mark.parametrize(
    ("more", "param"),
    [
        (b'"max_tokens": 0', "max_tokens"),
        (b'"system": "x"', "max_tokens"),
        (b'"max_tokens": 5, "tool_choice": {"type": "tool"}', "tool_choice"),
        (b'"max_tokens": 5, "tool_choice": {"type": "any"}', "tool_choice"),
        (b'"max_tokens": 5, "stop_sequences": [""]', "stop_sequences"),
    ],
)
def test_a_bad_message_is_refused_by_the_name_of_its_field(more: bytes, param: str) -> None:
    with pytest.raises(BadRequest) as refused:
        parse_messages(b'{"model": "m", "messages": [%s], %s}' % (USER, more))

    assert refused.value.param == param


def test_a_response_is_asked_for_by_a_text_or_by_items() -> None:
    text = parse_responses(b'{"model": "m", "input": "hi you", "instructions": "be kind", "max_output_tokens": 7}')
    items = parse_responses(
        b'{"model": "m", "input": [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]},'
        b'{"type": "reasoning", "summary": []}, {"type": "function_call", "name": "add", "arguments": "{}", "call_id":'
        b' "1"},'
        b'{"type": "function_call_output", "call_id": "1", "output": "5"}],'
        b'"tools": [{"type": "function", "name": "add"}]}'
    )

    assert (text.generation.prompt.texts, text.generation.prompt.tokens) == (("be kind", "hi you"), 4)
    assert (text.generation.output_limit, text.repeated["instructions"]) == (7, "be kind")
    assert items.generation.prompt.texts == ("add  null", "hi", "add {}", "5")
    assert items.generation.prompt.follows_tool
    assert items.generation.tool_choice == ToolChoice("auto")


@pytest.mark.parametrize(
    ("more", "param", "status"),
    [
        (b'"previous_response_id": "resp_1"', "previous_response_id", 404),
        (b'"background": true', "background", 400),
        (b'"conversation": "c"', "conversation", 400),
        (b'"tools": [{"type": "web_search"}]', "tools", 400),
        (b'"tool_choice": "required"', "tool_choice", 400),
        (b'"tool_choice": {"type": "mcp", "name": "x"}', "tool_choice", 400),
        (b'"tool_choice": {"type": "function"}', "tool_choice", 400),
        (b'"max_output_tokens": 0', "max_output_tokens", 400),
    ],
)
def test_what_responses_do_not_do_is_refused_by_name(more: bytes, param: str, status: int) -> None:
    with pytest.raises(BadRequest) as refused:
        parse_responses(b'{"model": "m", "input": "hi", %s}' % more)

    assert (refused.value.param, refused.value.status) == (param, status)


@pytest.mark.parametrize("items", [b"[]", b"3", b'[{"type": "item_reference", "id": "x"}]', b'[{"type": "reasoning"}]'])
def test_an_input_of_other_items_is_refused(items: bytes) -> None:
    with pytest.raises(BadRequest) as refused:
        parse_responses(b'{"model": "m", "input": %s}' % items)

    assert refused.value.param == "input"
