"""POST /v1/chat/completions: what a request means."""

from typing import Any

import msgspec

from engine_agent.engines.sim.api.fields import form_of, stops_of, transfer_of
from engine_agent.engines.sim.planning.generation_request import GenerationRequest, Prompt, Tool, ToolChoice
from engine_agent.engines.sim.planning.handover import is_handed_over, source_of
from engine_agent.protocol.request_bodies import BadRequest, ChatBody, NamedChoice, ToolField, check_chat, read_body

TOOL_ROLES = frozenset({"tool", "function"})
"""Whose messages are results of calls."""


_decoder = msgspec.json.Decoder(ChatBody, strict=False)


def parse_chat(body: bytes) -> GenerationRequest:
    """What a chat request asks for.

    Raises:
        BadRequest: not JSON, or a member is missing or wrong.
    """
    chat = read_body(_decoder, body)
    check_chat(chat)
    transfer = transfer_of(chat.kv_transfer_params)
    limit_param = "max_tokens" if chat.max_completion_tokens is None else "max_completion_tokens"
    limit = chat.max_tokens if chat.max_completion_tokens is None else chat.max_completion_tokens
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
        top_logprobs=chat.top_logprobs or 0 if chat.logprobs else None,
        is_handed_over=is_handed_over(transfer),
        source=source_of(transfer),
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
