"""Requests that start with output, on stand-ins for vLLM's classes."""

from collections import deque
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from engine_agent.engines.vllm import vllm_versions
from engine_agent.engines.vllm.continuation import core, replay


class Request:
    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        sampling_params: Any,
        pooling_params: None = None,
        reasoning_ended: bool | None = None,
        reasoning_parser_kwargs: Any = None,
    ) -> None:
        self.request_id, self.prompt_token_ids, self.sampling_params = request_id, prompt_token_ids, sampling_params
        self.num_prompt_tokens = len(prompt_token_ids)
        self.output: list[int] = []
        self.prefill_stats: object | None = object()
        self.structured_output_request = SimpleNamespace(
            grammar=None,
            reasoning_ended=reasoning_ended,
            reasoning_parser_kwargs=reasoning_parser_kwargs,
            reasoner=None,
        )

    @classmethod
    def from_engine_core_request(cls, request: Any, block_hasher: object) -> "Request":
        assert block_hasher == "hasher"
        return cls("r", [1, 2], request.sampling_params)

    def append_output_token_ids(self, ids: int | list[int]) -> None:
        self.output += [ids] if isinstance(ids, int) else ids


@dataclass
class Stats:
    num_prompt_tokens: int = 0
    num_computed_tokens: int = 0


END_OF_REASONING, WRONG = 9, 8


class Manager:
    """Its grammar accepts tokens after the end of reasoning."""

    def _create_grammar(self, request: Request) -> list[int]:
        return []

    def accept_tokens(self, request: Request, ids: list[int]) -> bool:
        asked = request.structured_output_request
        asked.reasoner = "reasoner"
        assert request.output[-len(ids) :] == ids
        if asked.reasoning_ended:
            asked.grammar += ids
        asked.reasoning_ended = END_OF_REASONING in request.output
        return WRONG not in ids


def params_with(ids: list[int]) -> Any:
    return SimpleNamespace(extra_args={"other": 1, core.EMITTED: ids})


def test_a_request_starts_with_its_output_and_counts_it_as_prompt() -> None:
    kind: Any = type("OwnRequest", (Request,), {})
    core._preset_output(kind, Stats)
    made = kind.from_engine_core_request(SimpleNamespace(sampling_params=params_with([5, 6])), "hasher")
    assert (made.output, made.prompt_token_ids) == ([5, 6], [1, 2])
    assert not made.prefill_stats
    assert (made.prefill_stats.num_prompt_tokens, made.prefill_stats.num_computed_tokens) == (4, 4)
    for params in (None, SimpleNamespace(), SimpleNamespace(extra_args=None), SimpleNamespace(extra_args={"a": 1})):
        plain = kind.from_engine_core_request(SimpleNamespace(sampling_params=params), "hasher")
        assert plain.output == []
        assert plain.prefill_stats


def test_a_grammar_is_advanced_from_the_end_of_reasoning_on() -> None:
    kind: Any = type("OwnManager", (Manager,), {})
    core._advance_grammars(kind, Request)
    request = Request("r", [1], params_with([4, END_OF_REASONING, 5, 6]))
    assert kind()._create_grammar(request) == [5, 6]
    asked = request.structured_output_request
    assert (asked.reasoning_ended, asked.reasoner, asked.grammar, request.output) == (True, "reasoner", None, [])
    assert kind()._create_grammar(Request("r", [1], SimpleNamespace(extra_args=None))) == []


def test_tokens_that_contradict_a_grammar_fail_their_request() -> None:
    kind: Any = type("OwnManager", (Manager,), {})
    core._advance_grammars(kind, Request)
    with pytest.raises(ValueError, match="contradict its grammar"):
        kind()._create_grammar(Request("r", [1], params_with([END_OF_REASONING, WRONG])))


def test_repeated_outputs_come_before_those_of_the_core() -> None:
    waiting = deque(["core 1", "core 2"])
    queue = SimpleNamespace(get_nowait=lambda: waiting.popleft() if waiting else None)
    replay._yield_first(queue, deque(["repeated 1", "repeated 2"]))
    assert [queue.get_nowait() for _ in range(5)] == ["repeated 1", "repeated 2", "core 1", "core 2", None]


class Client:
    def generate(self) -> None: ...

    def check_admission(self) -> None: ...

    async def _add_request(
        self, request: object, prompt: object, parent_req: object, index: int, queue: object
    ) -> None: ...


class Processor:
    def __init__(self) -> None:
        self.request_states: dict[str, object] = {}
        self.tracing_enabled = False

    def abort_requests(self) -> None: ...

    def add_request(self) -> None: ...

    def has_request(self) -> None: ...

    def process_outputs(self) -> None: ...


class Queue:
    def get_nowait(self) -> None: ...


class Output:
    request_id: str
    new_token_ids: list[int]
    finish_reason: str
    stop_reason: str


class Empty:
    def __init__(self) -> None: ...


class OlderClient(Client):
    async def _add_request(self, request: object, queue: object) -> None: ...  # type: ignore[override]


@pytest.mark.parametrize(
    ("kinds", "why"),
    [
        ((Client, Processor, Queue, Output), ""),
        (
            (OlderClient, Processor, Queue, Output),
            "this vLLM has no AsyncLLM._add_request(request, prompt, parent_req, index, queue)",
        ),
        (
            (Empty, Empty, Empty, Empty),
            "this vLLM has no AsyncLLM.generate, AsyncLLM._add_request, AsyncLLM.check_admission, "
            "OutputProcessor.abort_requests, OutputProcessor.add_request, OutputProcessor.has_request, "
            "OutputProcessor.process_outputs, OutputProcessor.request_states, OutputProcessor.tracing_enabled, "
            "RequestOutputCollector.get_nowait, EngineCoreOutput.request_id, EngineCoreOutput.new_token_ids, "
            "EngineCoreOutput.finish_reason, EngineCoreOutput.stop_reason",
        ),
    ],
    ids=["0.32", "older", "nothing"],
)
def test_a_vllm_that_cannot_continue_is_known_by_what_it_lacks(kinds: tuple[Any, ...], why: str) -> None:
    assert vllm_versions.why_no_continuation(*kinds) == why
