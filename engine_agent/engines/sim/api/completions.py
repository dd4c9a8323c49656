"""POST /v1/completions, /tokenize and /detokenize: parses requests and writes answers in vLLM's shape."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from engine_agent.engines.openai_http import DONE_EVENT, Usage, error_event, event
from engine_agent.engines.sim.api.chat import tool_texts, tools_of
from engine_agent.engines.sim.api.common import request_of
from engine_agent.engines.sim.planning.answer_plan import Answer
from engine_agent.engines.sim.planning.generation_request import GenerationRequest, Prompt
from engine_agent.engines.sim.planning.vocabulary import TokenTexts, ranked_tokens
from engine_agent.protocol.request_bodies import (
    BadRequest,
    CompletionBody,
    Message,
    TokenId,
    ToolField,
    check_completion,
    check_prompt,
    read_body,
)

_DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default of `max_tokens` for completions; chat has none."""
_MOST_ANSWERS = 256
"""Prompts times `n`, of one request."""


_decoder = msgspec.json.Decoder(CompletionBody, strict=False)


def parse_completion(body: bytes) -> GenerationRequest:
    completion = read_body(_decoder, body)
    check_completion(completion)
    prompts = parse_prompts(completion.prompt, "prompt")
    if len(prompts) * completion.n > _MOST_ANSWERS:
        raise BadRequest(f"prompts times `n` are at most {_MOST_ANSWERS}", param="n")
    limit = _DEFAULT_COMPLETION_TOKENS if completion.max_tokens is None else completion.max_tokens
    return request_of(completion, prompts, max(limit, 1), top_logprobs=completion.logprobs)


def parse_prompts(given: Any, param: str) -> tuple[Prompt, ...]:
    """Returns prompts from a text, token ids, or a list of either. Raises BadRequest if it is something else; `param`
    is its name."""
    check_prompt(given, param)
    listed = given if isinstance(given, list) else [given]
    if isinstance(listed[0], int):
        return (Prompt.of_ids(listed),)
    return tuple(Prompt.of_text(one) if isinstance(one, str) else Prompt.of_ids(one) for one in listed)


# POST /tokenize and /detokenize: texts as tokens, and back.


class TokenizeBody(Struct, kw_only=True):
    """A text, or a conversation, which is tokenized like a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    tools: list[ToolField] | None = None
    return_token_strs: bool | None = None
    add_special_tokens: bool = True


class DetokenizeBody(Struct, kw_only=True):
    model: str | None = None
    tokens: list[TokenId]


_tokenize = msgspec.json.Decoder(TokenizeBody, strict=False)
_detokenize = msgspec.json.Decoder(DetokenizeBody, strict=False)


def parse_tokenize(body: bytes) -> tuple[TokenizeBody, Prompt]:
    """Returns the body, and the prompt to tokenize. Raises BadRequest if the body is not JSON, or a field is missing or
    wrong."""
    given = read_body(_tokenize, body)
    if given.messages is not None:
        texts = tuple(message.text() for message in given.messages)
        return given, Prompt((*tool_texts(tools_of(given.tools)), *texts), answered=texts[-1])
    if given.prompt is None:
        message = "either `prompt` or `messages` must be given"
        raise BadRequest(message, param="prompt", code="missing_required_parameter")
    return given, Prompt.of_text(given.prompt)


def tokenize_body(given: TokenizeBody, prompt: Prompt, texts: TokenTexts, max_model_len: int) -> bytes:
    tokens = prompt.token_texts()
    ids = texts.ids_of(tokens)
    strings = list(tokens) if given.return_token_strs else None
    body = {"count": len(ids), "max_model_len": max_model_len, "tokens": ids, "token_strs": strings}
    return msgspec.json.encode(body)


def parse_detokenize(body: bytes) -> DetokenizeBody:
    return read_body(_detokenize, body)


@dataclass(frozen=True)
class CompletionWriter:
    """See `AnswerWriter`. Answers to one prompt follow those to the previous one. `key` is the unique part of the id,
    `created` in Unix seconds."""

    key: str
    created: int
    request: GenerationRequest
    answers: Sequence[Answer]

    def opening(self, usage: Usage) -> bytes:
        """Returns nothing: the first event has the first token."""
        return b""

    def token_event(self, answer: int, index: int) -> bytes:
        planned = self.answers[answer]
        is_last = index == len(planned.tokens) - 1
        token = planned.tokens[index]
        choice: dict[str, Any] = {
            "index": answer,
            "text": token.delta,
            "logprobs": self._logprobs([token.text], index, self._offset(answer, index)),
            "finish_reason": planned.finish_reason if is_last else None,
            "stop_reason": planned.stop_reason if is_last else None,
        }
        return event(self._body([choice]))

    def closing(self, usage: Usage) -> bytes:
        counts = event(self._body([], usage=usage.body())) if self.request.include_usage else b""
        return counts + DONE_EVENT

    def whole(self, usage: Usage) -> bytes:
        choices = [self._choice(index, answer) for index, answer in enumerate(self.answers)]
        return msgspec.json.encode(self._body(choices, usage=usage.body()))

    def error_event(self, status: int, message: str) -> bytes:
        return error_event(status, message)

    def _offset(self, answer: int, index: int) -> int:
        """Where the text of a token begins; computed only for log probabilities."""
        return self._ends[answer][index - 1] if index and self.request.top_logprobs is not None else 0

    @cached_property
    def _ends(self) -> list[list[int]]:
        return [list(accumulate(len(token.text) for token in answer.tokens)) for answer in self.answers]

    def _choice(self, index: int, answer: Answer) -> dict[str, Any]:
        return {
            "index": index,
            "text": answer.text,
            "logprobs": self._logprobs([token.text for token in answer.tokens], 0, 0),
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
        }

    def _logprobs(self, texts: Sequence[str], first: int, offset: int) -> dict[str, Any] | None:
        """Of an answer's tokens, of which the `first`th begins at `offset` of its text."""
        top = self.request.top_logprobs
        if top is None:
            return None
        offsets: list[int] = []
        ranks = [ranked_tokens(text, place, max(0, top - 1)) for place, text in enumerate(texts, first)]
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        return {
            "text_offset": offsets,
            "token_logprobs": [ranked[0].logprob for ranked in ranks],
            "tokens": list(texts),
            "top_logprobs": [{one.text: one.logprob for one in ranked} for ranked in ranks],
        }

    def _body(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {
            "id": f"cmpl-{self.key}",
            "object": "text_completion",
            "created": self.created,
            "model": self.request.model,
            "choices": choices,
            **more,
        }
