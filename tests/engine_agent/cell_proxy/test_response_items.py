"""Items of `input` of Responses: those of common forms pass in any number, others in a small one."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from engine_agent.cell_proxy.response_items import MOST_OTHERS, check_items, has_known_form
from engine_agent.protocol.request_bodies import BadRequest

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
