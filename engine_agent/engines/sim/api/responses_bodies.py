"""POST /v1/responses: how a response is written, whole or as events in the order of OpenAI and vLLM."""

from dataclasses import dataclass, field
from typing import Any

import msgspec

from engine_agent.engines.sim.api.responses_requests import ResponsesRequest
from engine_agent.engines.sim.api.writing import Usage, content_logprob, error_body, event
from engine_agent.engines.sim.planning.answer_plan import Answer


def _usage_body(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


@dataclass
class ResponsesWriter:
    """See `AnswerWriter`. `key` is the unique part of all ids, `created` in Unix seconds. It counts its events."""

    key: str
    created: int
    request: ResponsesRequest
    answer: Answer
    _sequence: int = field(default=0, init=False)

    def opening(self, usage: Usage) -> bytes:
        """The response before it has anything."""
        begun = self._response("in_progress", [], None)
        return self._event("response.created", response=begun) + self._event("response.in_progress", response=begun)

    def token_event(self, answer: int, index: int) -> bytes:
        """See `AnswerWriter`; what an item needs before its first token and after its last comes with them."""
        tokens = self.answer.tokens
        token = tokens[index]
        opens = index == 0 or tokens[index - 1].call != token.call
        closes = index == len(tokens) - 1 or tokens[index + 1].call != token.call
        place = {"item_id": self._item_id(token.call), "output_index": token.call or 0}
        opening = self._opening_item(token.call) if opens else b""
        if token.call is not None:
            kind, more = "response.function_call_arguments.delta", {}
        else:
            kind, more = (
                "response.output_text.delta",
                {"content_index": 0, "logprobs": self._logprobs(index, index + 1)},
            )
        delta = self._event(kind, **place, **more, delta=token.delta) if token.delta else b""
        return opening + delta + (self._closing_item(token.call) if closes else b"")

    def closing(self, usage: Usage) -> bytes:
        """The whole response, which is complete also where its text is not: vLLM has no other last event."""
        return self._event("response.completed", response=self._complete(usage))

    def whole(self, usage: Usage) -> bytes:
        return msgspec.json.encode(self._complete(usage))

    def error_event(self, status: int, message: str) -> bytes:
        """The error as a stream of responses has it, after which it ends."""
        code = "server_error" if status >= 500 else "invalid_request_error"
        return self._event(
            "error", code=code, message=message, param=None, **msgspec.json.decode(error_body(status, message))
        )

    def _event(self, kind: str, **body: Any) -> bytes:
        sequence, self._sequence = self._sequence, self._sequence + 1
        return event({"type": kind, "sequence_number": sequence, **body}, kind)

    def _item_id(self, call: int | None) -> str:
        return f"msg_{self.key}" if call is None else f"fc_{self.key}{call:02x}"

    def _opening_item(self, call: int | None) -> bytes:
        added = self._event(
            "response.output_item.added", output_index=call or 0, item=self._item(call, "in_progress", is_empty=True)
        )
        if call is not None:
            return added
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        place = {"item_id": self._item_id(None), "output_index": 0, "content_index": 0}
        return added + self._event("response.content_part.added", **place, part=part)

    def _closing_item(self, call: int | None) -> bytes:
        place: dict[str, Any] = {"item_id": self._item_id(call), "output_index": call or 0}
        item = self._item(call, self._status(call))
        done = ("response.output_item.done", {"output_index": call or 0, "item": item})
        if call is not None:
            written = {"name": item["name"], "arguments": item["arguments"]}
            return self._event("response.function_call_arguments.done", **place, **written) + self._event(
                done[0], **done[1]
            )
        part = item["content"][0]
        place["content_index"] = 0
        return (
            self._event("response.output_text.done", **place, text=part["text"], logprobs=part["logprobs"])
            + self._event("response.content_part.done", **place, part=part)
            + self._event(done[0], **done[1])
        )

    def _status(self, call: int | None) -> str:
        is_last = call is None or call == len(self.answer.called) - 1
        return "incomplete" if is_last and self.answer.finish_reason == "length" else "completed"

    def _item(self, call: int | None, status: str, *, is_empty: bool = False) -> dict[str, Any]:
        if call is None:
            text = {
                "type": "output_text",
                "text": self.answer.text,
                "annotations": [],
                "logprobs": self._logprobs(0, len(self.answer.tokens)),
            }
            content = [] if is_empty else [text]
            return {
                "id": self._item_id(None),
                "type": "message",
                "role": "assistant",
                "content": content,
                "status": status,
            }
        name, arguments = self.answer.called[call]
        return {
            "id": self._item_id(call),
            "type": "function_call",
            "call_id": f"call_{self.key}{call:02x}",
            "name": name,
            "arguments": "" if is_empty else arguments,
            "status": status,
        }

    def _logprobs(self, first: int, end: int) -> list[dict[str, Any]]:
        top = self.request.generation.top_logprobs
        if top is None:
            return []
        return [content_logprob(self.answer.tokens[index].text, index, top) for index in range(first, end)]

    def _complete(self, usage: Usage) -> dict[str, Any]:
        calls: list[int | None] = list(range(len(self.answer.called)))
        output = [self._item(call, self._status(call)) for call in calls or [None]]
        status = "incomplete" if self.answer.finish_reason == "length" else "completed"
        return self._response(status, output, usage)

    def _response(self, status: str, output: list[dict[str, Any]], usage: Usage | None) -> dict[str, Any]:
        return {
            "id": f"resp_{self.key}",
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self.request.generation.model,
            "output": output,
            **self.request.repeated,
            "usage": None if usage is None else _usage_body(usage),
        }
