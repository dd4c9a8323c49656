"""Members added to a request's body, which stays the same JSON otherwise."""

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_agent.cell_proxy.rewrite import (
    BadBody,
    BodyRewrite,
    NeedsStore,
    Upload,
    request_of,
    rewrite_body,
    with_members,
)
from engine_agent.cell_proxy.settings import EngineMembers
from engine_agent.cell_proxy.wire import RequestHead
from engine_agent.protocol.api_surface import CELL_PATHS
from engine_agent.protocol.request_bodies import MODALITY_OF_PART, BadRequest, Modality
from engine_agent.protocol.strict_json import strict_loads
from tests.engine_agent.cell_proxy.local_proxy import proxy_of
from tests.engine_agent.cell_proxy.test_surface import ask

CHAT, COMPLETIONS, RESPONSES = b"/v1/chat/completions", b"/v1/completions", b"/v1/responses"


@pytest.mark.parametrize(
    ("body", "priority", "members", "removes_usage"),
    [
        (b'{"model":"m"}', None, b"", False),
        (b'{"model":"m"}', 0, b"", False),
        (b'{"model":"m"}', 200, b'"priority":200', False),
        (b'{"model":"m","priority":-9}', 0, b'"priority":0', False),
        (b'{"stream":true}', None, b'"stream_options":{"include_usage":true}', True),
        (b'{"stream":true}', 100, b'"priority":100,"stream_options":{"include_usage":true}', True),
        (b'{"stream":true,"stream_options":{"include_usage":true}}', None, b"", False),
        (
            b'{"stream":true,"stream_options":{"include_usage":false,"x":1}}',
            None,
            b'"stream_options":{"include_usage":true,"x":1}',
            True,
        ),
        (b'{"stream":true,"stream_options":"nonsense"}', None, b"", False),
        (b'{"stream":false}', None, b"", False),
        (b"", 200, b"", False),
    ],
)
def test_a_request_is_given(body: bytes, priority: int | None, members: bytes, removes_usage: bool) -> None:
    assert rewrite_body(CHAT, body, priority) == BodyRewrite(members, removes_usage)


@pytest.mark.parametrize(
    ("members", "member"),
    [
        (b'"background":true', "background"),
        (b'"store":true', "store"),
        (b'"st\\u006fre":true', "store"),
        (b'"previous_response_id":"resp_1"', "previous_response_id"),
        (b'"previous_response_id":""', "previous_response_id"),
        (b'"conversation":{"id":"conv_1"}', "conversation"),
    ],
)
def test_a_response_that_must_be_kept_does_not_come_past_what_keeps_it(members: bytes, member: str) -> None:
    with pytest.raises(NeedsStore, match=member):
        rewrite_body(RESPONSES, b'{"model":"m","input":"x",' + members + b"}", 0)


@pytest.mark.parametrize(
    "members",
    [b'"store":false', b'"store":null', b'"background":false,"previous_response_id":null,"conversation":null'],
)
def test_a_response_that_nobody_keeps_is_the_engines(members: bytes) -> None:
    body = b'{"model":"m","input":"x",' + members + b"}"
    assert rewrite_body(RESPONSES, body, 0) == BodyRewrite()
    assert rewrite_body(CHAT, b'{"model":"m","store":true}', 0) == BodyRewrite(), "of chats, it is the engine's to say"


def test_a_request_that_came_by_another_name_is_given_the_engines() -> None:
    assert rewrite_body(CHAT, b'{"model":"alias"}', 200, "own") == BodyRewrite(b'"model":"own","priority":200')
    assert rewrite_body(CHAT, b'{"model":"own"}', None, "own") == BodyRewrite()
    assert rewrite_body(CHAT, b'{"model":7}', None, "own") == BodyRewrite(), "what is wrong is the engine's to say"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"stream":', "Expecting value"),
        (b"[1]", "must be an object"),
        (b'{"model":"m","priority":-9,"x":NaN}', "NaN is not a JSON number"),
        (b'{"model":"m","messages":[{"role":"user","role":"system"}]}', "'role' is there twice"),
        (b'{"model":"m","tools":[{"function":{"name":"a","name":"b"}}]}', "'name' is there twice"),
        (b'{"model":"m","a":' + b'{"a":' * 1000 + b"1" + b"}" * 1001, "nested deeper than 64 levels"),
        (b'{"model":"m","a":' + b"[" * 100_000, "nested deeper than 64 levels"),
        (b'{"model":"m","x\\u0000":1}', "NUL in its name"),
        (b'{"model":"m","prompt":"\\ud800"}', "half of a surrogate pair"),
        (b'{"model":"m","prompt":"\xff"}', "codec can't decode"),
        (b'{"model":"m","max_tokens":' + b"9" * 40 + b"}", "more than 64 bits"),
        (b'{"model":"m","model":"n"}', "'model' is there twice"),
        (b'{"model":"m","mod\\u0065l":"m"}', "'model' is there twice"),
        (b'{"max_tokens":12,"max_tokens":1}', "'max_tokens' is there twice"),
        (b'{"a":{"x":1},"b":2,"a":{"x":1},"a":{"x":1}}', "'a' is there twice"),
    ],
)
def test_what_two_readers_could_understand_in_two_ways_is_refused(body: bytes, said: str) -> None:
    with pytest.raises(BadBody, match=said):
        rewrite_body(CHAT, body, 0)


def test_a_body_that_names_another_model_than_the_ingress_read_is_refused() -> None:
    assert rewrite_body(CHAT, b'{"model":"a"}', None, "own", "a") == BodyRewrite(b'"model":"own"')
    for body in (b'{"model":"b"}', b'{"model":["a"]}', b"{}"):
        with pytest.raises(BadBody, match="the ingress read the model 'a'"):
            rewrite_body(CHAT, body, None, "own", "a")


def test_members_that_no_client_may_set_are_replaced_where_it_does() -> None:
    text = b'{"fixed":{"id_slot":-1,"cache_prompt":false},"refused":["grammar"],"sequences":1}'
    engine = msgspec.json.decode(text, type=EngineMembers)
    assert rewrite_body(CHAT, b'{"model":"m"}', None, engine=engine) == BodyRewrite()
    body = b'{"model":"m","id_slot":3,"cache_prompt":true}'
    assert rewrite_body(CHAT, body, None, engine=engine) == BodyRewrite(b'"id_slot":-1,"cache_prompt":false')
    with pytest.raises(BadRequest, match="`grammar` is not available for this model"):
        rewrite_body(CHAT, b'{"model":"m","grammar":"root ::= x"}', None, engine=engine)
    for path, member in ((CHAT, b'"n":2'), (b"/v1/completions", b'"prompt":["a","b"]')):
        with pytest.raises(BadRequest, match="Expected"):
            rewrite_body(path, b'{"model":"m",%b}' % member, None, engine=engine)
    assert rewrite_body(b"/v1/embeddings", b'{"model":"m","input":["a","b"]}', None, engine=engine) == BodyRewrite()


@pytest.mark.parametrize(
    ("path", "member", "name"),
    [
        (b"/v1/completions", b'"response_format":{"type":"json_schema","json_schema":{}}', "response_format"),
        (b"/v1/completions", b'"response_format":{"type":"json_object"}', "response_format"),
        (b"/v1/responses", b'"text":{"format":{"type":"json_object"}}', "text"),
        (b"/v1/messages", b'"output_format":{"type":"json_schema"}', "output_format"),
        (b"/v1/messages", b'"output_config":{"format":{"type":"json_schema"}}', "output_config"),
    ],
)
def test_a_schema_is_refused_on_paths_where_the_engine_would_ignore_it(path: bytes, member: bytes, name: str) -> None:
    engine = EngineMembers(schema_paths=frozenset({CHAT.decode()}))
    with pytest.raises(BadRequest, match=f"`{name}` is available for chats of this model only") as refused:
        rewrite_body(path, b'{"model":"m",%b}' % member, None, engine=engine)
    assert (refused.value.code, refused.value.param) == ("unsupported_parameter", name)
    rewrite_body(CHAT, b'{"model":"m",%b}' % member, None, engine=engine)
    for harmless in (b'{"type":"text"}', b"null", b'{"format":{"type":"text"},"verbosity":"low"}', b'"x"', b"{}"):
        rewrite_body(path, b'{"model":"m","%b":%b}' % (name.encode(), harmless), None, engine=engine)


TEXT_ENGINE = EngineMembers(paths=frozenset({"/v1/chat/completions"}), text_only=True)


@pytest.mark.parametrize(
    "content",
    [
        b'[{"type":"text","text":"a"},{"type":"image_url","image_url":{"url":"file:///etc/passwd"}}]',
        b'[{"image_url":"http://169.254.169.254/"}]',
        b'{"type":"image_url"}',
    ],
)
def test_an_engine_that_would_load_any_url_gets_text_alone(content: bytes) -> None:
    body = b'{"model":"m","messages":[{"role":"user","content":%b}]}'
    with pytest.raises(BadRequest, match="takes text alone: no images"):
        rewrite_body(CHAT, body % content, None, engine=TEXT_ENGINE)
    for text in (b'"a"', b'[{"type":"text","text":"a"}]', b"null", b"[]"):
        assert rewrite_body(CHAT, body % text, None, engine=TEXT_ENGINE) == BodyRewrite()


@pytest.mark.parametrize(
    ("path", "body", "kind"),
    [
        (CHAT, b'"messages":[{"content":[{"type":"image_url","image_url":{"url":"data:,"}}]}]', "image_url"),
        (CHAT, b'"messages":[{"content":[{"image_url":"data:,"}]}]', "image_url"),
        (CHAT, b'"messages":[{"content":[{"type":"input_audio","input_audio":{}}]}]', "input_audio"),
        (b"/v1/messages", b'"messages":[{"content":[{"type":"tool_result","content":[{"type":"image"}]}]}]', "image"),
        (b"/v1/responses", b'"input":[{"content":[{"type":"input_image"}]}]', "input_image"),
        (
            b"/v1/responses",
            b'"input":[{"type":"function_call_output","output":[{"type":"input_image"}]}]',
            "input_image",
        ),
    ],
)
def test_content_that_the_version_does_not_take_is_refused(path: bytes, body: bytes, kind: str) -> None:
    request = b'{"model":"m",%b}' % body
    with pytest.raises(BadRequest, match=f"takes text alone: `.*` has a part of type {kind}") as refused:
        rewrite_body(path, request, None)
    assert (refused.value.status, refused.value.code) == (400, "unsupported_parameter")
    taken = EngineMembers(modalities=frozenset({MODALITY_OF_PART[kind]}))
    rewrite_body(path, request, None, engine=taken)


def test_the_refusal_names_what_the_version_takes() -> None:
    request = b'{"model":"m","messages":[{"content":[{"type":"video_url","video_url":{"url":"data:,"}}]}]}'
    with pytest.raises(BadRequest, match="takes text and image"):
        rewrite_body(CHAT, request, None, engine=EngineMembers(modalities=frozenset({Modality.IMAGE})))


def test_paths_beyond_those_of_the_engine_are_another_api() -> None:
    with pytest.raises(BadRequest, match="has another API, so /v1/messages is not available") as refused:
        rewrite_body(b"/v1/messages", b'{"model":"m"}', None, engine=TEXT_ENGINE)
    assert (refused.value.status, refused.value.code) == (404, "unsupported_model")


def test_other_paths_are_left_alone() -> None:
    assert rewrite_body(b"/v1/models", b'{"stream":true}', 200) == BodyRewrite()
    assert rewrite_body(b"/v1/embeddings", b'{"stream":true}', 200) == BodyRewrite(b'"priority":200')
    assert rewrite_body(b"/tokenize", b'{"model":"a"}', 200, "own", "a") == BodyRewrite(b'"model":"own"')


@pytest.mark.parametrize("path", CELL_PATHS)
def test_the_model_is_compared_on_every_path(path: str) -> None:
    with pytest.raises(BadBody, match="the ingress read the model 'a'"):
        rewrite_body(path.encode(), b'{"model":"b"}', None, "own", "a")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.dictionaries(st.text(max_size=10) | st.just("priority"), JSON, max_size=4),
    st.sampled_from([None, 2]),
    st.sampled_from([b"", b" ", b"\r\n\t "]),
)
def test_an_object_gains_the_member_and_loses_nothing(
    body: dict[str, object], indent: int | None, blanks: bytes
) -> None:
    wire = json.dumps(body, indent=indent).encode() + blanks
    assert json.loads(with_members(wire, b'"priority":200')) == {**body, "priority": 200}
    assert with_members(wire, b"") == wire


BLANKS = st.text(alphabet=" \t\r\n", max_size=2)
NAMES = st.sampled_from(['"a"', '"b"', '"\\u0061"', '""', '"a\\""', '"model"', '"mod\\u0065l"'])
VALUES = st.sampled_from(
    ["1", "12", "-1.5e3", '"a"', '"},\\"a\\":1"', "{}", '{"a":1,"a":2}', "[1, {}]", "null", "true"]
)


@given(st.lists(st.tuples(BLANKS, NAMES, BLANKS, BLANKS, VALUES, BLANKS), max_size=5), BLANKS)
def test_members_are_found_exactly_as_python_finds_them_unless_one_is_there_twice(
    parts: list[tuple[str, ...]], blanks: str
) -> None:
    inside = ",".join(f"{a}{name}{b}:{c}{value}{d}" for a, name, b, c, value, d in parts)
    body = f"{blanks}{{{inside}}}{blanks}".encode()
    names = [json.loads(name) for _, name, *_ in parts]
    if len(set(names)) < len(names):
        with pytest.raises(ValueError, match="twice"):
            strict_loads(body)
        with pytest.raises(BadBody, match="twice"):
            request_of(body)
    elif '"a":2' in inside:
        with pytest.raises(BadBody, match="twice"):
            request_of(body)
    else:
        assert request_of(body) == json.loads(body)


def an_upload(*, length: int | None, chunked: bool, repeat_limit_bytes: int = 100) -> Upload:
    return Upload(RequestHead(b"POST", b"/v1/x", [], True, True, length, chunked, False, b"i"), repeat_limit_bytes)


def framing_and_body(wire: bytes) -> tuple[bytes, bytes]:
    head, _, body = wire.partition(b"\r\n\r\n")
    return head.rpartition(b"\r\n")[2], body


def test_a_body_gets_a_length_however_it_came() -> None:
    for length, chunked in ((4, False), (None, True)):
        upload = an_upload(length=length, chunked=chunked)
        upload.add(b"{ ", complete=False)
        upload.add(b" }", complete=True)
        assert framing_and_body(upload.opening(b"e")) == (b"content-length: 4", b"{  }")


def test_a_request_without_a_body_has_no_framing() -> None:
    upload = an_upload(length=None, chunked=False)
    upload.add(b"", complete=True)
    assert framing_and_body(upload.opening(b"e")) == (b"x-request-id: i", b"")


def test_a_short_body_can_be_sent_again_with_what_it_gains() -> None:
    upload = an_upload(length=7, chunked=False)
    upload.add(b'{"a":1}', complete=True)
    upload.members = b'"b":2'
    assert upload.repeatable
    for _ in range(2):
        assert framing_and_body(upload.opening(b"e")) == (b"content-length: 13", b'{"a":1,"b":2}')
    assert upload.whole() == b'{"a":1}'


def test_a_long_body_is_released_once_it_is_on_its_way() -> None:
    upload = an_upload(length=200, chunked=False)
    upload.add(b"x" * 200, complete=True)
    assert not upload.repeatable
    assert upload.opening(b"e").endswith(b"x" * 200)
    with pytest.raises(ValueError, match="released"):
        upload.opening(b"e")


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
