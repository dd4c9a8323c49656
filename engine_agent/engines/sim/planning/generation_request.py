"""A request in the form that all families of paths share, with the handover of its prompt as vLLM's `NixlConnector`
states it. Pure data."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import msgspec

from engine_agent.engines.sim.planning.vocabulary import count_tokens, prompt_text, split_tokens
from engine_agent.protocol.request_bodies import BadRequest
from engine_agent.protocol.states import CellRole


@dataclass(frozen=True)
class Prompt:
    """One prompt: the texts to read in order, of which `answered` is answered. `ids` if it came as token ids.
    `follows_tool`: `answered` is the result of a tool."""

    texts: tuple[str, ...]
    answered: str
    ids: tuple[int, ...] | None = None
    follows_tool: bool = False

    @classmethod
    def of_text(cls, text: str) -> "Prompt":
        return cls((text,), text)

    @classmethod
    def of_ids(cls, ids: Sequence[int]) -> "Prompt":
        text = prompt_text(ids)
        return cls((text,), text, tuple(ids))

    @cached_property
    def tokens(self) -> int:
        return len(self.ids) if self.ids is not None else sum(map(count_tokens, self.texts))

    @property
    def context(self) -> str:
        return " ".join(self.texts)

    def token_texts(self) -> tuple[str, ...]:
        if self.ids is not None:
            return tuple(
                prompt_text((one,)) if index == 0 else f" {prompt_text((one,))}" for index, one in enumerate(self.ids)
            )
        return tuple(token for text in self.texts for token in split_tokens(text))


@dataclass(frozen=True)
class Tool:
    """A function that the model may call; `parameters` is the JSON schema of its arguments."""

    name: str
    description: str = ""
    parameters: Any = None


@dataclass(frozen=True)
class ToolChoice:
    """Whether tools are called: `name` is a required one, `parallel` allows several in one answer."""

    kind: Literal["none", "auto", "required", "named"] = "none"
    name: str = ""
    parallel: bool = True


@dataclass(frozen=True)
class OutputForm:
    """The form of an answer's text: `json` a document that satisfies the schema `rule`, `choice` one of the texts in
    `rule`, `regex` a text that matches `rule`. `param` names the field that states it."""

    kind: Literal["json", "choice", "regex"]
    rule: Any
    param: str


@dataclass(frozen=True)
class Stops:
    texts: tuple[str, ...] = ()
    ids: frozenset[int] = frozenset()
    is_included: bool = False


@dataclass(frozen=True)
class Source:
    """Where another engine keeps a prompt of `tokens` that it has read: the request's id there, and its address."""

    request_id: str
    host: str
    port: int
    tokens: int


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """One request. `choices` answers to each of `prompts`; without `output_limit` an answer has its natural length.
    `limit_param` names the field of the limit. `include_usage`: the last event of a stream has the token counts.
    Without `top_logprobs` there are no log probabilities."""

    model: str
    prompts: tuple[Prompt, ...]
    choices: int = 1
    output_limit: int | None = None
    limit_param: str = "max_tokens"
    min_tokens: int = 0
    exact_length: bool = False
    seed: int = 0
    priority: int = 0
    stops: Stops = Stops()
    form: OutputForm | None = None
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    stream: bool = False
    include_usage: bool = False
    top_logprobs: int | None = None
    is_handed_over: bool = False
    """Another engine fetches its prompt from here after the answer."""
    source: Source | None = None
    """Where its prompt is, if another engine has read it."""

    @property
    def prompt(self) -> Prompt:
        """The only prompt, except in completions."""
        return self.prompts[0]


@dataclass(frozen=True)
class HandoverParameters:
    """How an engine hands over the keys and values of prompts. Times in seconds.

    A prefill engine keeps them for `lease_s` after its answer. A decode engine that waits for them sends a renewal
    every `renew_s`, which extends the lease to `extension_s` from then, and frees them at the end. The transfer takes
    `base_ms` and the time for `mb_per_token` (megabytes, of a 70B model in bfloat16) at `gb_per_s` (gigabytes, 100
    Gbit/s). The lease is vLLM's: `kv_lease_duration` and heartbeats of `NixlConnector`."""

    role: CellRole = CellRole.MIXED
    lease_s: float = 30.0
    renew_s: float = 5.0
    extension_s: float = 20.0
    mb_per_token: float = 0.33
    gb_per_s: float = 12.5
    base_ms: float = 5.0

    def handover_s(self, tokens: int) -> float:
        return self.base_ms / 1000 + tokens * self.mb_per_token / 1000 / self.gb_per_s


class TransferParams(msgspec.Struct, kw_only=True):
    """`kv_transfer_params` of a request. To a prefill engine: `do_remote_decode`. To a decode engine:
    `do_remote_prefill`, and where the prompt is."""

    do_remote_decode: bool = False
    do_remote_prefill: bool = False
    remote_request_id: str | None = None
    remote_host: str | None = None
    remote_port: int | None = None
    remote_num_tokens: int | None = None


def is_handed_over(given: TransferParams | None) -> bool:
    """Whether another engine fetches the prompt of a request from here."""
    return given is not None and given.do_remote_decode


def source_of(given: TransferParams | None) -> Source | None:
    """Returns where the prompt of a request is; None if it is read here. Raises BadRequest if it is elsewhere, and the
    address is missing."""
    if given is None or not given.do_remote_prefill:
        return None
    if not (given.remote_request_id and given.remote_host and given.remote_port and given.remote_num_tokens):
        named = "remote_request_id, remote_host, remote_port and remote_num_tokens"
        raise BadRequest(f"`kv_transfer_params` with do_remote_prefill needs {named}", param="kv_transfer_params")
    return Source(given.remote_request_id, given.remote_host, given.remote_port, given.remote_num_tokens)


def params_of(source: Source, engine_id: str, block_tokens: int) -> dict[str, Any]:
    """Returns what a prefill engine answers in addition to its token, for the request to a decode engine. There is one
    group of layers, so one list of blocks."""
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
