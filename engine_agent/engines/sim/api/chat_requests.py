"""POST /v1/chat/completions: what a request means."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from engine_agent.engines.sim.api.fields import (
    NotNegative,
    Sampling,
    check_logprobs,
    check_sampling,
    form_of,
    read_body,
    stops_of,
)
from engine_agent.engines.sim.planning.generation_request import BadRequest, GenerationRequest, Prompt, Tool, ToolChoice
from engine_agent.engines.sim.planning.handover import is_handed_over, source_of

TOOL_ROLES = frozenset({"tool", "function"})
"""Whose messages are results of calls."""


class ContentPart(Struct):
    """A part of a message; only text counts here."""

    type: str
    text: str | None = None


class CalledFunction(Struct):
    """A call of before, as the client sends it back."""

    name: str
    arguments: str = ""


class ToolCall(Struct):
    """See `CalledFunction`."""

    function: CalledFunction | None = None


class Message(Struct):
    """One turn of a conversation."""

    role: str
    content: str | list[ContentPart] | None = None
    tool_calls: list[ToolCall] | None = None

    def text(self) -> str:
        """Its text, parts joined by spaces; its calls come after it."""
        calls = [f"{call.function.name} {call.function.arguments}" for call in self.tool_calls or () if call.function]
        if isinstance(self.content, list):
            return " ".join([*(part.text for part in self.content if part.text), *calls])
        return " ".join([*([self.content] if self.content else []), *calls])


class FunctionField(Struct):
    """A function that may be called."""

    name: Annotated[str, Meta(min_length=1)]
    description: str | None = None
    parameters: Any = None
    strict: bool | None = None


class ToolField(Struct):
    """A member of `tools`."""

    function: FunctionField
    type: Literal["function"] = "function"


class ChoiceFunction(Struct):
    """The function of a named tool choice."""

    name: str


class NamedChoice(Struct):
    """`tool_choice` as an object."""

    function: ChoiceFunction
    type: Literal["function"] = "function"


class ChatBody(Sampling, kw_only=True):
    """The body of a request."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: NotNegative | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[ToolField] | None = None
    tool_choice: str | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    echo: bool | None = None


_decoder = msgspec.json.Decoder(ChatBody)


def parse_chat(body: bytes) -> GenerationRequest:
    """What a chat request asks for.

    Raises:
        BadRequest: not JSON, or a field is missing or wrong.
    """
    chat = read_body(_decoder, body)
    check_sampling(chat)
    limit_param = "max_tokens" if chat.max_completion_tokens is None else "max_completion_tokens"
    limit = chat.max_tokens if chat.max_completion_tokens is None else chat.max_completion_tokens
    if limit == 0:
        raise BadRequest(f"{limit_param} must be at least 1, got 0.", param=limit_param)
    tools = tools_of(chat.tools)
    options = chat.stream_options
    return GenerationRequest(
        model=chat.model,
        prompts=(_prompt(chat, tools),),
        choices=chat.n or 1,
        output_limit=limit,
        limit_param=limit_param,
        min_tokens=chat.min_tokens or 0,
        exact_length=bool(chat.ignore_eos) and limit is not None,
        seed=chat.seed or 0,
        priority=chat.priority or 0,
        stops=stops_of(chat),
        form=form_of(chat),
        tools=tools,
        tool_choice=_tool_choice(chat, tools),
        stream=bool(chat.stream),
        include_usage=bool(options and options.include_usage),
        continuous_usage=bool(options and options.include_usage and options.continuous_usage_stats),
        top_logprobs=_top_logprobs(chat),
        prompt_logprobs=chat.prompt_logprobs,
        return_token_ids=bool(chat.return_token_ids),
        echo=bool(chat.echo) and chat.messages[-1].role == "assistant",
        is_handed_over=is_handed_over(chat.kv_transfer_params),
        source=source_of(chat.kv_transfer_params),
    )


def _prompt(chat: ChatBody, tools: tuple[Tool, ...]) -> Prompt:
    texts = [message.text() for message in chat.messages]
    return Prompt((*tool_texts(tools), *texts), answered=texts[-1], follows_tool=chat.messages[-1].role in TOOL_ROLES)


def tools_of(given: list[ToolField] | None) -> tuple[Tool, ...]:
    """Tools, in the form of all families."""
    fields = [tool.function for tool in given or ()]
    return tuple(Tool(field.name, field.description or "", field.parameters) for field in fields)


def tool_texts(tools: tuple[Tool, ...]) -> tuple[str, ...]:
    """What the model reads of its tools, before all else."""
    return tuple(f"{tool.name} {tool.description} {msgspec.json.encode(tool.parameters).decode()}" for tool in tools)


def _top_logprobs(chat: ChatBody) -> int | None:
    if chat.top_logprobs and not chat.logprobs:
        raise BadRequest("when using `top_logprobs`, `logprobs` must be set to true.", param="top_logprobs")
    check_logprobs(chat.top_logprobs or 0, "top_logprobs")
    return chat.top_logprobs or 0 if chat.logprobs else None


def _tool_choice(chat: ChatBody, tools: tuple[Tool, ...]) -> ToolChoice:
    given = chat.tool_choice
    if chat.tools == []:
        raise BadRequest(
            "`tools` must not be an empty array. Either provide at least one tool or omit the field entirely.",
            param="tools",
        )
    if given is None:
        given = "auto" if tools else "none"
    return tool_choice(
        given.function.name if isinstance(given, NamedChoice) else "", given, tools, chat.parallel_tool_calls
    )


def tool_choice(name: str, kind: Any, tools: tuple[Tool, ...], parallel: bool | None) -> ToolChoice:
    """A choice of tools, `name` of a certain one, else by its `kind`.

    Raises:
        BadRequest: there is no such kind, or no such tool.
    """
    is_parallel = parallel is not False
    if kind == "none":
        return ToolChoice()
    if not tools:
        raise BadRequest("When using `tool_choice`, `tools` must be set.", param="tool_choice")
    if name:
        if all(tool.name != name for tool in tools):
            raise BadRequest(
                "The tool specified in `tool_choice` does not match any of the specified `tools`", param="tool_choice"
            )
        return ToolChoice("named", name, is_parallel)
    if kind == "auto":
        return ToolChoice("auto", "", is_parallel)
    if kind == "required":
        return ToolChoice("required", "", is_parallel)
    raise BadRequest(
        f'Invalid value for `tool_choice`: {kind!r:.80}! Only named tools, "none", "auto" or "required" are supported.',
        param="tool_choice",
    )
