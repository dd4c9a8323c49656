"""The launcher's command line, for a leader and for a follower. Opens no file and no socket."""

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from engine_agent.engines.class_order import BATCH_PROMPT_TOKENS
from engine_agent.engines.vllm.cell.member import Member
from engine_agent.engines.vllm.kv_transfer import STORE_MEMORY_GIB
from engine_agent.protocol.engine_options import (
    OFFLOAD_OPTION,
    PRIORITY_SCHEDULING,
    SLEEP_LEVEL_OPTION,
    SLEEP_OPTION,
    STORE_OPTION,
)
from engine_agent.protocol.states import MemberRole

HANG_VARIABLE = "SWITCHYARD_CELL_HANG_S"
"""In a plan's environment: how long a member may be silent, or a step take, before its cell counts as hung."""
BATCH_PROMPT_TOKENS_OPTION = "--batch-prompt-tokens"
"""Stated among vLLM's options, but not one of them."""
DEGREES = ("--tensor-parallel-size", "--pipeline-parallel-size")
"""As versions render them."""
HANG_S = 20.0
"""The default. The longest regular step here, 2,048 tokens of prompt on one core, takes 4 s."""
JOIN_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class ServeOptions:
    """The launcher's options; `vllm_args` follow `--`. `leader_*` is where followers connect to the leader. `draft` is
    folder and digest of a second model that `vllm_args` name, which is checked like the first; `adapters` are name,
    folder and digest of each LoRA adapter."""

    node_id: str
    host: str
    port: int
    served_model: str
    model_dir: Path
    digest: str
    vllm_args: tuple[str, ...]
    cell: str = ""
    generation: int = 0
    rank: int = 0
    followers: int = 0
    admin_port: int = 0
    leader_address: str = ""
    leader_port: int = 0
    join_timeout_s: float = JOIN_TIMEOUT_S
    hang_s: float = HANG_S
    draft: tuple[str, str] | None = None
    adapters: tuple[tuple[str, str, str], ...] = ()
    sleep: tuple[int, int] | None = None
    """After how many idle seconds the engine sleeps, and at which level."""
    kv_port: int = 0
    """Where decode engines fetch prompts that this one has read; 0: nothing is handed over."""
    kv_store: Path | None = None
    """The folder for stores of KV blocks; None: there is no store."""
    kv_store_gib: tuple[float, float] = (0.0, 0.0)
    """The limit of that folder, and the host memory through which blocks pass."""
    batch_prompt_tokens: int = 0
    """Of a step; 0: batch prompts are read like all others, as without scheduling by priority."""
    one_worker: bool = False
    """One worker drives all devices of the node, whatever the degrees."""

    @property
    def role(self) -> MemberRole:
        return MemberRole.LEADER if self.rank == 0 else MemberRole.FOLLOWER

    @property
    def workers(self) -> int:
        """Workers of this node, from the degrees in vLLM's options. vLLM itself rejects malformed ones."""
        if self.one_worker:
            return 1
        ranks = 1
        for degree in DEGREES:
            with suppress(ValueError):
                ranks *= int(option_value(self.vllm_args, degree) or 1)
        return max(1, ranks // (self.followers + 1))

    @property
    def speculation_method(self) -> str:
        """The method in vLLM's options; empty without speculation. vLLM itself rejects malformed options."""
        with suppress(ValueError):
            stated = json.loads(option_value(self.vllm_args, "--speculative-config") or "{}")
            if isinstance(stated, dict):
                return str(stated.get("method", ""))
        return ""

    def member(self, runtime: Path) -> Member:
        """Returns this process's place in a cell of several nodes; `runtime` is its folder."""
        return Member(
            cell=self.cell,
            generation=self.generation,
            rank=self.rank,
            followers=self.followers,
            node_id=self.node_id,
            address=self.host,
            leader_address=self.leader_address,
            leader_port=self.leader_port,
            runtime=str(runtime),
            hang_s=self.hang_s,
            join_timeout_s=self.join_timeout_s,
        )


def parse(argv: Sequence[str], environment: Mapping[str, str] = os.environ) -> ServeOptions:
    own, vllm_args = list(argv), []
    if "--" in own:
        split = own.index("--")
        own, vllm_args = own[:split], own[split + 1 :]
    parser = _parser()
    read = parser.parse_args(own)
    if (read.role == MemberRole.LEADER) != (read.rank == 0):
        parser.error(f"argument --rank: {read.rank} cannot be the {read.role}'s; the leader, and only it, is rank 0")
    if read.rank > read.followers:
        parser.error(f"argument --rank: {read.rank} exceeds --followers {read.followers}")
    if read.followers > 0 and read.leader is None:
        parser.error("argument --leader: HOST:PORT is needed in a cell of several nodes")
    try:
        hang_s = float(environment.get(HANG_VARIABLE) or HANG_S)
    except ValueError:
        parser.error(f"environment variable {HANG_VARIABLE}: {environment[HANG_VARIABLE]!r} is not a number of seconds")
    leader_address, leader_port = read.leader or ("", 0)
    fields = {name: value for name, value in vars(read).items() if name not in ("role", "leader", "draft", "adapter")}
    return ServeOptions(
        **fields,
        vllm_args=tuple(_for_vllm(vllm_args)),
        kv_store_gib=_kv_store_gib(parser, vllm_args, read.kv_store),
        sleep=_sleep(parser, vllm_args),
        batch_prompt_tokens=_batch_prompt_tokens(parser, vllm_args),
        draft=tuple(read.draft) if read.draft else None,
        adapters=tuple((name, folder, digest) for name, folder, digest in read.adapter),
        leader_address=leader_address,
        leader_port=leader_port,
        hang_s=hang_s,
    )


def _batch_prompt_tokens(parser: argparse.ArgumentParser, vllm_args: Sequence[str]) -> int:
    stated = option_value(vllm_args, BATCH_PROMPT_TOKENS_OPTION)
    if stated is not None and not stated.isdecimal():
        parser.error(f"argument {BATCH_PROMPT_TOKENS_OPTION}: expected a whole number, 0 or more, got {stated!r}")
    if PRIORITY_SCHEDULING not in pairwise(vllm_args):
        return 0
    return BATCH_PROMPT_TOKENS if stated is None else int(stated)


def _for_vllm(arguments: Sequence[str]) -> list[str]:
    words = list(arguments)
    stored = (STORE_OPTION, OFFLOAD_OPTION, "--kv-offloading-backend") if STORE_OPTION in arguments else ()
    for name in (BATCH_PROMPT_TOKENS_OPTION, SLEEP_OPTION, SLEEP_LEVEL_OPTION, *stored):
        words = without_option(words, name)
    return words


def _kv_store_gib(
    parser: argparse.ArgumentParser, arguments: Sequence[str], folder: Path | None
) -> tuple[float, float]:
    limit = option_value(arguments, STORE_OPTION)
    if (limit is None) != (folder is None):
        parser.error(f"--kv-store and {STORE_OPTION} need each other")
    if limit is None:
        return 0.0, 0.0
    try:
        return float(limit), float(option_value(arguments, OFFLOAD_OPTION) or STORE_MEMORY_GIB)
    except ValueError:
        parser.error(f"{STORE_OPTION} and {OFFLOAD_OPTION} must be numbers of GiB")


def _sleep(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> tuple[int, int] | None:
    seconds = option_value(arguments, SLEEP_OPTION)
    if seconds is None:
        return None
    level = option_value(arguments, SLEEP_LEVEL_OPTION) or "1"
    if not seconds.isdecimal() or level not in ("1", "2"):
        parser.error(f"{SLEEP_OPTION} must be a whole number, and {SLEEP_LEVEL_OPTION} 1 or 2")
    return int(seconds), int(level)


def option_value(arguments: Sequence[str], name: str) -> str | None:
    return next((value for option, value in pairwise(arguments) if option == name), None)


def without_option(arguments: Sequence[str], name: str) -> list[str]:
    behind = ["", *arguments]
    return [each for before, each in zip(behind, arguments, strict=False) if name not in (before, each)]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="engine_agent.engines.vllm.serve", allow_abbrev=False)
    parser.add_argument("--node-id", required=True)
    parser.add_argument("--cell", required=True)
    parser.add_argument("--generation", required=True, type=int)
    parser.add_argument("--rank", required=True, type=int)
    parser.add_argument("--role", required=True, choices=[role.value for role in MemberRole])
    parser.add_argument("--followers", type=int, default=0, help="ranks in the cell besides the leader")
    parser.add_argument("--leader", type=_endpoint, metavar="HOST:PORT", help="where followers connect to the leader")
    parser.add_argument("--join-timeout-s", type=float, default=JOIN_TIMEOUT_S)
    parser.add_argument("--host", required=True, help="this node's address, for the other ranks")
    parser.add_argument("--port", required=True, type=int, help="of the leader's API, on loopback")
    parser.add_argument("--admin-port", type=int, default=0, help="of a follower's GET /health, on loopback")
    parser.add_argument("--served-model", required=True)
    parser.add_argument("--model-dir", required=True, type=Path)
    parser.add_argument("--digest", required=True, help="sha256:… of the artifact's manifest")
    parser.add_argument("--draft", nargs=2, metavar=("DIR", "DIGEST"), help="a draft model that vLLM's options name")
    parser.add_argument(
        "--adapter", nargs=3, action="append", default=[], metavar=("NAME", "DIR", "DIGEST"), help="a LoRA adapter"
    )
    parser.add_argument(
        "--kv-port", type=int, default=0, help="hand prompts over; other engines fetch them at this port"
    )
    parser.add_argument("--kv-store", type=Path, metavar="DIR", help="for stores of KV blocks in files")
    return parser


def _endpoint(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal():
        raise argparse.ArgumentTypeError(f"expected HOST:PORT, got {text!r}")
    return host.strip("[]"), int(port)
