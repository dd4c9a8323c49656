"""What is added to a request's body, and that it stays the JSON that it was."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_agent.cell_proxy.rewrite import BadBody, BodyRewrite, NeedsStore, request_of, rewrite_body, with_members
from engine_agent.protocol.api_surface import CELL_PATHS
from engine_agent.protocol.strict_json import strict_loads

CHAT = b"/v1/chat/completions"


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


RESPONSES = b"/v1/responses"


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
