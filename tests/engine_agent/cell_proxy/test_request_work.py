"""The limits of one request's work, and its number of sequences."""

import itertools
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from msgspec import structs

from engine_agent.cell_proxy.api_paths import CELL_PATHS
from engine_agent.cell_proxy.batch_window import BatchQueue
from engine_agent.cell_proxy.request_work import MOST_OTHERS, check_items, check_work, has_known_form
from engine_agent.protocol.request_bodies import BadRequest
from engine_agent.protocol.request_limits import (
    DEFAULT_LIMITS,
    LIMIT_ROWS,
    RequestLimits,
    levels_with_references,
    limits_from_text,
    limits_text,
    repetitions,
)
from tests.engine_agent.cell_proxy.engine import Turn, json_answer
from tests.engine_agent.cell_proxy.http_stream import Message, read_message, request
from tests.engine_agent.cell_proxy.local_proxy import LocalProxy, proxy_of

CHAT, COMPLETIONS, MESSAGES, EMBEDDINGS, RERANK = (
    *("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/embeddings", "/v1/rerank"),
)


def nested(levels: int) -> Any:
    return {"a": nested(levels - 1)} if levels else 1


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
ENDLESS = {"n": {"anyOf": [{"$ref": "#/$defs/n"}]}}
TREE = {"$defs": {"n": {"properties": {"next": {"$ref": "#/$defs/n"}}}}, "anyOf": [{"$ref": "#/$defs/n"}] * 2}
OVER: list[tuple[str, dict[str, Any], str, str, str]] = [
    (CHAT, {"n": 10_000}, "n", "integer_above_max_value", "<= 128, but got 10000"),
    (CHAT, {"n": "10000"}, "n", "integer_above_max_value", "got 10000"),
    (CHAT, {"n": 1e4}, "n", "integer_above_max_value", "got 10000"),
    (COMPLETIONS, {"n": " 1e4 "}, "n", "integer_above_max_value", "got 10000"),
    (COMPLETIONS, {"best_of": 129}, "best_of", "integer_above_max_value", "<= 128"),
    (COMPLETIONS, {"prompt": ["x"] * 129}, "prompt", "array_above_max_length", "128, but got an array with length 129"),
    (COMPLETIONS, {"prompt": [[1]] * 129}, "prompt", "array_above_max_length", "length 129"),
    (COMPLETIONS, {"prompt": ["x"] * 5, "n": 26}, "n", "integer_above_max_value", "are 130 sequences"),
    (COMPLETIONS, {"prompt": [["x"], 1] * 3, "best_of": 99}, "best_of", "integer_above_max_value", "594 sequences"),
    (CHAT, {"stop": ["x"] * 17}, "stop", "array_above_max_length", "4, but got an array with length 17"),
    (MESSAGES, {"stop_sequences": ["x"] * 17}, "stop_sequences", "array_above_max_length", "length 4,"),
    (CHAT, {"tools": [TOOL] * 129}, "tools", "array_above_max_length", "128"),
    (CHAT, {"tools": [{**TOOL, "x": "y" * 60_000}] * 10}, "tools", "string_above_max_length", "524288 bytes"),
    (CHAT, {"tools": [TOOL, {"x": "y" * 70_000}]}, "tools[1]", "string_above_max_length", "65536 bytes"),
    (MESSAGES, {"tools": [{"input_schema": nested(40)}]}, "tools[0]", "invalid_value", "32 levels"),
    (CHAT, {"response_format": {"json_schema": {"schema": nested(40)}}}, "response_format", "invalid_value", "32"),
    (CHAT, {"response_format": {"x": "y" * 70_000}}, "response_format", "string_above_max_length", "65536"),
    (CHAT, {"structured_outputs": {"regex": "a" * 70_000}}, "structured_outputs", "string_above_max_length", "65536"),
    (
        *(CHAT, {"structured_outputs": {"json": '{"a":' * 40 + "1" + "}" * 40}}),
        *("structured_outputs.json", "invalid_value", "32 levels"),
    ),
    (
        *(CHAT, {"structured_outputs": {"json": "[" * 9000}}),
        *("structured_outputs.json", "invalid_value", "nested deeper"),
    ),
    *(
        (CHAT, {"response_format": {"json_schema": {"schema": schema}}}, "response_format", code, said)
        for schema, code, said in (
            ({"type": "string", "minLength": 10**8}, "integer_above_max_value", "at most 100000, but got 100000000"),
            ({"anyOf": [{"items": {"maxItems": 1e9}}]}, "integer_above_max_value", "got 1000000000"),
            ({"properties": {"a": {"pattern": "^((a{1,99}){1,99}){1,99}$"}}}, "integer_above_max_value", "got 970299"),
            ({"patternProperties": {"a{999999}": {}}}, "integer_above_max_value", "got 999999"),
            ({"$ref": "#"}, "invalid_value", "leads back to itself"),
            ({"properties": {"a": {"$ref": "#/$defs/n"}}, "$defs": ENDLESS}, "invalid_value", "leads back to itself"),
        )
    ),
    (CHAT, {"structured_outputs": {"regex": "(a{1,999}){1,999}"}}, "structured_outputs", "integer_above_max_value", ""),
    (CHAT, {"structured_outputs": {"json": '{"$ref":"#"}'}}, "structured_outputs.json", "invalid_value", "itself"),
    (CHAT, {"structured_outputs": [1]}, "structured_outputs", "invalid_type", "must be an object"),
    (MESSAGES, {"tools": [{"input_schema": {"minItems": 10**7}}]}, "tools[0]", "integer_above_max_value", "10000000"),
    (CHAT, {"tools": [{"function": {"parameters": {"$ref": "#"}}}]}, "tools[0]", "invalid_value", "itself"),
    ("/v1/responses", {"text": {"format": {"schema": nested(40)}}}, "text", "invalid_value", "32"),
    (CHAT, {"top_logprobs": 21}, "top_logprobs", "integer_above_max_value", "<= 20"),
    (CHAT, {"prompt_logprobs": 10_000}, "prompt_logprobs", "integer_above_max_value", "<= 20"),
    (COMPLETIONS, {"logprobs": 21}, "logprobs", "integer_above_max_value", "<= 20"),
    (CHAT, {"logit_bias": {str(n): 1 for n in range(1025)}}, "logit_bias", "object_above_max_properties", "1024"),
    (CHAT, {"allowed_token_ids": [1] * 1025}, "allowed_token_ids", "array_above_max_length", "1024"),
    (CHAT, {"bad_words": ["x"] * 1025}, "bad_words", "array_above_max_length", "1024"),
    (EMBEDDINGS, {"input": ["x"] * 2049}, "input", "array_above_max_length", "2048"),
    (RERANK, {"documents": ["x"] * 2049}, "documents", "array_above_max_length", "2048"),
    (CHAT, {"messages": [{}] * 2049}, "messages", "array_above_max_length", "2048"),
    ("/v1/responses", {"input": ["x"] * 2049}, "input", "array_above_max_length", "2048"),
    ("/v1/responses", {"input": [{}] * 33}, "input[32]", "invalid_value", "at most 32 items besides"),
    ("/v1/score", {"text_2": ["x"] * 2049}, "text_2", "array_above_max_length", "2048"),
]
WITHIN: list[tuple[str, dict[str, Any], int]] = [
    (CHAT, {}, 1),
    (CHAT, {"n": 128}, 128),
    (CHAT, {"n": None, "stop": "x", "logprobs": True, "top_logprobs": 20}, 1),
    (CHAT, {"n": "many", "stop": 7, "tools": "x", "logit_bias": [], "response_format": "json"}, 1),
    (COMPLETIONS, {"prompt": "x" * 100_000}, 1),
    (COMPLETIONS, {"prompt": [1] * 100_000}, 1),
    (COMPLETIONS, {"prompt": ["x"] * 4, "n": 8, "best_of": 16}, 64),
    (COMPLETIONS, {"prompt": [[1, 2]] * 3}, 3),
    ("/v1/responses", {"input": [{"role": "user", "content": "x"}] * 2048}, 1),
    (CHAT, {"response_format": {"json_schema": {"schema": TREE}}}, 1),
    (CHAT, {"structured_outputs": {"regex": r"\d{3}-[^\]{9}]{1,99}(\.[a-z]{2,5}){0,99}"}}, 1),
    (CHAT, {"response_format": {"json_schema": {"schema": {"type": "string", "maxLength": 65_535}}}}, 1),
    (EMBEDDINGS, {"input": ["x"] * 2048}, 2048),
    (EMBEDDINGS, {"input": [1] * 5000}, 1),
    (RERANK, {"query": "x", "documents": ["x"] * 9}, 9),
]


@pytest.mark.parametrize(("path", "body", "member", "code", "said"), OVER)
def test_a_request_over_a_limit_is_refused_by_member_value_and_limit(
    path: str, body: dict[str, Any], member: str, code: str, said: str
) -> None:
    with pytest.raises(BadRequest) as refused:
        check_work(CELL_PATHS[path.encode()], body, DEFAULT_LIMITS)
    assert (refused.value.param, refused.value.code) == (member, code)
    assert str(refused.value).startswith(f"Invalid '{member}': ")
    assert said in str(refused.value)


@pytest.mark.parametrize(("path", "body", "sequences"), WITHIN)
def test_a_request_within_them_counts_its_sequences(path: str, body: dict[str, Any], sequences: int) -> None:
    assert check_work(CELL_PATHS[path.encode()], body, DEFAULT_LIMITS) == sequences


def test_every_limit_is_described_and_binds() -> None:
    fields = RequestLimits.__struct_fields__
    assert tuple(row.name for row in LIMIT_ROWS) == fields
    least = limits_from_text("sequences=1;inputs=1;stops=1;tools=1;tools_bytes=1024;schema_bytes=1024;schema_depth=4")
    path, body, _ = WITHIN[-1]
    with pytest.raises(BadRequest):
        check_work(CELL_PATHS[path.encode()], body, least)


@pytest.mark.parametrize("limits", [RequestLimits(), RequestLimits(sequences=256), RequestLimits(stops=8, tools=1)])
def test_limits_pass_a_header(limits: RequestLimits) -> None:
    assert limits_from_text(limits_text(limits)) == limits
    assert limits_text(DEFAULT_LIMITS) == ""


@pytest.mark.parametrize("text", ["n=1", "stops", "stops=x", "stops=0", "stops=999999", ";"])
def test_other_text_is_no_limits(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        limits_from_text(text)


@pytest.mark.parametrize(
    ("pattern", "count"),
    [
        ("abc", 0),
        ("a{7}", 7),
        ("a{2,9}b{3,}", 9),
        ("(a{9}|b{5}){4}", 36),
        (r"\(a{9}\){4}", 9),
        ("(a{9}){4}*{2}", 72),
        ("[({9}]{3}", 9),
        ("((((", 0),
        ("a){3}", 3),
        ("a{" + "9" * 5000 + "}", 10**12),
        ("{}{,}{,5}", 5),
    ],
)
def test_repetitions_within_each_other_multiply(pattern: str, count: int) -> None:
    assert repetitions(pattern) == count


def chain(definitions: int, wrapped: int) -> dict[str, Any]:
    """A schema of references, each `wrapped` levels of `anyOf` below the one before."""
    defs: dict[str, Any] = {str(definitions): {"type": "integer"}}
    for index in range(definitions):
        part: dict[str, Any] = {"$ref": f"#/$defs/{index + 1}"}
        for _ in range(wrapped):
            part = {"anyOf": [part]}
        defs[str(index)] = part
    return {"$defs": defs, "$ref": "#/$defs/0"}


def test_levels_are_counted_along_references() -> None:
    assert levels_with_references({"type": "object", "properties": {"a": {"type": "array", "items": {}}}}) == 4
    assert levels_with_references(chain(3, 0)) == 3 + 4
    assert levels_with_references(chain(3, 2)) == (2 + 5) + 3 * 5 + 1
    tree = {"properties": {"left": {"$ref": "#"}, "right": {"$ref": "#"}}}
    assert levels_with_references(tree) == 6
    assert levels_with_references({"$ref": "#x", "$defs": {"a": {"$anchor": "x"}}}) == 3
    assert levels_with_references(None) == 1


@pytest.mark.parametrize("schema", [chain(200, 13), chain(1200, 0)])
def test_a_chain_of_references_is_too_deep(schema: dict[str, Any]) -> None:
    shape = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    with pytest.raises(BadRequest, match="1000 levels"):
        check_work(CELL_PATHS[CHAT.encode()], {"response_format": shape}, DEFAULT_LIMITS)


async def ask(proxy: LocalProxy, path: str, body: dict[str, Any], **headers: str) -> Message:
    reader, writer = await proxy.send(request(path, msgspec.json.encode(body), **headers))
    answer = await read_message(reader)
    writer.close()
    return answer


@pytest.mark.asyncio
async def test_the_answer_is_400_in_the_dialect_and_the_engine_never_sees_the_request() -> None:
    async with proxy_of() as proxy:
        openai = (await ask(proxy, CHAT, {"n": 10_000})).json()["error"]
        assert (openai["type"], openai["param"]) == ("invalid_request_error", "n")
        assert (openai["code"], "128" in openai["message"]) == ("integer_above_max_value", True)
        answer = await ask(proxy, MESSAGES, {"stop_sequences": ["x"] * 17})
        assert (answer.status, answer.json()["type"]) == (400, "error")
        assert answer.json()["error"]["type"] == "invalid_request_error"
        long = {"prompt": "x" * 3_000_000, "n": 10_000}
        assert (await ask(proxy, COMPLETIONS, long)).json()["error"]["param"] == "n", "of any length"
        assert proxy.engine.requests == []
        assert not proxy.cell.in_flight


@pytest.mark.asyncio
async def test_a_deployment_has_limits_of_its_own() -> None:
    async with proxy_of() as proxy:
        assert (await ask(proxy, CHAT, {"n": 200}, x_switchyard_limits="sequences=256;stops=2")).status == 200
        assert "x-switchyard-limits" not in proxy.engine.requests[0].headers
        assert (await ask(proxy, CHAT, {"stop": ["x"] * 3}, x_switchyard_limits="stops=2")).status == 400
        bad = await ask(proxy, CHAT, {}, x_switchyard_limits="stops=no")
        assert (bad.status, bad.json()["error"]["code"]) == (400, "bad_header")


@pytest.mark.asyncio
async def test_answers_count_in_admission_as_sequences() -> None:
    """The cell runs 4 requests, so it admits 8 real-time ones; a request with 128 answers counts as half of that."""
    waiting: list[Turn] = []

    async def script(turn: Turn) -> None:
        waiting.append(turn)
        await turn.gone.wait()

    async with proxy_of(script) as proxy:
        assert proxy.cell.settings.max_concurrency == 4
        connections = [await proxy.send(request(CHAT, b'{"n":128}')) for _ in range(2)]
        while proxy.cell.weight < 8:
            await proxy.moment()
        refused = await ask(proxy, CHAT, {})
        assert (refused.status, refused.json()["error"]["code"]) == (503, "cell_saturated")
        for _, writer in connections[1:]:
            writer.close()
        while proxy.cell.weight > 4:
            await proxy.moment()
        assert proxy.cell.sequences == 128, "the engine has no free slot, so that no probe waits for one"
        refused = await ask(proxy, CHAT, {"n": 5}, x_switchyard_class="batch")
        assert (refused.status, refused.headers["x-switchyard-retry"]) == (503, "1")
        connections[0][1].close()
        while proxy.cell.sequences:
            await proxy.moment()
        proxy.engine.script = lambda turn: turn.send(json_answer(b"{}"))
        assert (await ask(proxy, CHAT, {"n": 5}, x_switchyard_class="batch")).status == 200


class Waiting:
    """A batch request; `has_begun` once it was called."""

    has_begun = False

    def begin(self) -> None:
        self.has_begun = True


def test_answers_fill_the_window_of_batch_work() -> None:
    queue = BatchQueue(8, lambda: False, reads_one=False)
    first, second = Waiting(), Waiting()
    for waiting, sequences in ((first, 128), (second, 1)):
        queue.join(waiting)
        queue.weigh(waiting, sequences)
    assert queue.may_begin(first), "a request of many answers begins in an empty cell"
    assert not queue.may_begin(second)
    assert queue.load().running == 1
    queue.leave(first)
    assert second.has_begun


def test_limits_have_bounds_of_their_own() -> None:
    for name, value in structs.asdict(DEFAULT_LIMITS).items():
        assert msgspec.convert({name: value}, RequestLimits) == DEFAULT_LIMITS
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert({name: 10**9}, RequestLimits)


STATES = ("in_progress", "completed", "incomplete")
TEXT = {"type": "input_text", "text": "x"}
OUTPUT = {"type": "output_text", "text": "x", "annotations": []}


def variants(item: dict[str, Any], **optional: tuple[Any, ...]) -> Iterator[dict[str, Any]]:
    """The item with each choice of its optional members, which may be absent."""
    choices = [[{}, *({name: value} for value in values)] for name, values in optional.items()]
    for chosen in itertools.product(*choices):
        yield item | {name: value for each in chosen for name, value in each.items()}


def known_items() -> Iterator[dict[str, Any]]:
    for role, content in itertools.product(("user", "assistant", "system", "developer"), ("x", [TEXT, TEXT], [])):
        yield from variants({"role": role, "content": content}, type=("message",))
    for status, content in itertools.product(STATES, ([OUTPUT], [OUTPUT | {"logprobs": []}], [])):
        yield {"type": "message", "id": "m", "role": "assistant", "content": content, "status": status}
    ids = {"id": ("", "a"), "status": STATES}
    yield from variants({"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}, **ids)
    yield from variants({"type": "function_call_output", "call_id": "c", "output": "x"}, **ids)
    thought = {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "x"}]}
    contents: tuple[Any, ...] = (None, [], [{"type": "reasoning_text", "text": "x"}])
    yield from variants(thought, content=contents, encrypted_content=(None, "x"), status=(None, *STATES))


KNOWN = list(known_items())
OTHERS: list[Any] = [
    1, None, "x", [], {}, {"type": 5}, {"type": "x"}, {"role": "user", "content": 1}, {"role": "x", "content": "x"},
    {"role": "user", "content": [{"type": "output_text", "text": "x"}]}, {"role": "user", "content": "x", "a": 1},
    {"type": "function_call"}, {"type": "item_reference", "id": "a"},
]  # fmt: skip


@pytest.mark.parametrize("item", KNOWN, ids=repr)
def test_items_of_common_forms_pass(item: dict[str, Any]) -> None:
    assert has_known_form(item)


@pytest.mark.parametrize("item", OTHERS, ids=repr)
def test_a_few_others_pass_and_no_more(item: Any) -> None:
    assert not has_known_form(item)
    check_items([item] * MOST_OTHERS + KNOWN, 2048)
    with pytest.raises(BadRequest, match=r"besides message, function_call") as refused:
        check_items([*KNOWN, *[item] * (MOST_OTHERS + 1)], 2048)
    assert refused.value.param == f"input[{len(KNOWN) + MOST_OTHERS}]"


def test_the_number_of_items_is_limited() -> None:
    check_items([KNOWN[0]] * 10, 10)
    with pytest.raises(BadRequest, match="maximum length 10, but got an array with length 11") as refused:
        check_items([KNOWN[0]] * 11, 10)
    assert refused.value.code == "array_above_max_length"


@pytest.mark.parametrize("text", ["hi", None, 5])
def test_what_is_no_list_is_left_to_the_engine(text: Any) -> None:
    check_items(text, 1)
