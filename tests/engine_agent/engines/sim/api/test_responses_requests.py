"""Bodies of /v1/responses."""

import pytest

from engine_agent.engines.sim.api.responses import parse_responses
from engine_agent.engines.sim.planning.generation_request import ToolChoice
from engine_agent.protocol.request_bodies import BadRequest


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
