"""What the proxies of a pair say to each other, and what is not believed."""

from typing import Any

import msgspec
import pytest

from engine_agent.cell_proxy.prefill_protocol import (
    BadParams,
    prefill_members,
    read_answer,
    read_engine_answer,
)
from engine_agent.protocol.messages import PrefillCell

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
"""As vLLM 0.32 answers (`NixlPullConnectorScheduler.request_finished`, and its scheduler)."""


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
