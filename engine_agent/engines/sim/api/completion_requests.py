"""POST /v1/completions: what a request means."""

from typing import Any

import msgspec

from engine_agent.engines.sim.api.fields import form_of, stops_of, transfer_of
from engine_agent.engines.sim.planning.generation_request import GenerationRequest, Prompt
from engine_agent.engines.sim.planning.handover import is_handed_over, source_of
from engine_agent.protocol.request_bodies import BadRequest, CompletionBody, check_completion, check_prompt, read_body

_DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default of `max_tokens` for completions; chat has none."""
_MOST_ANSWERS = 256
"""Prompts times `n`, of one request."""


_decoder = msgspec.json.Decoder(CompletionBody, strict=False)


def parse_completion(body: bytes) -> GenerationRequest:
    """What a completion request asks for.

    Raises:
        BadRequest: not JSON, or a field is missing or wrong.
    """
    completion = read_body(_decoder, body)
    check_completion(completion)
    transfer = transfer_of(completion.kv_transfer_params)
    prompts = parse_prompts(completion.prompt, "prompt")
    if len(prompts) * completion.n > _MOST_ANSWERS:
        raise BadRequest(f"prompts times `n` are at most {_MOST_ANSWERS}", param="n")
    limit = _DEFAULT_COMPLETION_TOKENS if completion.max_tokens is None else completion.max_tokens
    options = completion.stream_options
    return GenerationRequest(
        model=completion.model,
        prompts=prompts,
        choices=completion.n,
        output_limit=max(limit, 1),
        min_tokens=completion.min_tokens or 0,
        exact_length=bool(completion.ignore_eos),
        seed=completion.seed or 0,
        priority=completion.priority or 0,
        stops=stops_of(completion),
        form=form_of(completion),
        stream=bool(completion.stream),
        include_usage=bool(options and options.include_usage),
        top_logprobs=completion.logprobs,
        is_handed_over=is_handed_over(transfer),
        source=source_of(transfer),
    )


def parse_prompts(given: Any, param: str) -> tuple[Prompt, ...]:
    """Prompts: a text, token ids, or a list of either.

    Raises:
        BadRequest: it is something else; `param` is its name.
    """
    check_prompt(given, param)
    listed = given if isinstance(given, list) else [given]
    if isinstance(listed[0], int):
        return (Prompt.of_ids(listed),)
    return tuple(Prompt.of_text(one) if isinstance(one, str) else Prompt.of_ids(one) for one in listed)
