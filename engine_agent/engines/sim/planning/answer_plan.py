"""Plans answers token by token before they are computed: their text, where they stop, and why."""

import random
import re
from bisect import bisect_left
from dataclasses import dataclass, field, replace
from itertools import accumulate

from engine_agent.engines.sim.planning.constrained import UnsupportedSchema, matching_text, write_document
from engine_agent.engines.sim.planning.generation_request import (
    GenerationRequest,
    OutputForm,
    Prompt,
    Stops,
    Tool,
    ToolChoice,
)
from engine_agent.engines.sim.planning.vocabulary import answer_words, split_words, token_id, wrong_words
from engine_agent.protocol.api_surface import CONTEXT_LENGTH_EXCEEDED
from engine_agent.protocol.request_bodies import BadRequest

_CHOICE_STRIDE = 1_000_003
"""Between the seeds of two answers to one prompt; clients count seeds by ones."""
_MOST_TOKENS = 262_144
"""Of all answers to one request, if the client sets their length. All are planned before the first is computed: 0.6 s
for so many."""
_PIECE_LETTERS = 6
"""A token of a JSON document has at most so many letters, plus the blanks before them."""


@dataclass(frozen=True, slots=True)
class Token:
    """One token of an answer: its text, and `delta`, the part that the client receives, which is shorter where a stop
    text is removed. It belongs to the text, or to the call with the number `call`; the first token of a call is its
    name."""

    text: str
    delta: str
    call: int | None = None


@dataclass(frozen=True)
class Answer:
    """One answer. `finish_reason` is OpenAI's, `stop_reason` the text or id that ended it; `calls` are the names of the
    functions that it calls."""

    tokens: tuple[Token, ...]
    finish_reason: str
    stop_reason: str | int | None = None
    calls: tuple[str, ...] = ()
    _texts: dict[int | None, str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        texts: dict[int | None, list[str]] = {}
        for token in self.tokens:
            texts.setdefault(token.call, []).append(token.delta)
        object.__setattr__(self, "_texts", {call: "".join(deltas) for call, deltas in texts.items()})

    @property
    def text(self) -> str:
        return self._texts.get(None, "")

    @property
    def called(self) -> tuple[tuple[str, str], ...]:
        return tuple((name, self._texts[call]) for call, name in enumerate(self.calls) if call in self._texts)


def plan_answers(request: GenerationRequest, seed: int, max_model_len: int, wrong: bool) -> tuple[Answer, ...]:
    """Returns all answers to a request: those to its first prompt, then those to the next. `seed` is the version's;
    `wrong`: as from damaged weights. Raises BadRequest if a prompt, or prompt and output limit, exceed `max_model_len`,
    or the output form cannot be met."""
    demanded = max(request.min_tokens, request.output_limit or 0 if request.exact_length else 0)
    if demanded * len(request.prompts) * request.choices > _MOST_TOKENS:
        raise BadRequest(f"sim answers a request with at most {_MOST_TOKENS} tokens of demanded length", param="n")
    return tuple(
        plan_answer(request, prompt, seed + request.seed + _CHOICE_STRIDE * choice, max_model_len, wrong)
        for prompt in request.prompts
        for choice in range(request.choices)
    )


def plan_answer(request: GenerationRequest, prompt: Prompt, seed: int, max_model_len: int, wrong: bool) -> Answer:
    """Returns one answer to one prompt. Raises BadRequest (see `plan_answers`)."""
    room = _output_room(request, prompt, max_model_len)
    limit = request.output_limit or room
    called = called_tools(request.tools, request.tool_choice, prompt)
    source = _source(f"{seed}\0{wrong}\0{prompt.answered}") if called or request.form is not None else _UNSEEDED
    if called:
        calls = [plan_call(tool, source) for tool in called]
        tokens = [token for index, call in enumerate(calls) for token in _call_tokens(index, call.name, call.arguments)]
        # OpenAI and vLLM: a call that the client requested by name ends like a text.
        reason = "stop" if request.tool_choice.kind == "named" else "tool_calls"
        whole = Answer(tuple(tokens), reason, calls=tuple(call.name for call in calls))
        return _cut(whole, limit)
    if request.form is not None:
        texts = tuple(_pieces(_formed_text(request.form, source))) or ("",)
    else:
        texts = _words(request, prompt, seed, limit, wrong)
    whole = Answer(tuple(Token(text, text) for text in texts), "length" if request.exact_length else "stop")
    return _cut(_stopped(whole, request.stops, request.min_tokens), limit)


_UNSEEDED = random.Random()
"""For answers without drawn parts: a seed would take longer than the rest of a short answer."""


def _source(seed: str) -> random.Random:
    return random.Random(seed.encode())


def _output_room(request: GenerationRequest, prompt: Prompt, max_model_len: int) -> int:
    limit = request.output_limit or 1
    if limit > max_model_len:
        message = f"{request.limit_param}={limit} cannot be greater than max_model_len={max_model_len}."
        raise BadRequest(message, param=request.limit_param)
    room = max_model_len - prompt.tokens
    if room < limit:
        raise BadRequest(
            f"This model's maximum context length is {max_model_len} tokens. However, you requested "
            f"{limit} output tokens and your prompt contains {prompt.tokens} tokens.",
            param="prompt",
            code=CONTEXT_LENGTH_EXCEEDED,
        )
    return room


def _words(request: GenerationRequest, prompt: Prompt, seed: int, limit: int, wrong: bool) -> tuple[str, ...]:
    at_most = max(limit + 1, request.min_tokens)
    words = answer_words(prompt.answered, seed, limit if request.exact_length else None, at_most)
    if len(words) < request.min_tokens:
        words = answer_words(prompt.answered, seed, min(limit, request.min_tokens))
    words = words[: limit + 1]
    words = wrong_words(words) if wrong else words
    return (words[0], *(f" {word}" for word in words[1:]))


def _formed_text(form: OutputForm, source: random.Random) -> str:
    if form.kind == "choice":
        return str(source.choice(form.rule))
    try:
        if form.kind == "regex":
            return matching_text(form.rule, source)
        return write_document(form.rule, source).decode()
    except UnsupportedSchema as error:
        raise BadRequest(f"{form.param}: {error}", param=form.param) from error


def _call_tokens(index: int, name: str, arguments: str) -> list[Token]:
    return [Token(name, "", index), *(Token(piece, piece, index) for piece in _pieces(arguments))]


def _pieces(document: str) -> list[str]:
    words, blanks = split_words(document)
    pieces = []
    for word in words:
        ends = len(word) - len(word.lstrip()) + _PIECE_LETTERS
        pieces += [word[:ends], *(word[at : at + _PIECE_LETTERS] for at in range(ends, len(word), _PIECE_LETTERS))]
    return [*pieces, blanks] if blanks else pieces


def _cut(answer: Answer, limit: int) -> Answer:
    if len(answer.tokens) <= limit:
        return answer
    return replace(answer, tokens=answer.tokens[:limit], finish_reason="length", stop_reason=None)


def _stopped(answer: Answer, stops: Stops, min_tokens: int) -> Answer:
    """Returns the answer up to its first stop after `min_tokens` tokens. The token that completes the stop is computed;
    the client receives its part before the stop."""
    by_id = len(answer.tokens)
    if stops.ids:
        ids = [token_id(token.text) for token in answer.tokens]
        by_id = next((index for index in range(min_tokens, len(ids)) if ids[index] in stops.ids), by_id)
    ends = list(accumulate(len(token.text) for token in answer.tokens))
    by_text = _first_stop_text(answer.text, ends, stops.texts, min_tokens)
    if by_text is not None and by_text[0] <= by_id:
        last, text, at = by_text
        shown = at + len(text) if stops.is_included else at
        return _shortened(answer, last, shown, ends, text)
    if by_id == len(answer.tokens):
        return answer
    shown = ends[by_id] if stops.is_included else ends[by_id] - len(answer.tokens[by_id].text)
    return _shortened(answer, by_id, shown, ends, token_id(answer.tokens[by_id].text))


def _first_stop_text(
    text: str, ends: list[int], stops: tuple[str, ...], min_tokens: int
) -> tuple[int, str, int] | None:
    """Returns the token that completes the first stop text, the stop text, and where it begins."""
    if min_tokens >= len(ends):
        return None
    ignored_letters = ends[min_tokens - 1] if min_tokens else 0
    found = []
    for order, stop in enumerate(stops):
        at = text.find(stop, max(0, ignored_letters - len(stop) + 1))
        if at >= 0:
            found.append((bisect_left(ends, at + len(stop)), order, stop, at))
    if not found:
        return None
    last, _, stop, at = min(found)
    return last, stop, at


def _shortened(answer: Answer, last: int, shown: int, ends: list[int], reason: str | int) -> Answer:
    tokens = []
    for token, end in zip(answer.tokens[: last + 1], ends, strict=False):
        hidden = max(0, end - shown)
        tokens.append(replace(token, delta=token.delta[: max(0, len(token.delta) - hidden)]))
    return replace(answer, tokens=tuple(tokens), finish_reason="stop", stop_reason=reason)


_MOST_CALLS = 4
_COMMON = frozenset(["and", "for", "from", "get", "into", "set", "that", "the", "this", "what", "with", "your"])
_PART = re.compile(r"[A-Z]?[a-z]+|[A-Z]+|\d+")


@dataclass(frozen=True)
class Call:
    """A call of a function; `arguments` is a JSON object as text."""

    name: str
    arguments: str


def called_tools(tools: tuple[Tool, ...], choice: ToolChoice, prompt: Prompt) -> tuple[Tool, ...]:
    """Returns the tools that an answer to this prompt calls: those that share words with it, most words first. Empty if
    it answers with text. An answer to a tool's result calls another tool only if it must, so that a client's loop of
    calls ends."""
    if choice.kind == "none" or not tools:
        return ()
    if choice.kind == "named":
        return tuple(tool for tool in tools if tool.name == choice.name)[:1]
    if choice.kind == "auto" and prompt.follows_tool:
        return ()
    prompt_words = _call_words(prompt.answered)
    in_common = {tool.name: len(prompt_words & _call_words(f"{tool.name} {tool.description}")) for tool in tools}
    fitting = sorted((tool for tool in tools if in_common[tool.name]), key=lambda tool: -in_common[tool.name])
    if choice.kind == "required":
        fitting = fitting or list(tools[:1])
    return tuple(fitting[: _MOST_CALLS if choice.parallel else 1])


def _call_words(text: str) -> frozenset[str]:
    return frozenset(word.lower() for word in _PART.findall(text) if len(word) > 2) - _COMMON


def plan_call(tool: Tool, source: random.Random) -> Call:
    """Returns a call of `tool` whose arguments satisfy its schema. Raises BadRequest if the simulator cannot write such
    arguments; it names the tool."""
    schema = {"type": "object"} if tool.parameters is None else tool.parameters
    try:
        arguments = write_document(schema, source)
    except UnsupportedSchema as error:
        raise BadRequest(f"the parameters of the tool `{tool.name}`: {error}", param="tools") from error
    if not arguments.startswith(b"{"):
        raise BadRequest(f"the parameters of the tool `{tool.name}` are not an object", param="tools")
    return Call(tool.name, arguments.decode())
