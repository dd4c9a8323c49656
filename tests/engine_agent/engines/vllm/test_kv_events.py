"""vLLM's KV events as block events. What is read here is spelled as vLLM 0.32 spells it."""

import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine_agent.engines.vllm.environment import install
from engine_agent.engines.vllm.middleware import KvEventDecoder, config_of
from engine_agent.protocol.proxy_messages import BlocksRemoved, BlocksStored, CacheCleared
from tests.engine_agent.engines.vllm.running_cell import CACHE, ROOT


def batch(*events: dict[str, Any]) -> bytes:
    return msgspec.msgpack.encode([1.5, list(events), 0])


def stored(*hashes: bytes, parent: bytes | None = None, **more: Any) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": list(hashes),
        "parent_block_hash": parent,
        "token_ids": [1, 2, 3],
        "block_size": 16,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        **more,
    }


def removed(*hashes: bytes, medium: str = "GPU", **more: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": medium, **more}


A, B, C = (bytes([letter]) * 32 for letter in b"abc")


def test_hashes_pass_on_and_tokens_do_not() -> None:
    decoder = KvEventDecoder()
    (first,) = decoder.decode(batch(stored(A, B, session_id="x-1")))
    assert isinstance(first, BlocksStored)
    assert (first.parent, len(set(first.blocks)), first.exchange) == (0, 2, "x-1")
    assert decoder.block_tokens == 16
    assert (
        decoder.decode(batch(stored(C, parent=B), removed(A)))
        == (
            BlocksStored(first.blocks[1], (decoder.decode(batch(stored(C)))[0].blocks[0],)),  # type: ignore[union-attr]
            BlocksRemoved(first.blocks[:1]),
        )
    )
    assert decoder.decode(batch({"type": "AllBlocksCleared"})) == (CacheCleared(),)


def test_a_block_in_two_places_is_gone_when_it_is_in_none() -> None:
    decoder = KvEventDecoder()
    decoder.decode(batch(stored(A), stored(A, medium="CPU")))
    assert decoder.decode(batch(removed(A))) == ()
    assert len(decoder.decode(batch(removed(A, medium="CPU")))) == 1
    assert decoder.decode(batch(removed(A, medium="CPU"))) == (), "it was not there"


def test_only_the_first_group_is_told_and_numbers_are_hashes_too() -> None:
    decoder = KvEventDecoder()
    assert decoder.decode(batch(stored(A, group_idx=1), removed(A, group_idx=1))) == ()
    (event,) = decoder.decode(batch({**stored(), "block_hashes": [2**64 - 1], "group_idx": 0}))
    assert isinstance(event, BlocksStored)
    assert 0 < event.blocks[0] < 2**63


def test_what_is_no_batch_is_refused() -> None:
    with pytest.raises(msgspec.DecodeError):
        KvEventDecoder().decode(b"\x93nonsense")


def test_the_sockets_are_files_of_the_engine() -> None:
    config = config_of(Path("/run/engine"))
    assert config["endpoint"] == "ipc:///run/engine/kv-events"
    assert config["replay_endpoint"] == "ipc:///run/engine/kv-replay"


@pytest.mark.long
@pytest.mark.vllm
def test_a_reader_asks_for_what_it_missed_and_forgets_all_where_that_is_gone() -> None:
    command = [str(install(CACHE, print)), "-m", "tests.engine_agent.engines.vllm.missed_events"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.splitlines() == [
        "the first ones came after all",
        "so did one in the middle",
        "one that is gone empties the list",
    ], done.stderr
