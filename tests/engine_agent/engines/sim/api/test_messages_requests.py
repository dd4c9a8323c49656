"""Bodies of /v1/messages."""

import pytest

from engine_agent.engines.sim.api.messages import parse_count, parse_messages
from engine_agent.engines.sim.planning.generation_request import ToolChoice
from engine_agent.protocol.request_bodies import BadRequest

USER = b'{"role": "user", "content": "hi"}'


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
