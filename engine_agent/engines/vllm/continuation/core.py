"""Requests that start with output, in vLLM's core and workers.

vLLM resumes a preempted request by reading its prompt and its output again. A request of another engine enters in the
same state: `Request` gets the output when the core creates it, and `CachedRequestState` when a worker of vLLM's first
model runner does. The second model runner reads the output of every new request, because it treats resumed requests as
new. The token ids travel in `SamplingParams.extra_args`, which reach the core and all workers, also those of other
nodes. vLLM is imported only in functions."""

from collections.abc import Sequence
from typing import Any

EMITTED = "switchyard_emitted"
"""Key in `extra_args`. `replay` refuses requests whose client states it."""
CONFIRM = "switchyard_resumes"
"""Method of the core: patches all workers, and returns whether requests may start with output."""


def emitted_of(params: Any) -> Sequence[int]:
    """Returns the output that a request starts with."""
    extra = getattr(params, "extra_args", None)
    return extra.get(EMITTED, ()) if extra else ()


def patch_core() -> None:
    """Lets requests start with output. Call it in the process of the core before it serves; further calls do nothing.
    Does nothing in a vLLM without the needed classes: the server then refuses continuations."""
    try:
        from vllm.v1.engine.core import EngineCore
        from vllm.v1.metrics.stats import PrefillStats
        from vllm.v1.request import Request
        from vllm.v1.structured_output import StructuredOutputManager
    except ImportError:
        return
    if hasattr(EngineCore, CONFIRM):
        return
    _preset_output(Request, PrefillStats)
    _advance_grammars(StructuredOutputManager, Request)
    setattr(EngineCore, CONFIRM, lambda core: all(core.model_executor.collective_rpc(patch_worker)))


def _preset_output(request_class: Any, stats_class: Any) -> None:
    create = request_class.from_engine_core_request.__func__
    # vLLM fills in the statistics of a first prefill, and asserts that it finds at most the prompt in the cache. This
    # one may find output as well. vLLM passes over statistics that are false, and sends them with the first token.
    stated = type("StatedPrefill", (stats_class,), {"__bool__": lambda _: False})

    def from_engine_core_request(cls: Any, request: Any, block_hasher: Any) -> Any:
        made = create(cls, request, block_hasher)
        if emitted := emitted_of(made.sampling_params):
            made.append_output_token_ids(list(emitted))
            read = made.num_prompt_tokens + len(emitted)
            made.prefill_stats = stated(num_prompt_tokens=read, num_computed_tokens=read)
        return made

    request_class.from_engine_core_request = classmethod(from_engine_core_request)


def _advance_grammars(manager_class: Any, request_class: Any) -> None:
    create = manager_class._create_grammar

    def create_grammar(manager: Any, request: Any) -> Any:
        grammar = create(manager, request)
        if emitted := emitted_of(request.sampling_params):
            advance(manager, grammar, request, request_class, emitted)
        return grammar

    manager_class._create_grammar = create_grammar


def advance(manager: Any, grammar: Any, request: Any, request_class: Any, emitted: Sequence[int]) -> None:
    """Brings the automaton of a request to the state after its output, token by token on a copy of the request, because
    the end of reasoning depends on the tokens so far. Raises ValueError if the output contradicts the grammar; vLLM
    then fails only this request."""
    stated = request.structured_output_request
    copy = request_class(
        *(request.request_id, request.prompt_token_ids, request.sampling_params, None),
        reasoning_ended=stated.reasoning_ended,
        reasoning_parser_kwargs=stated.reasoning_parser_kwargs,
    )
    copy.structured_output_request.grammar = grammar
    for token in emitted:
        copy.append_output_token_ids(token)
        if not manager.accept_tokens(copy, [token]):
            raise ValueError(f"the repeated tokens of request {request.request_id} contradict its grammar")
    stated.reasoning_ended = copy.structured_output_request.reasoning_ended
    stated.reasoner = copy.structured_output_request.reasoner


def patch_worker(worker: Any) -> bool:
    """Lets requests of this process's workers start with output; returns whether it succeeded. Called for each worker,
    by its core."""
    try:
        from vllm.v1.worker.gpu_input_batch import CachedRequestState
    except ImportError:
        return False
    finish = CachedRequestState.__post_init__
    if getattr(finish, "presets_output", False):
        return True

    def finish_with_output(state: Any) -> None:
        finish(state)
        emitted = emitted_of(state.sampling_params)
        if emitted and not state.output_token_ids:
            state.output_token_ids.extend(emitted)
            skip_draws(state.generator, len(emitted))

    finish_with_output.__dict__["presets_output"] = True
    CachedRequestState.__post_init__ = finish_with_output
    return True


def skip_draws(generator: Any, count: int) -> None:
    """Skips what a seeded CPU sampler has drawn for so many tokens: one number each (vLLM's
    `TopKTopPSampler.forward_cpu`). `replay` refuses seeded requests on other devices with the first model runner."""
    if generator is None or generator.device.type != "cpu":
        return
    import torch

    torch.randint(0, 2**31, (count,), generator=generator, dtype=torch.long)
