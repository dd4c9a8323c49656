"""POST /v1/responses: what a request means. Nothing is stored here: what needs a store is the control plane's."""

from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from msgspec import Struct

from engine_agent.engines.sim.api.chat_requests import tool_choice, tool_texts
from engine_agent.engines.sim.api.fields import ANY_OBJECT, stop_texts
from engine_agent.engines.sim.planning.generation_request import GenerationRequest, OutputForm, Prompt, Stops, Tool
from engine_agent.protocol.request_bodies import (
    BadRequest,
    ContentPart,
    MinP,
    Penalty,
    Repetition,
    Salt,
    Seed,
    Temperature,
    TopK,
    TopP,
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
    """`text.format`."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: Any = None
    strict: bool | None = None


class TextField(Struct):
    """`text`."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningField(Struct):
    """`reasoning`."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None


Included = Literal[
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
]


class ResponsesBody(Struct, kw_only=True):
    """The body of a request. Sampling parameters are checked and have no effect."""

    model: str
    input: str | list[InputItem]
    instructions: str | None = None
    stream: bool | None = None
    max_output_tokens: int | None = None
    tools: list[dict[str, Any]] = []
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextField | None = None
    include: list[Included] | None = None
    top_logprobs: int | None = None
    metadata: dict[str, str] | None = None
    reasoning: ReasoningField | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Repetition | None = None
    logit_bias: dict[str, float] | None = None
    cache_salt: Salt | None = None
    truncation: Literal["auto", "disabled"] | None = None
    user: str | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] = "auto"
    store: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    prompt: Any = None
    priority: Seed | None = None
    seed: Seed | None = None
    ignore_eos: bool | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None


@dataclass(frozen=True)
class ResponsesRequest:
    """A request, and of its body what the answer repeats."""

    generation: GenerationRequest
    repeated: dict[str, Any]


_decoder = msgspec.json.Decoder(ResponsesBody, strict=False)


def parse_responses(body: bytes) -> ResponsesRequest:
    """What a request for a response asks for.

    Raises:
        BadRequest: not JSON, or a field is missing, wrong, or needs a store of responses.
    """
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
