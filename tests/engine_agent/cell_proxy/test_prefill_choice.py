"""Which requests are handed over, to which cell, and why not."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_agent.cell_proxy.prefill_choice import (
    PROMPTS_MAX,
    Alone,
    Candidate,
    PromptMemory,
    choose_cell,
    prompt_to_hand_over,
)
from engine_agent.protocol.messages import PrefillCell

CHAT, COMPLETIONS = b"/v1/chat/completions", b"/v1/completions"
TURNS = [{"role": "user", "content": "hello"}]


def cell(name: str, layout: str = "a", most: int = 4) -> PrefillCell:
    return PrefillCell(name, 1, "n-1", "10.0.0.1", 9400, 9401, layout, most)


def handed_over(path: bytes, **body: object) -> bytes | None:
    return prompt_to_hand_over(path, msgspec.json.encode(body))


@pytest.mark.parametrize(
    ("path", "body", "prompt"),
    [
        (CHAT, {"messages": TURNS, "n": 1, "stream": True}, b'[{"role":"user","content":"hello"}]'),
        (CHAT, {"messages": TURNS, "n": None, "tool_choice": "auto"}, b'[{"role":"user","content":"hello"}]'),
        (COMPLETIONS, {"prompt": "hello", "best_of": 1, "echo": False}, b'"hello"'),
        (COMPLETIONS, {"prompt": [1, 2, 3]}, b"[1,2,3]"),
    ],
)
def test_one_answer_to_one_prompt_is_handed_over(path: bytes, body: dict[str, object], prompt: bytes) -> None:
    assert handed_over(path, **body) == prompt


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": TURNS, "n": 2}),
        (CHAT, {"messages": TURNS, "prompt_logprobs": 1}),
        (CHAT, {"messages": TURNS, "tool_choice": "required"}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]}),
        (CHAT, {"prompt": "hello"}),
        (COMPLETIONS, {"prompt": "hello", "best_of": 3}),
        (COMPLETIONS, {"prompt": "hello", "n": "1"}),
        (COMPLETIONS, {"prompt": "hello", "echo": True}),
        (COMPLETIONS, {"prompt": ["hello"]}),
        (COMPLETIONS, {"prompt": ["hello", "and more"]}),
        (COMPLETIONS, {"prompt": [[1, 2], [3]]}),
        (COMPLETIONS, {"prompt": []}),
        (COMPLETIONS, {"prompt": None, "prompt_embeds": "AAAA"}),
        (b"/v1/responses", {"input": "hello"}),
        (b"/v1/embeddings", {"input": "hello"}),
    ],
)
def test_anything_else_is_not(path: bytes, body: dict[str, object]) -> None:
    assert handed_over(path, **body) is None


def test_the_cell_with_the_least_for_its_size_reads() -> None:
    small, large = cell("p-1", most=2), cell("p-2", most=8)
    assert choose_cell([Candidate(small, 1), Candidate(large, 3)], "a") == large
    assert choose_cell([Candidate(small, 0), Candidate(large, 1)], "a") == small
    assert choose_cell([Candidate(large, 0), Candidate(small, 0)], "a") == small, "the first by name"


@pytest.mark.parametrize(
    ("candidates", "reason"),
    [
        ([], Alone.NO_CELL),
        ([Candidate(cell("p-1", "b"))], Alone.NO_CELL),
        ([Candidate(cell("p-1"), is_resting=True)], Alone.NO_CELL),
        ([Candidate(cell("p-1", most=2), 2), Candidate(cell("p-2", most=1), 3)], Alone.BUSY),
        ([Candidate(cell("p-1", most=64), PROMPTS_MAX)], Alone.BUSY),
    ],
)
def test_a_cell_that_cannot_is_none(candidates: list[Candidate], reason: Alone) -> None:
    assert choose_cell(candidates, "a") is reason


def test_without_a_layout_nothing_pairs() -> None:
    assert choose_cell([Candidate(cell("p-1", ""))], "") is Alone.NO_CELL


@given(
    layouts=st.lists(st.sampled_from("ab"), max_size=6),
    loads=st.lists(st.integers(0, 5), min_size=6, max_size=6),
    resting=st.lists(st.booleans(), min_size=6, max_size=6),
)
def test_no_cell_of_another_layout_and_no_full_one_is_ever_chosen(
    layouts: list[str], loads: list[int], resting: list[bool]
) -> None:
    cells = [cell(f"p-{index}", layout) for index, layout in enumerate(layouts)]
    candidates = [Candidate(*each) for each in zip(cells, loads, resting, strict=False)]
    chosen = choose_cell(candidates, "a")
    if isinstance(chosen, PrefillCell):
        candidate = candidates[cells.index(chosen)]
        assert (chosen.kv_layout, candidate.is_resting) == ("a", False)
        assert candidate.outstanding < chosen.max_concurrency


def test_a_conversation_that_goes_on_is_known_by_its_beginning() -> None:
    memory = PromptMemory(64 * 1024)
    first = b"[" + b"turn " * 1000
    memory.add("acme", first)
    assert memory.known_bytes("acme", first + b"and another turn" * 100) == 4096
    assert memory.known_bytes("acme", b"x" + first) == 0
    assert memory.known_bytes("other", first) == 0, "what one tenant sent tells another nothing"


def test_the_memory_has_an_end_and_forgets_ends_of_prompts_first() -> None:
    memory = PromptMemory(4096)
    memory.add("acme", b"a" * 3072)
    memory.add("acme", b"b" * 3072)
    assert memory.known_bytes("acme", b"b" * 3072) == 3072
    assert memory.known_bytes("acme", b"a" * 3072) == 1024
