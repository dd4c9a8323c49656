"""What cells hand over to each other: which part of it an engine does, how long it takes, and the parameters that
requests carry for it, in the form of vLLM's `NixlConnector`. Pure data."""

from dataclasses import dataclass
from typing import Any

import msgspec

from engine_agent.engines.sim.planning.generation_request import Source
from engine_agent.protocol.request_bodies import BadRequest
from engine_agent.protocol.states import CellRole


@dataclass(frozen=True)
class HandoverParameters:
    """How an engine hands over the keys and values of prompts. Times in seconds.

    A prefill engine keeps them for `lease_s` after its answer; a decode engine that waits for them asks every `renew_s`
    to have that extended to `extension_s` from then, and tells when it has them. It has them `base_ms` and the time for
    `mb_per_token` (megabytes, of a 70B model in bfloat16) at `gb_per_s` (gigabytes, 100 Gbit/s) later. The lease is
    vLLM's: `kv_lease_duration` and heartbeats of `NixlConnector`.
    """

    role: CellRole = CellRole.MIXED
    lease_s: float = 30.0
    renew_s: float = 5.0
    extension_s: float = 20.0
    mb_per_token: float = 0.33
    gb_per_s: float = 12.5
    base_ms: float = 5.0

    def handover_s(self, tokens: int) -> float:
        """Until so many tokens are here."""
        return self.base_ms / 1000 + tokens * self.mb_per_token / 1000 / self.gb_per_s


class TransferParams(msgspec.Struct, kw_only=True):
    """`kv_transfer_params` of a request. To a prefill engine: `do_remote_decode`. To a decode engine:
    `do_remote_prefill`, and where the prompt lies."""

    do_remote_decode: bool = False
    do_remote_prefill: bool = False
    remote_request_id: str | None = None
    remote_host: str | None = None
    remote_port: int | None = None
    remote_num_tokens: int | None = None


def is_handed_over(given: TransferParams | None) -> bool:
    """Whether another engine takes the prompt of a request from here."""
    return given is not None and given.do_remote_decode


def source_of(given: TransferParams | None) -> Source | None:
    """Where the prompt of a request lies; None: it is to be read here.

    Raises:
        BadRequest: it lies elsewhere, and where is not said.
    """
    if given is None or not given.do_remote_prefill:
        return None
    if not (given.remote_request_id and given.remote_host and given.remote_port and given.remote_num_tokens):
        named = "remote_request_id, remote_host, remote_port and remote_num_tokens"
        raise BadRequest(f"`kv_transfer_params` with do_remote_prefill has {named}", param="kv_transfer_params")
    return Source(given.remote_request_id, given.remote_host, given.remote_port, given.remote_num_tokens)


def params_of(source: Source, engine_id: str, block_tokens: int) -> dict[str, Any]:
    """What a prefill engine answers beside its token, and a decode engine gets with its request. There is one group of
    layers, so one list of blocks."""
    blocks = -(-source.tokens // max(1, block_tokens))
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [list(range(blocks))],
        "remote_engine_id": engine_id,
        "remote_request_id": source.request_id,
        "remote_host": source.host,
        "remote_port": source.port,
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": source.tokens,
        "remote_blocks_expiry_time": None,
        "transfer_mode": "pull",
    }
