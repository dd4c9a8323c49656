"""POST /v1/chat/completions: how answers are written, in vLLM's shape."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from engine_agent.engines.sim.api.writing import DONE_EVENT, Usage, content_logprob, error_event, event
from engine_agent.engines.sim.planning.answer_plan import Answer, Token
from engine_agent.engines.sim.planning.generation_request import GenerationRequest


@dataclass(frozen=True)
class ChatWriter:
    """See `AnswerWriter`. `key` is the unique part of all ids, `created` in Unix seconds."""

    key: str
    created: int
    request: GenerationRequest
    answers: Sequence[Answer]

    def opening(self, usage: Usage) -> bytes:
        """Who speaks, for each answer."""
        roles = [
            self._chunk([_stream_choice(index, {"role": "assistant", "content": ""})])
            for index in range(len(self.answers))
        ]
        return b"".join(roles)

    def token_event(self, answer: int, index: int) -> bytes:
        said = self.answers[answer]
        token = said.tokens[index]
        is_last = index == len(said.tokens) - 1
        delta = self._delta(answer, index, token)
        choice = _stream_choice(
            answer,
            delta,
            stop_reason=said.stop_reason if is_last else None,
            logprobs=self._logprobs([(index, token)]),
            finish_reason=said.finish_reason if is_last else None,
        )
        return self._chunk([choice])

    def closing(self, usage: Usage) -> bytes:
        """The token counts, if wanted, with no choice beside them."""
        counts = self._chunk([], usage=usage.body()) if self.request.include_usage else b""
        return counts + DONE_EVENT

    def whole(self, usage: Usage) -> bytes:
        choices = [self._choice(index, answer) for index, answer in enumerate(self.answers)]
        return msgspec.json.encode(self._body("chat.completion", choices, usage=usage.body()))

    def error_event(self, status: int, message: str) -> bytes:
        return error_event(status, message)

    def _delta(self, answer: int, index: int, token: Token) -> dict[str, Any]:
        if token.call is None:
            return {"content": token.delta}
        tokens = self.answers[answer].tokens
        if index and tokens[index - 1].call == token.call:
            return {"tool_calls": [{"index": token.call, "function": {"arguments": token.delta}}]}
        return {"tool_calls": [{"index": token.call, **self._call(answer, token.call, token.text, "")}]}

    def _call(self, answer: int, call: int, name: str, arguments: str) -> dict[str, Any]:
        function = {"name": name, "arguments": arguments}
        return {"id": f"call_{self.key}{answer:02x}{call:02x}", "type": "function", "function": function}

    def _choice(self, index: int, answer: Answer) -> dict[str, Any]:
        content = None if answer.calls and not answer.text else answer.text
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if answer.called:
            message["tool_calls"] = [
                self._call(index, call, name, arguments) for call, (name, arguments) in enumerate(answer.called)
            ]
        return {
            "index": index,
            "message": message,
            "stop_reason": answer.stop_reason,
            "logprobs": self._logprobs(list(enumerate(answer.tokens))),
            "finish_reason": answer.finish_reason,
        }

    def _logprobs(self, tokens: Sequence[tuple[int, Token]]) -> dict[str, Any] | None:
        top = self.request.top_logprobs
        if top is None:
            return None
        return {"content": [content_logprob(token.text, index, top) for index, token in tokens]}

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        return event(self._body("chat.completion.chunk", choices, **more))

    def _body(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{self.key}",
            "object": kind,
            "created": self.created,
            "model": self.request.model,
            "choices": choices,
            **more,
        }


def _stream_choice(index: int, delta: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **more}
