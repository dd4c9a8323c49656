"""POST /v1/responses: parses requests, and writes responses whole or as events in the order of OpenAI and vLLM. It
stores no responses; the control plane does."""

from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
from msgspec import Struct

from engine_agent.engines.openai_http import Usage, error_body, event
from engine_agent.engines.sim.api.chat import tool_choice, tool_texts
from engine_agent.engines.sim.api.common import ANY_OBJECT, content_logprob, stop_texts
from engine_agent.engines.sim.planning.answer_plan import Answer
from engine_agent.engines.sim.planning.generation_request import GenerationRequest, OutputForm, Prompt, Stops, Tool
from engine_agent.protocol.request_bodies import (
    BadRequest,
    ContentPart,
    EngineMembers,
    check_bias,
    check_limit,
    check_logprobs,
    check_parts,
    read_body,
)

_LOGPROBS = "message.output_text.logprobs"


class InputItem(Struct):
    """A message, a call or the result of one."""

    type: str = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[ContentPart] | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[ContentPart] | None = None

    def text(self) -> str:
        if self.type == "function_call":
            return f"{self.name or ''} {self.arguments or ''}"
        given = self.output if self.type == "function_call_output" else self.content
        if isinstance(given, list):
            return " ".join(part.text for part in given if part.text)
        return given or ""


class TextFormat(Struct):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: Any = None
    strict: bool | None = None


class TextField(Struct):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningField(Struct):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None


Included = Literal[
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
]


class ResponsesBody(EngineMembers, kw_only=True):
    """The body of a request. Sampling parameters are checked and have no effect."""

    input: str | list[InputItem]
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: list[dict[str, Any]] = []
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextField | None = None
    include: list[Included] | None = None
    top_logprobs: int | None = None
    metadata: dict[str, str] | None = None
    reasoning: ReasoningField | None = None
    truncation: Literal["auto", "disabled"] | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] = "auto"
    store: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    prompt: Any = None


@dataclass(frozen=True)
class ResponsesRequest:
    """A request, and the members of its body that the answer repeats."""

    generation: GenerationRequest
    repeated: dict[str, Any]


_decoder = msgspec.json.Decoder(ResponsesBody, strict=False)


def parse_responses(body: bytes) -> ResponsesRequest:
    given = read_body(_decoder, body)
    _refuse_stored(given)
    check_bias(given.logit_bias)
    check_limit(given.max_output_tokens, "max_output_tokens")
    if _LOGPROBS in (given.include or ()):
        check_logprobs(given.top_logprobs or 0, "top_logprobs")
    tools = tuple(map(_tool, given.tools))
    choice = given.tool_choice if given.tool_choice is not None else "auto"
    if not tools and choice == "auto":
        choice = "none"
    kind, name = (choice.get("type"), choice.get("name")) if isinstance(choice, dict) else (choice, "")
    if not isinstance(name, str) or (isinstance(choice, dict) and kind != "function"):
        raise BadRequest(f"`tool_choice` names no function: {choice!r:.80}", param="tool_choice")
    generation = GenerationRequest(
        model=given.model,
        prompts=(_prompt(given, tools),),
        output_limit=given.max_output_tokens,
        limit_param="max_output_tokens",
        exact_length=bool(given.ignore_eos) and given.max_output_tokens is not None,
        seed=given.seed or 0,
        priority=given.priority or 0,
        stops=Stops(
            stop_texts(given.stop, "stop"),
            frozenset(given.stop_token_ids or ()),
            bool(given.include_stop_str_in_output),
        ),
        form=_form(given.text),
        tools=tools,
        tool_choice=tool_choice(name, kind, tools, given.parallel_tool_calls),
        stream=bool(given.stream),
        top_logprobs=given.top_logprobs or 0 if _LOGPROBS in (given.include or ()) else None,
    )
    return ResponsesRequest(generation, _repeated(given, choice))


def _refuse_stored(given: ResponsesBody) -> None:
    if given.previous_response_id is not None:
        message = f"Response with id '{given.previous_response_id:.200}' not found."
        raise BadRequest(message, param="previous_response_id", status=404)
    if given.background:
        raise BadRequest("`background` is not supported by sim: it stores no responses", param="background")
    for name in ("conversation", "prompt"):
        if getattr(given, name) is not None:
            raise BadRequest(f"`{name}` is not supported by sim", param=name)


def _tool(given: dict[str, Any]) -> Tool:
    name, description = given.get("name"), given.get("description") or ""
    if given.get("type") != "function" or not isinstance(name, str) or not name or not isinstance(description, str):
        raise BadRequest(f"`tools` has one that is no function: {given!r:.80}", param="tools")
    return Tool(name, description, given.get("parameters"))


def _prompt(given: ResponsesBody, tools: tuple[Tool, ...]) -> Prompt:
    instructions = () if given.instructions is None else (given.instructions,)
    if isinstance(given.input, str):
        return Prompt((*tool_texts(tools), *instructions, given.input), answered=given.input)
    items = [item for item in given.input if item.type != "reasoning"]
    for item in items:
        if item.type not in {"message", "function_call", "function_call_output"}:
            raise BadRequest(f"`input` has an item of type {item.type!r:.60}, which sim does not read", param="input")
        if item.type == "message" and item.content is None:
            message = "`input` has a message whose content is no text and no list of parts"
            raise BadRequest(message, param="input", code="invalid_type")
        check_parts(item.content, "input")
    if not items:
        raise BadRequest("`input` must not be empty", param="input")
    texts = [item.text() for item in items]
    follows_tool = items[-1].type == "function_call_output"
    return Prompt((*tool_texts(tools), *instructions, *texts), answered=texts[-1], follows_tool=follows_tool)


def _form(text: TextField | None) -> OutputForm | None:
    form = text.format if text is not None else None
    if form is None or form.type == "text":
        return None
    if form.type == "json_schema" and (form.schema is None or form.name is None):
        raise BadRequest("`text.format` needs a `name` and a `schema`", param="text")
    is_open = form.type == "json_object" or form.schema is None
    return OutputForm("json", ANY_OBJECT if is_open else form.schema, "text.format")


def _repeated(given: ResponsesBody, choice: Any) -> dict[str, Any]:
    tools = [{"strict": None, "parameters": None, **tool} for tool in given.tools]
    return {
        "instructions": given.instructions,
        "metadata": given.metadata or {},
        "parallel_tool_calls": given.parallel_tool_calls is not False,
        "temperature": 1.0 if given.temperature is None else given.temperature,
        "tool_choice": choice,
        "tools": tools,
        "top_p": 1.0 if given.top_p is None else given.top_p,
        "background": False,
        "max_output_tokens": given.max_output_tokens,
        "previous_response_id": None,
        "reasoning": None if given.reasoning is None else msgspec.to_builtins(given.reasoning),
        "service_tier": given.service_tier,
        "text": _text_body(given.text),
        "top_logprobs": given.top_logprobs or 0,
        "truncation": given.truncation or "disabled",
        "user": given.user,
    }


def _text_body(text: TextField | None) -> dict[str, Any]:
    form = text.format if text is not None else None
    if form is None or form.type != "json_schema":
        return {"format": {"type": form.type if form else "text"}}
    return {"format": {"type": form.type, "name": form.name or "", "schema": form.schema or {}, "strict": form.strict}}


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
    """See `AnswerWriter`. `key` is the unique part of all ids, `created` in Unix seconds. It numbers its events."""

    key: str
    created: int
    request: ResponsesRequest
    answer: Answer
    _sequence: int = field(default=0, init=False)

    def opening(self, usage: Usage) -> bytes:
        begun = self._response("in_progress", [], None)
        return self._event("response.created", response=begun) + self._event("response.in_progress", response=begun)

    def token_event(self, answer: int, index: int) -> bytes:
        """See `AnswerWriter`; includes the events around an item's first and last token."""
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
        """The whole response. It is `completed` even if its text is truncated: vLLM has no other last event."""
        return self._event("response.completed", response=self._complete(usage))

    def whole(self, usage: Usage) -> bytes:
        return msgspec.json.encode(self._complete(usage))

    def error_event(self, status: int, message: str) -> bytes:
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
