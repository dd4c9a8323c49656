"""POST /v1/completions: how answers are written, in vLLM's shape. Answers to one prompt come after those to the one
before."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import msgspec

from engine_agent.engines.sim.api.writing import DONE_EVENT, Usage, error_event, event, prompt_logprobs
from engine_agent.engines.sim.planning.answer_plan import Answer
from engine_agent.engines.sim.planning.generation_request import GenerationRequest, Prompt
from engine_agent.engines.sim.text.logprobs import ranked_tokens
from engine_agent.engines.sim.text.vocabulary import token_id


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

    def token_event(self, answer: int, index: int, usage: Usage) -> bytes:
        """See `AnswerWriter`; an echo comes with the first token."""
        said = self.answers[answer]
        prompt = self._prompt(answer)
        is_last = index == len(said.tokens) - 1
        with_echo = index == 0 and self.request.echo
        texts = self._texts(answer)[: prompt.tokens + 1] if with_echo else [said.tokens[index].text]
        first, offset = (-prompt.tokens, 0) if with_echo else (index, self._offset(answer, index))
        text = "" if self.request.is_echo_alone else said.tokens[index].delta
        choice: dict[str, Any] = {
            "index": answer,
            "text": (self._echo(prompt) if with_echo else "") + text,
            "logprobs": self._logprobs(texts, first, offset),
            "finish_reason": said.finish_reason if is_last else None,
            "stop_reason": said.stop_reason if is_last else None,
        }
        if self.request.return_token_ids:
            choice["token_ids"] = [token_id(said.tokens[index].text)]
            choice |= {"prompt_token_ids": prompt.token_ids()} if index == 0 else {}
        more = {"usage": usage.body()} if self.request.continuous_usage else {}
        return event(self._body([choice], **more))

    def closing(self, usage: Usage) -> bytes:
        """The token counts, if wanted, with no choice beside them."""
        counts = event(self._body([], usage=usage.body())) if self.request.include_usage else b""
        return counts + DONE_EVENT

    def whole(self, usage: Usage) -> bytes:
        """See `AnswerWriter`."""
        choices = [self._choice(index, answer) for index, answer in enumerate(self.answers)]
        return msgspec.json.encode(self._body(choices, usage=usage.body()))

    def error_event(self, status: int, message: str) -> bytes:
        """See `AnswerWriter`."""
        return error_event(status, message)

    def _prompt(self, answer: int) -> Prompt:
        return self.request.prompts[answer // self.request.choices]

    def _echo(self, prompt: Prompt) -> str:
        return prompt.answered if self.request.echo else ""

    def _echoed(self, prompt: Prompt) -> int:
        return prompt.tokens if self.request.echo else 0

    def _texts(self, answer: int) -> list[str]:
        """All tokens that the answer shows: of an echo and of its own."""
        echoed = self._prompt(answer).token_texts() if self.request.echo else ()
        own = () if self.request.is_echo_alone else self.answers[answer].tokens
        return [*echoed, *(token.text for token in own)]

    def _offset(self, answer: int, index: int) -> int:
        """Where the text of a token begins; looked for only if somebody wants to know."""
        if self.request.top_logprobs is None or index == 0:
            return len(self._echo(self._prompt(answer)))
        return len(self._echo(self._prompt(answer))) + self._ends[answer][index - 1]

    @cached_property
    def _ends(self) -> list[list[int]]:
        return [list(accumulate(len(token.text) for token in answer.tokens)) for answer in self.answers]

    def _choice(self, index: int, answer: Answer) -> dict[str, Any]:
        prompt = self._prompt(index)
        choice: dict[str, Any] = {
            "index": index,
            "text": self._echo(prompt) + ("" if self.request.is_echo_alone else answer.text),
            "logprobs": self._logprobs(self._texts(index), -self._echoed(prompt), 0),
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
        }
        if self.request.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(prompt, self.request.prompt_logprobs)
        if self.request.return_token_ids:
            choice["token_ids"] = [token_id(token.text) for token in answer.tokens]
            choice["prompt_token_ids"] = prompt.token_ids()
        return choice

    def _logprobs(self, texts: Sequence[str], first: int, offset: int) -> dict[str, Any] | None:
        """`first` is the place of the first of these tokens, negative in an echo; nothing precedes the very first."""
        top = self.request.top_logprobs
        if top is None:
            return None
        offsets: list[int] = []
        logprobs: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        for place, text in enumerate(texts, first):
            ranked = ranked_tokens(text, place, max(0, top - 1))
            follows_nothing = self.request.echo and place == first and first < 0
            offsets.append(offset)
            offset += len(text)
            logprobs.append(None if follows_nothing else ranked[0].logprob)
            tops.append(None if follows_nothing else {one.text: one.logprob for one in ranked})
        return {"text_offset": offsets, "token_logprobs": logprobs, "tokens": list(texts), "top_logprobs": tops}

    def _body(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {
            "id": f"cmpl-{self.key}",
            "object": "text_completion",
            "created": self.created,
            "model": self.request.model,
            "choices": choices,
            **more,
        }
