"""Which tools an answer calls, and with what. A tool is called when the prompt has a word of it."""

import random
import re
from dataclasses import dataclass

from engine_agent.engines.sim.planning.generation_request import Prompt, Tool, ToolChoice
from engine_agent.engines.sim.text.constrained import UnsupportedSchema, write_document
from engine_agent.protocol.request_bodies import BadRequest

_MOST_CALLS = 4
_COMMON = frozenset(["and", "for", "from", "get", "into", "set", "that", "the", "this", "what", "with", "your"])
_PART = re.compile(r"[A-Z]?[a-z]+|[A-Z]+|\d+")


@dataclass(frozen=True)
class Call:
    """A call of a function; `arguments` is a JSON object as text."""

    name: str
    arguments: str


def called_tools(tools: tuple[Tool, ...], choice: ToolChoice, prompt: Prompt) -> tuple[Tool, ...]:
    """The tools that an answer to this prompt calls, those with most words in common first; none: it says something.

    An answer to the result of a tool calls another only where it must, so that a client's loop of calls ends.
    """
    if choice.kind == "none" or not tools:
        return ()
    if choice.kind == "named":
        return tuple(tool for tool in tools if tool.name == choice.name)[:1]
    if choice.kind == "auto" and prompt.follows_tool:
        return ()
    asked = _words(prompt.answered)
    in_common = {tool.name: len(asked & _words(f"{tool.name} {tool.description}")) for tool in tools}
    fitting = sorted((tool for tool in tools if in_common[tool.name]), key=lambda tool: -in_common[tool.name])
    if choice.kind == "required":
        fitting = fitting or list(tools[:1])
    return tuple(fitting[: _MOST_CALLS if choice.parallel else 1])


def _words(text: str) -> frozenset[str]:
    return frozenset(word.lower() for word in _PART.findall(text) if len(word) > 2) - _COMMON


def plan_call(tool: Tool, source: random.Random) -> Call:
    """A call of `tool` whose arguments satisfy its schema.

    Raises:
        BadRequest: the simulator cannot write such arguments; it names the tool.
    """
    schema = {"type": "object"} if tool.parameters is None else tool.parameters
    try:
        arguments = write_document(schema, source)
    except UnsupportedSchema as error:
        raise BadRequest(f"the parameters of the tool `{tool.name}`: {error}", param="tools") from error
    if not arguments.startswith(b"{"):
        raise BadRequest(f"the parameters of the tool `{tool.name}` are no object", param="tools")
    return Call(tool.name, arguments.decode())
