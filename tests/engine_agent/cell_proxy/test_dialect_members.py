"""Members that engines read otherwise than the dialect of their path says."""

import json

import pytest

from engine_agent.cell_proxy.rewrite import BadBody, rewrite_body
from engine_agent.protocol.request_bodies import BadRequest
from tests.engine_agent.cell_proxy.local_proxy import proxy_of
from tests.engine_agent.cell_proxy.test_surface import ask

CHAT, COMPLETIONS, RESPONSES = b"/v1/chat/completions", b"/v1/completions", b"/v1/responses"
MESSAGES, COUNT = b"/v1/messages", b"/v1/messages/count_tokens"
FUNCTION = b'{"type":"function","function":{"name":"f"}}'


@pytest.mark.parametrize("value", [b'"true"', b"1", b"0", b"[]", b"{}", b'"x"'])
@pytest.mark.parametrize(
    ("path", "name"),
    [
        *((CHAT, "stream"), (CHAT, "store"), (COMPLETIONS, "stream"), (MESSAGES, "stream")),
        *((RESPONSES, "stream"), (RESPONSES, "store"), (RESPONSES, "background")),
    ],
)
def test_what_is_true_or_false_is_nothing_else(path: bytes, name: str, value: bytes) -> None:
    with pytest.raises(BadRequest, match=f"`{name}` must be true or false") as refused:
        rewrite_body(path, b'{"model":"m","%b":%b}' % (name.encode(), value), None)
    assert (refused.value.param, refused.value.code) == (name, "invalid_type")


@pytest.mark.parametrize("value", [b"true", b"false", b"null"])
def test_true_false_and_null_pass(value: bytes) -> None:
    for path in (CHAT, COMPLETIONS, MESSAGES):
        rewrite_body(path, b'{"model":"m","stream":%b}' % value, None)
    rewrite_body(CHAT, b'{"model":"m","store":%b}' % value, None)


@pytest.mark.parametrize("value", [b"5", b"[]", b"{}", b"true"])
def test_a_previous_response_has_an_id(value: bytes) -> None:
    with pytest.raises(BadRequest) as refused:
        rewrite_body(RESPONSES, b'{"model":"m","previous_response_id":%b}' % value, None)
    assert (refused.value.param, refused.value.code) == ("previous_response_id", "invalid_type")


@pytest.mark.parametrize(
    "kind", ["web_search", "file_search", "mcp", "code_interpreter", "image_generation", "nonsense"]
)
@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_tools_that_no_client_carries_out_are_refused_by_name(path: bytes, kind: str) -> None:
    body = b'{"model":"m","tools":[%b,{"type":"%b"}]}' % (FUNCTION, kind.encode())
    with pytest.raises(BadRequest, match=rf"tools\[1\].*{kind}.*function") as refused:
        rewrite_body(path, body, None)
    assert (refused.value.param, refused.value.code) == ("tools", "invalid_value")


@pytest.mark.parametrize("kind", ["web_search_20250305", "bash_20250124", "function"])
@pytest.mark.parametrize("path", [MESSAGES, COUNT])
def test_so_are_those_of_anthropics_servers(path: bytes, kind: str) -> None:
    tool = b'{"name":"f","input_schema":{}}'
    with pytest.raises(BadRequest, match=rf"tools\[1\].*{kind}.*custom") as refused:
        rewrite_body(path, b'{"model":"m","tools":[%b,{"type":"%b","name":"f"}]}' % (tool, kind.encode()), None)
    assert (refused.value.param, refused.value.code) == ("tools", "invalid_value")
    assert rewrite_body(path, b'{"model":"m","tools":[{"type":"custom","name":"f"}]}', None).members == b""


@pytest.mark.parametrize("tools", [b"[%b]" % FUNCTION, b"null", b"5", b"[5]", b"[{}]", b'[{"type":5}]', b'{"a":1}'])
def test_of_other_tools_the_engine_is_the_judge(tools: bytes) -> None:
    for path in (CHAT, RESPONSES):
        assert rewrite_body(path, b'{"model":"m","tools":%b}' % tools, None).members == b""


@pytest.mark.parametrize(
    ("member", "code"),
    [
        (b'"top_k":-2', "invalid_value"),
        (b'"max_tokens":"%d"' % (10**30), "invalid_value"),
        (b'"temperature":"hot"', "invalid_type"),
        (b'"temperature":2.1', "invalid_value"),
        (b'"stop":5', "invalid_type"),
        (b'"stop_token_ids":[1,"x"]', "invalid_type"),
        (b'"logit_bias":[1]', "invalid_type"),
        (b'"bad_words":"x"', "invalid_type"),
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES, MESSAGES])
def test_values_at_which_an_engine_fails_do_not_reach_it(path: bytes, member: bytes, code: str) -> None:
    with pytest.raises(BadRequest) as refused:
        rewrite_body(path, b'{"model":"m",%b}' % member, None)
    assert (refused.value.param, refused.value.code) == (json.loads(b"{%b}" % member).popitem()[0], code)
    assert f"`{refused.value.param}" in str(refused.value)


@pytest.mark.parametrize("value", ["9223372036854775808", "1000000000000000000000000000000", "1e30"])
@pytest.mark.parametrize("name", ["top_k", "seed", "n", "max_tokens", "stop_token_ids"])
def test_no_number_is_beyond_what_an_engine_can_count(name: str, value: str) -> None:
    body = f'{{"model":"m","{name}":{f"[{value}]" if name == "stop_token_ids" else value}}}'
    with pytest.raises((BadRequest, BadBody)):
        rewrite_body(CHAT, body.encode(), None)


NO_TOOLS, NO_CHOICE = b'"tools":null', b'"tools":null,"tool_choice":null'


@pytest.mark.parametrize(
    ("path", "members", "added"),
    [
        *((path, b'"tools":[]', NO_TOOLS) for path in (CHAT, MESSAGES, COUNT)),
        (CHAT, b'"tools":[ \n]', NO_TOOLS),
        *((CHAT, b'"tools":[],"tool_choice":' + choice, NO_CHOICE) for choice in (b'"auto"', b'"none"', b"null")),
        (MESSAGES, b'"tools":[],"tool_choice":{"type":"auto"}', NO_CHOICE),
        *((CHAT, b'"tools":[],"tool_choice":' + choice, b"") for choice in (b'"required"', b'{"type":"function"}')),
        (CHAT, b'"tools":[%b]' % FUNCTION, b""),
        (RESPONSES, b'"tools":[]', b""),
    ],
)
def test_an_empty_list_of_tools_is_none(path: bytes, members: bytes, added: bytes) -> None:
    assert rewrite_body(path, b'{"model":"m",%b}' % members, None).members == added


@pytest.mark.asyncio
async def test_the_answer_names_the_member_and_the_engine_gets_nothing() -> None:
    async with proxy_of() as proxy:
        for path in ("/v1/responses", "/v1/messages"):
            answer = await ask(proxy, path, b'{"model":"m","stream":"x"}')
            error = answer.json()["error"]
            assert (answer.status, error["type"], error["code"]) == (400, "invalid_request_error", "invalid_type")
            assert error["param"] == "stream"
        assert proxy.engine.requests == []
        assert (await ask(proxy, "/v1/chat/completions", b'{"model":"m","tools":[]}')).status == 200
        assert json.loads(proxy.engine.requests[0].body)["tools"] is None
