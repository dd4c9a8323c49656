"""POST /v1/completions: what a request means."""

from typing import Any

import msgspec

from engine_agent.engines.sim.api.fields import Sampling, check_logprobs, check_sampling, form_of, read_body, stops_of
from engine_agent.engines.sim.planning.generation_request import BadRequest, GenerationRequest, Prompt
from engine_agent.engines.sim.planning.handover import is_handed_over, source_of

_DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default of `max_tokens` for completions; chat has none."""
_MOST_ANSWERS = 256
"""Prompts times `n`, of one request."""
_HIGHEST_ID = 2**63 - 1


class CompletionBody(Sampling, kw_only=True):
    """The body of a request. `prompt` is a text, a list of texts, a list of token ids or a list of such lists."""

    prompt: Any
    echo: bool | None = None
    logprobs: int | None = None
    suffix: Any = None
    prompt_embeds: Any = None


_decoder = msgspec.json.Decoder(CompletionBody)


def parse_completion(body: bytes) -> GenerationRequest:
    """What a completion request asks for.

    Raises:
        BadRequest: not JSON, or a field is missing or wrong.
    """
    completion = read_body(_decoder, body)
    check_sampling(completion)
    for name in ("suffix", "prompt_embeds"):
        if getattr(completion, name) is not None:
            raise BadRequest(f"{name} is not currently supported", param=name)
    if completion.logprobs is not None:
        check_logprobs(completion.logprobs, "logprobs")
    prompts = parse_prompts(completion.prompt, "prompt")
    if any(prompt.answered == "" for prompt in prompts):
        raise BadRequest("Either prompt or prompt_embeds must be provided and non-empty.", param="prompt")
    if len(prompts) * (completion.n or 1) > _MOST_ANSWERS:
        raise BadRequest(f"prompts times `n` are at most {_MOST_ANSWERS}", param="n")
    limit = _DEFAULT_COMPLETION_TOKENS if completion.max_tokens is None else completion.max_tokens
    if limit == 0 and not completion.echo:
        raise BadRequest("max_tokens must be at least 1, got 0.", param="max_tokens")
    options = completion.stream_options
    return GenerationRequest(
        model=completion.model,
        prompts=prompts,
        choices=completion.n or 1,
        # OpenAI: an echo without an answer; the engine computes one token for it, as vLLM's does.
        output_limit=max(limit, 1),
        is_echo_alone=limit == 0,
        min_tokens=completion.min_tokens or 0,
        exact_length=bool(completion.ignore_eos),
        seed=completion.seed or 0,
        priority=completion.priority or 0,
        stops=stops_of(completion),
        form=form_of(completion),
        stream=bool(completion.stream),
        include_usage=bool(options and options.include_usage),
        continuous_usage=bool(options and options.include_usage and options.continuous_usage_stats),
        top_logprobs=completion.logprobs,
        prompt_logprobs=completion.prompt_logprobs,
        return_token_ids=bool(completion.return_token_ids),
        echo=bool(completion.echo),
        is_handed_over=is_handed_over(completion.kv_transfer_params),
        source=source_of(completion.kv_transfer_params),
    )


def parse_prompts(given: Any, param: str) -> tuple[Prompt, ...]:
    """Prompts: a text, token ids, or a list of either.

    Raises:
        BadRequest: it is something else; `param` is its name.
    """
    if isinstance(given, str):
        return (Prompt.of_text(given),)
    if isinstance(given, list) and given:
        if all(isinstance(one, str) for one in given):
            return tuple(map(Prompt.of_text, given))
        if _are_ids(given):
            return (Prompt.of_ids(given),)
        if all(isinstance(one, list) and one and _are_ids(one) for one in given):
            return tuple(map(Prompt.of_ids, given))
    raise BadRequest(
        f"{param}: expected a text, a list of texts, a list of token ids or a list of such lists", param=param
    )


def _are_ids(given: list[Any]) -> bool:
    return all(type(one) is int and 0 <= one <= _HIGHEST_ID for one in given)
