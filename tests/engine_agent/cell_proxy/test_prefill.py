"""The choice of requests for handover and of their cell, and the messages between the proxies."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_agent.cell_proxy.prefill import (
    PROMPTS_MAX,
    Alone,
    BadParams,
    Candidate,
    PromptMemory,
    choose_cell,
    prefill_members,
    prompt_for_prefill,
    read_answer,
    read_engine_answer,
)
from engine_agent.protocol.messages import PrefillCell

CHAT, COMPLETIONS = b"/v1/chat/completions", b"/v1/completions"
TURNS = [{"role": "user", "content": "hello"}]


def cell(name: str, layout: str = "a", most: int = 4) -> PrefillCell:
    return PrefillCell(name, 1, "n-1", "10.0.0.1", 9400, 9401, layout, most)


def handed_over(path: bytes, **body: object) -> bytes | None:
    return prompt_for_prefill(path, msgspec.json.encode(body))


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
        ([Candidate(cell("p-1"), is_paused=True)], Alone.NO_CELL),
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
        assert (chosen.kv_layout, candidate.is_paused) == ("a", False)
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


CELL = PrefillCell("p-1", 2, "n-1", "10.0.0.9", 9400, 9401, "a", 4)
PARAMS: dict[str, Any] = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1, 2, 3]],
    "remote_engine_id": "e-1",
    "remote_request_id": "cmpl-r-1",
    "remote_host": "10.0.0.9",
    "remote_port": 9401,
    "tp_size": 1,
    "dcp_size": 1,
    "pp_size": 1,
    "remote_num_tokens": 40,
    "remote_blocks_expiry_time": None,
    "transfer_mode": "pull",
    "remote_prefill_cached_tokens": 16,
}
"""An answer of vLLM 0.32 (`NixlPullConnectorScheduler.request_finished`, and its scheduler)."""


def answered(**changes: object) -> bytes:
    return msgspec.json.encode({"kv_transfer_params": {**PARAMS, **changes}, "prompt_tokens": 40, "cached_tokens": 16})


def test_the_decode_engine_gets_exactly_what_the_prefill_engine_said() -> None:
    answer = read_answer(answered(), CELL)
    assert (answer.engine, answer.cached_tokens) == ("e-1", 16)
    assert msgspec.json.decode(b"{" + answer.members + b"}") == {"kv_transfer_params": PARAMS}


@pytest.mark.parametrize(
    "changes",
    [
        {"remote_host": "10.0.0.1"},
        {"remote_port": 22},
        {"do_remote_prefill": False},
        {"do_remote_decode": True},
        {"transfer_mode": "push"},
        {"remote_block_ids": [[-1]]},
        {"remote_block_ids": "all"},
        {"remote_request_id": "x" * 300},
        {"tp_size": 0},
        {"prompt_token_ids": [1, 2]},
    ],
)
def test_what_a_compromised_prefill_cell_adds_is_not_believed(changes: dict[str, object]) -> None:
    with pytest.raises(BadParams, match="p-1"):
        read_answer(answered(**changes), CELL)


def test_versions_of_before_said_less() -> None:
    less = {name: value for name, value in PARAMS.items() if name != "remote_prefill_cached_tokens"}
    body = msgspec.json.encode({"kv_transfer_params": less})
    assert msgspec.json.decode(b"{" + read_answer(body, CELL).members + b"}") == {"kv_transfer_params": less}


def test_a_member_that_is_there_twice_means_one_thing() -> None:
    twice = answered().replace(b'"remote_host"', b'"remote_host":"10.6.6.6","remote_host"')
    assert b"10.6.6.6" not in read_answer(twice, CELL).members


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"kv_transfer_params": null}', b'{"kv_transfer_params": 7}'])
def test_an_answer_that_is_none_is_not_believed(body: bytes) -> None:
    with pytest.raises(BadParams):
        read_answer(body, CELL)


@pytest.mark.parametrize("path", [b"/v1/completions", b"/v1/chat/completions"])
def test_a_prefill_request_is_for_one_token(path: bytes) -> None:
    members = msgspec.json.decode(b"{" + prefill_members(path) + b"}")
    assert (members["stream"], members["max_tokens"], members["min_tokens"]) == (False, 1, 0)
    assert members["kv_transfer_params"]["do_remote_decode"] is True
    assert ("max_completion_tokens" in members) is (path == b"/v1/chat/completions")


def test_of_an_engines_answer_its_place_and_its_usage_are_kept() -> None:
    usage = {"prompt_tokens": 40, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 16}}
    said = {"choices": [{"text": "secret"}], "usage": usage, "kv_transfer_params": PARAMS}
    prefill = read_engine_answer(msgspec.json.encode(said))
    assert (prefill.prompt_tokens, prefill.cached_tokens, prefill.completion_tokens) == (40, 16, 1)
    assert prefill.params is not None
    assert msgspec.json.decode(prefill.params) == PARAMS
    assert read_engine_answer(b'{"kv_transfer_params": null, "usage": {"prompt_tokens": 3}}').params is None
    with pytest.raises(BadParams):
        read_engine_answer(b"no")
