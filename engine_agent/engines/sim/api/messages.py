"""POST /v1/messages and /v1/messages/count_tokens, Anthropic's API: parses requests, writes messages, events and
errors."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from engine_agent.engines.openai_http import Usage, event
from engine_agent.engines.sim.api.chat import tool_choice, tool_texts
from engine_agent.engines.sim.api.common import ANY_OBJECT, stop_texts
from engine_agent.engines.sim.planning.answer_plan import Answer
from engine_agent.engines.sim.planning.generation_request import GenerationRequest, OutputForm, Prompt, Stops, Tool
from engine_agent.protocol.api_surface import ErrorForm, error_object
from engine_agent.protocol.request_bodies import BadRequest, Positive, Temperature, TopK, TopP, check_parts, read_body

BlockType = Literal[
    "text",
    "image",
    "tool_use",
    "tool_result",
    "tool_reference",
    "thinking",
    "redacted_thinking",
    "tool_addition",
    "tool_removal",
]


class Block(Struct):
    """A block of a message: text, a call, the result of one; other blocks are ignored."""

    type: BlockType
    text: str | None = None
    name: str | None = None
    input: Any = None
    content: str | list[dict[str, Any]] | None = None

    def read(self) -> str:
        if self.type == "tool_use":
            return f"{self.name or ''} {msgspec.json.encode(self.input).decode()}"
        if self.type == "tool_result" and isinstance(self.content, list):
            return " ".join(part["text"] for part in self.content if isinstance(part.get("text"), str))
        if self.type == "tool_result" and isinstance(self.content, str):
            return self.content
        return self.text or ""


class Turn(Struct):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]

    def text(self) -> str:
        return self.content if isinstance(self.content, str) else " ".join(filter(None, map(Block.read, self.content)))

    @property
    def blocks(self) -> list[Block]:
        return self.content if isinstance(self.content, list) else []

    @property
    def has_content(self) -> bool:
        """An empty text counts as content, an empty list does not."""
        return isinstance(self.content, str) or any(block.type != "text" or block.text for block in self.content)

    @property
    def is_tool_result(self) -> bool:
        """Whether it ends with the result of a call."""
        return isinstance(self.content, list) and bool(self.content) and self.content[-1].type == "tool_result"


class ToolDefinition(Struct):
    name: Annotated[str, Meta(min_length=1)]
    input_schema: dict[str, Any]
    description: str | None = None


class ToolChoiceField(Struct):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputFormat(Struct):
    schema: Any = None
    type: Literal["json_schema"] = "json_schema"


class OutputConfig(Struct):
    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class EnabledThinking(Struct, tag_field="type", tag="enabled"):
    budget_tokens: Annotated[int, Meta(ge=1024)]


class DisabledThinking(Struct, tag_field="type", tag="disabled"):
    pass


class AdaptiveThinking(Struct, tag_field="type", tag="adaptive"):
    """Accepted; the simulator never thinks."""


class CountBody(Struct, kw_only=True):
    """The members that both paths read."""

    model: str
    messages: list[Turn]
    system: str | list[Block] | None = None
    tools: list[ToolDefinition] | None = None
    tool_choice: ToolChoiceField | None = None
    thinking: EnabledThinking | DisabledThinking | AdaptiveThinking | None = None


class MessagesBody(CountBody, kw_only=True):
    """The body of a request. Sampling parameters are checked and have no effect."""

    max_tokens: Positive
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    output_config: OutputConfig | None = None
    metadata: dict[str, Any] | None = None
    temperature: Temperature | None = None
    top_k: TopK | None = None
    top_p: TopP | None = None


_count_decoder = msgspec.json.Decoder(CountBody, strict=False)
_decoder = msgspec.json.Decoder(MessagesBody, strict=False)


def parse_count(body: bytes) -> tuple[str, Prompt]:
    """Returns the model, and the prompt whose tokens are counted. Raises BadRequest if the body is not JSON, or a field
    is missing or wrong."""
    given = read_body(_count_decoder, body)
    return given.model, _prompt(given, _tools(given))


def parse_messages(body: bytes) -> GenerationRequest:
    given = read_body(_decoder, body)
    _check_thinking(given)
    tools = _tools(given)
    choice = given.tool_choice or ToolChoiceField("auto" if tools else "none")
    if choice.type == "tool" and not choice.name:
        raise BadRequest("tool_choice.name is required when type is 'tool'", param="tool_choice")
    name = choice.name or "" if choice.type == "tool" else ""
    kind = "required" if choice.type == "any" else choice.type
    return GenerationRequest(
        model=given.model,
        prompts=(_prompt(given, tools),),
        output_limit=given.max_tokens,
        stops=Stops(stop_texts(given.stop_sequences, "stop_sequences")),
        form=_form(given.output_config),
        tools=tools,
        tool_choice=tool_choice(name, kind, tools, not choice.disable_parallel_tool_use),
        stream=bool(given.stream),
    )


def _check_thinking(given: MessagesBody) -> None:
    if not isinstance(given.thinking, EnabledThinking):
        return
    if given.thinking.budget_tokens >= given.max_tokens:
        raise BadRequest("thinking.budget_tokens must be less than max_tokens", param="thinking")
    raise BadRequest("This model does not think", param="thinking", code="unsupported_parameter")


def _tools(given: CountBody) -> tuple[Tool, ...]:
    return tuple(Tool(tool.name, tool.description or "", tool.input_schema) for tool in given.tools or ())


def _prompt(given: CountBody, tools: tuple[Tool, ...]) -> Prompt:
    for turn in given.messages:
        check_parts([block for block in turn.blocks if block.type == "image"], "messages")
    if not any(turn.has_content for turn in given.messages):
        raise BadRequest("`messages` must not be empty", param="messages")
    system = Turn("system", given.system).text() if given.system else ""
    texts = [turn.text() for turn in given.messages]
    read = (*tool_texts(tools), *([system] if system else []), *texts)
    return Prompt(read, answered=texts[-1], follows_tool=given.messages[-1].is_tool_result)


def _form(config: OutputConfig | None) -> OutputForm | None:
    if config is None or config.format is None:
        return None
    schema = config.format.schema
    return OutputForm("json", ANY_OBJECT if schema is None else schema, "output_config")


def anthropic_error(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    return error_object(ErrorForm.ANTHROPIC, status, message, code=code, param=param)


def count_body(tokens: int) -> bytes:
    return msgspec.json.encode({"input_tokens": tokens, "context_management": {"original_input_tokens": tokens}})


@dataclass(frozen=True)
class MessagesWriter:
    """See `AnswerWriter`. `key` is the unique part of all ids."""

    key: str
    request: GenerationRequest
    answer: Answer

    def opening(self, usage: Usage) -> bytes:
        begun = self._message([], None, None, Usage(usage.prompt_tokens, 0, usage.cached_tokens))
        return _event("message_start", message=begun)

    def token_event(self, answer: int, index: int) -> bytes:
        """See `AnswerWriter`; includes the events around a block's first and last token."""
        tokens = self.answer.tokens
        token = tokens[index]
        block = token.call or 0
        events = b""
        if index == 0 or tokens[index - 1].call != token.call:
            events += _event("content_block_start", index=block, content_block=self._block(token.call, is_empty=True))
        if token.delta:
            kind, name = ("text_delta", "text") if token.call is None else ("input_json_delta", "partial_json")
            events += _event("content_block_delta", index=block, delta={"type": kind, name: token.delta})
        if index == len(tokens) - 1 or tokens[index + 1].call != token.call:
            events += _event("content_block_stop", index=block)
        return events

    def closing(self, usage: Usage) -> bytes:
        reason, sequence = self._stop()
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        return _event("message_delta", delta=delta, usage=_usage_body(usage)) + _event("message_stop")

    def whole(self, usage: Usage) -> bytes:
        calls: list[int | None] = list(range(len(self.answer.called)))
        blocks = [self._block(call) for call in calls or [None]]
        return msgspec.json.encode(self._message(blocks, *self._stop(), usage))

    def error_event(self, status: int, message: str) -> bytes:
        return event(anthropic_error(status, message), "error")

    def _stop(self) -> tuple[str, str | None]:
        if self.answer.finish_reason == "length":
            return "max_tokens", None
        if self.answer.calls:
            return "tool_use", None
        if isinstance(self.answer.stop_reason, str):
            return "stop_sequence", self.answer.stop_reason
        return "end_turn", None

    def _block(self, call: int | None, *, is_empty: bool = False) -> dict[str, Any]:
        if call is None:
            return {"type": "text", "text": "" if is_empty else self.answer.text}
        name, arguments = self.answer.called[call]
        written = {} if is_empty else _object(arguments)
        return {"type": "tool_use", "id": f"toolu_{self.key}{call:02x}", "name": name, "input": written}

    def _message(
        self, blocks: list[dict[str, Any]], stop_reason: str | None, stop_sequence: str | None, usage: Usage
    ) -> dict[str, Any]:
        return {
            "id": f"msg_{self.key}",
            "type": "message",
            "role": "assistant",
            "content": blocks,
            "model": self.request.model,
            "stop_reason": stop_reason,
            "stop_sequence": stop_sequence,
            "usage": _usage_body(usage),
        }


def _event(kind: str, **body: Any) -> bytes:
    return event({"type": kind, **body}, kind)


def _usage_body(usage: Usage) -> dict[str, Any]:
    """Anthropic counts cached tokens separately from `input_tokens`."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def _object(arguments: str) -> Any:
    try:
        return msgspec.json.decode(arguments)
    except msgspec.DecodeError:
        return {}
