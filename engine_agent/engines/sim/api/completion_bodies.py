"""POST /v1/completions: how answers are written, in vLLM's shape. Answers to one prompt come after those to the one
before."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import msgspec

from engine_agent.engines.sim.api.writing import DONE_EVENT, Usage, error_event, event
from engine_agent.engines.sim.planning.answer_plan import Answer
from engine_agent.engines.sim.planning.generation_request import GenerationRequest
from engine_agent.engines.sim.text.logprobs import ranked_tokens


@dataclass(frozen=True)
class CompletionWriter:
    """See `AnswerWriter`. `key` is the unique part of the id, `created` in Unix seconds."""

    key: str
    created: int
    request: GenerationRequest
    answers: Sequence[Answer]

    def opening(self, usage: Usage) -> bytes:
        """Nothing: the first event has the first token."""
        return b""

    def token_event(self, answer: int, index: int) -> bytes:
        said = self.answers[answer]
        is_last = index == len(said.tokens) - 1
        token = said.tokens[index]
        choice: dict[str, Any] = {
            "index": answer,
            "text": token.delta,
            "logprobs": self._logprobs([token.text], index, self._offset(answer, index)),
            "finish_reason": said.finish_reason if is_last else None,
            "stop_reason": said.stop_reason if is_last else None,
        }
        return event(self._body([choice]))

    def closing(self, usage: Usage) -> bytes:
        """The token counts, if wanted, with no choice beside them."""
        counts = event(self._body([], usage=usage.body())) if self.request.include_usage else b""
        return counts + DONE_EVENT

    def whole(self, usage: Usage) -> bytes:
        choices = [self._choice(index, answer) for index, answer in enumerate(self.answers)]
        return msgspec.json.encode(self._body(choices, usage=usage.body()))

    def error_event(self, status: int, message: str) -> bytes:
        return error_event(status, message)

    def _offset(self, answer: int, index: int) -> int:
        """Where the text of a token begins. It is computed only for log probabilities."""
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
        """Tokens of an answer, of which the `first`th begins at `offset` of its text."""
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
