"""One member is found at its place, however the object is cut, and nothing is taken for it."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from engine_agent.cell_proxy.json_member import MAX_VALUE_BYTES, JsonMember

USAGE = {"prompt_tokens": 12, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 4}}
words = st.sampled_from(["usage", "response", '"usage": {"prompt_tokens": 0}', "\\", '"', "{", "}]", "é\n", "a", ""])
values = st.recursive(
    st.one_of(words, st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False)),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(words, inner, max_size=4)),
    max_leaves=20,
)
objects = st.dictionaries(words.filter(lambda word: word not in {"usage", "response"}), values, max_size=5)
sizes = st.lists(st.integers(1, 30), min_size=1)


def found(text: bytes, cuts: list[int], *path: bytes) -> Any:
    member, at, turn = JsonMember(*path), 0, 0
    while at < len(text):
        size = cuts[turn % len(cuts)]
        member.add(text[at : at + size])
        at, turn = at + size, turn + 1
    return None if member.value is None else json.loads(member.value)


def placed(around: dict[str, Any], name: str, value: Any, place: int) -> dict[str, Any]:
    members = list(around.items())
    return dict([*members[:place], (name, value), *members[place:]])


@given(objects, st.integers(0, 5), sizes, st.booleans(), st.sampled_from([None, 1]))
def test_wherever_it_stands_it_is_found(
    around: dict[str, Any], place: int, cuts: list[int], ascii_only: bool, indent: int | None
) -> None:
    text = json.dumps(placed(around, "usage", USAGE, place), ensure_ascii=ascii_only, indent=indent).encode()
    assert found(text, cuts, b"usage") == USAGE


@given(objects, objects, st.integers(0, 5), sizes)
def test_it_is_found_within_its_own_object_only(
    around: dict[str, Any], inner: dict[str, Any], place: int, cuts: list[int]
) -> None:
    nested = placed(around, "response", placed(inner, "usage", USAGE, place), place)
    text = b"event: response.completed\ndata: " + json.dumps(nested).encode() + b"\n\n"
    assert found(text, cuts, b"response", b"usage") == USAGE
    assert found(text, cuts, b"usage") is None


@given(objects, sizes)
def test_what_looks_like_it_is_not_taken_for_it(around: dict[str, Any], cuts: list[int]) -> None:
    assert found(json.dumps(around).encode(), cuts, b"usage") is None
    assert (
        found(json.dumps({"a": {"usage": USAGE}, "b": [{"usage": USAGE}], **around}).encode(), cuts, b"usage") is None
    )
    assert found(json.dumps([{"usage": USAGE}, around]).encode(), cuts, b"usage") is None


def test_what_is_no_object_or_too_long_is_none() -> None:
    for value in (None, 5, '{"prompt_tokens": 1}', {"a": "x" * (MAX_VALUE_BYTES + 1)}):
        assert found(json.dumps({"usage": value, "b": {}}).encode(), [7, 1000], b"usage") is None


def test_what_is_not_whole_is_none() -> None:
    assert found(b'{"usage": {"prompt_tokens": 1', [3], b"usage") is None


@given(st.binary(max_size=200), sizes)
def test_no_bytes_at_all_break_it(text: bytes, cuts: list[int]) -> None:
    member = JsonMember(b"usage")
    for at in range(0, len(text), cuts[0]):
        member.add(text[at : at + cuts[0]])
