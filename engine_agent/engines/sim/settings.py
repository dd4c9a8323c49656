"""The options of the command line, checked before anything starts. Opens no file and no socket."""

import argparse
import os
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from engine_agent.engines.base import CELL_CERTIFICATE_VARIABLE, CELL_SECRET_VARIABLE
from engine_agent.engines.handshake import BadCertificate, Identity, LeaderCertificate, leader_certificate
from engine_agent.engines.openai_http import Endpoint
from engine_agent.engines.sim.batching import ModelParameters
from engine_agent.engines.sim.faults import BadFault, Fault, parse_fault
from engine_agent.engines.sim.planning.generation_request import HandoverParameters
from engine_agent.protocol.fingerprint import BadFingerprint, Fingerprint, fingerprint_from
from engine_agent.protocol.request_bodies import Modality
from engine_agent.protocol.states import CellRole, MemberRole

LOOPBACK = "127.0.0.1"
"""Address of the API and the administration port: only the cell proxy and the agent on the same node connect to an
engine."""
HEARTBEAT_S = 0.5
"""Between two heartbeats of a member, and the longest time until the leader knows of a fault."""
SILENT_BEATS = 4
"""A member that missed so many heartbeats in a row, 2 s, counts as dead."""
HANDSHAKE_TIMEOUT_S = 2.0
FAILED_EXIT_AFTER_S = 1.0
"""How long a failed leader still answers, so that clients read the reason before the port closes."""
CLOSING_S = 1.0
"""Lets clients read the last bytes of their responses after the computation ends."""


@dataclass(frozen=True)
class Settings:
    """One engine process. Times in seconds. `leader`: where followers connect; `fingerprint`: this rank's software;
    `adapters`: names served next to `served_model`; `fault`: injected into the leader at its start, as in a bad
    version; `certificate`: what a leader serves its followers with."""

    node_id: str
    cell: str
    generation: int
    rank: int
    role: MemberRole
    port: int
    admin_port: int
    served_model: str
    leader: Endpoint
    followers: int
    secret: str = field(repr=False)
    certificate: LeaderCertificate | None
    fingerprint: Fingerprint
    load_time_s: float
    grace_s: float
    rendezvous_timeout_s: float
    max_model_len: int
    fault: Fault | None
    adapters: tuple[str, ...]
    modalities: frozenset[Modality]
    """Parts of chats that are accepted in addition to text; they do not change the answer."""
    model: ModelParameters
    handover: HandoverParameters
    kv_endpoint: Endpoint | None
    """Where other engines fetch prompts that this one has read; None if they cannot."""

    @property
    def identity(self) -> Identity:
        """What this process states and proves in the cell's handshake."""
        secret = self.secret.encode()
        return Identity(self.cell, self.generation, self.rank, self.node_id, self.fingerprint, secret)


def parse_settings(argv: Sequence[str], environment: Mapping[str, str] = os.environ) -> Settings:
    """Returns settings from the command line and the environment. Raises SystemExit if an argument is missing, wrong or
    contradicts another (status 2, the reason on standard error)."""
    parser = _parser()
    options = parser.parse_args(argv)
    role = MemberRole(options.role)
    secret = environment.get(CELL_SECRET_VARIABLE, "")
    if (role is MemberRole.LEADER) != (options.rank == 0):
        parser.error(f"argument --rank: {options.rank} cannot be the {role}'s; the leader, and only it, is rank 0")
    if role is MemberRole.FOLLOWER and options.rank > options.followers:
        parser.error(f"argument --rank: {options.rank} exceeds --followers {options.followers}")
    if options.cell_role == CellRole.PREFILL and options.kv_endpoint is None:
        parser.error("argument --kv-endpoint: a prefill engine needs the address where others fetch prompts")
    if options.followers > 0 and not secret:
        parser.error(f"environment variable {CELL_SECRET_VARIABLE} is not set; members of a cell authenticate with it")
    certificate = None
    try:
        fingerprint = fingerprint_from(environment)
        if role is MemberRole.LEADER and options.followers > 0:
            if CELL_CERTIFICATE_VARIABLE not in environment:
                parser.error(
                    f"environment variable {CELL_CERTIFICATE_VARIABLE} is not set; a leader needs it for its followers"
                )
            certificate = leader_certificate(environment[CELL_CERTIFICATE_VARIABLE])
    except BadFingerprint as error:
        parser.error(f"environment variable {error}")
    except BadCertificate as error:
        parser.error(f"environment variable {CELL_CERTIFICATE_VARIABLE} {error}")
    return Settings(
        **_taken_from(options, Settings, besides=_NOT_OPTIONS),
        role=role,
        secret=secret,
        certificate=certificate,
        fingerprint=fingerprint,
        adapters=tuple(options.adapter),
        modalities=frozenset(options.modality),
        model=ModelParameters(**_taken_from(options, ModelParameters)),
        handover=HandoverParameters(CellRole(options.cell_role), **_taken_from(options, HandoverParameters, {"role"})),
    )


_NOT_OPTIONS = frozenset(
    {"role", "secret", "certificate", "fingerprint", "adapters", "modalities", "model", "handover"}
)


def _taken_from(
    options: argparse.Namespace,
    kind: type[Settings | ModelParameters | HandoverParameters],
    besides: Container[str] = (),
) -> dict[str, Any]:
    """Options are named like the fields that they fill."""
    return {field.name: getattr(options, field.name) for field in fields(kind) if field.name not in besides}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="engine_agent.engines.sim", allow_abbrev=False, description=__doc__)
    member = parser.add_argument_group("member of a cell")
    member.add_argument("--node-id", required=True)
    member.add_argument("--cell", required=True)
    member.add_argument("--generation", type=_count, required=True)
    member.add_argument("--rank", type=_count, required=True)
    member.add_argument("--role", choices=[role.value for role in MemberRole], required=True)
    member.add_argument("--leader", type=_endpoint, required=True, metavar="HOST:PORT", help="where followers connect")
    member.add_argument("--followers", type=_count, required=True)
    member.add_argument("--rendezvous-timeout-s", type=_positive, default=120.0)
    serving = parser.add_argument_group("serving")
    serving.add_argument("--port", type=_port, required=True)
    serving.add_argument("--admin-port", type=_port, required=True)
    serving.add_argument("--served-model", required=True)
    serving.add_argument("--adapter", action="append", default=[], help="name of a LoRA adapter; may be repeated")
    serving.add_argument("--modality", action="append", default=[], type=Modality, help="content besides text")
    serving.add_argument("--max-model-len", type=_positive_count, default=8192, help="prompt and answer, in tokens")
    serving.add_argument("--grace-s", type=_not_negative, default=5.0, help="for requests in flight after SIGTERM")
    serving.add_argument("--fault", type=_fault, help="JSON as for POST /fault; in the leader from its start")
    _add_model_options(parser)
    _add_handover_options(parser)
    return parser


def _add_model_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("time model")
    default = ModelParameters()
    group.add_argument("--load-time-s", type=_not_negative, default=2.0, help="how long loading weights takes")
    group.add_argument("--prefill-tokens-per-s", type=_positive, default=default.prefill_tokens_per_s)
    group.add_argument("--decode-step-ms", type=_positive, default=default.decode_step_ms)
    group.add_argument("--decode-step-per-seq-ms", type=_not_negative, default=default.decode_step_per_seq_ms)
    group.add_argument("--kv-capacity-tokens", type=_positive_count, default=default.kv_capacity_tokens)
    group.add_argument("--max-num-seqs", type=_positive_count, default=default.max_num_seqs)
    group.add_argument("--prefill-chunk-tokens", type=_positive_count, default=default.prefill_chunk_tokens)
    group.add_argument("--prefix-block-tokens", type=_count, default=default.prefix_block_tokens, help="0: no cache")
    group.add_argument(
        "--batch-prompt-tokens", type=_count, default=default.batch_prompt_tokens, help="in a step; 0: no limit"
    )
    group.add_argument("--step-jitter", type=_jitter, default=default.step_jitter, help="± fraction of a step's time")
    group.add_argument("--seed", type=int, default=default.seed)


def _add_handover_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("disaggregated prefill")
    default = HandoverParameters()
    group.add_argument("--cell-role", choices=[role.value for role in CellRole], default=CellRole.MIXED.value)
    group.add_argument("--kv-endpoint", type=_endpoint, metavar="HOST:PORT", help="where other engines fetch prompts")
    group.add_argument("--lease-s", type=_positive, default=default.lease_s, help="of a prompt for another engine")
    group.add_argument("--renew-s", type=_positive, default=default.renew_s)
    group.add_argument("--extension-s", type=_positive, default=default.extension_s)
    group.add_argument("--mb-per-token", type=_not_negative, default=default.mb_per_token)
    group.add_argument("--gb-per-s", type=_positive, default=default.gb_per_s)
    group.add_argument("--base-ms", type=_not_negative, default=default.base_ms)


def _bounded_number(text: str, kind: type[int] | type[float], lowest: float, highest: float, expected: str) -> float:
    try:
        number = kind(text)
    except ValueError:
        number = kind(-1)
    if not lowest <= number <= highest:
        raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")
    return number


_MANY = 10.0**12


def _count(text: str) -> int:
    return int(_bounded_number(text, int, 0, _MANY, "a whole number, 0 or more"))


def _positive_count(text: str) -> int:
    return int(_bounded_number(text, int, 1, _MANY, "a whole number, 1 or more"))


def _port(text: str) -> int:
    return int(_bounded_number(text, int, 1, 65535, "a port, 1 to 65535"))


def _positive(text: str) -> float:
    return _bounded_number(text, float, 1e-6, _MANY, "a number above 0")


def _not_negative(text: str) -> float:
    return _bounded_number(text, float, 0, _MANY, "a number, 0 or more")


def _jitter(text: str) -> float:
    return _bounded_number(text, float, 0, 0.9, "a fraction, 0 to 0.9")


def _endpoint(text: str) -> Endpoint:
    host, _, port = text.rpartition(":")
    if not host:
        raise argparse.ArgumentTypeError(f"expected HOST:PORT, got {text!r}")
    return Endpoint(host.strip("[]"), _port(port))


def _fault(text: str) -> Fault:
    try:
        return parse_fault(text.encode())
    except BadFault as error:
        raise argparse.ArgumentTypeError(str(error)) from error
