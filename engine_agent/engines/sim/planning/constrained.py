"""Texts that satisfy a JSON schema or match a regular expression: structured output and arguments of tool calls.
llguidance, one of the libraries by which vLLM constrains its output, returns the tokens that may come next. One of them
is drawn. Schemas that llguidance does not support are rejected with its reason. The limits below bound the work for a
hostile schema."""

import math
import random
import re
from decimal import Decimal
from functools import cache
from typing import TYPE_CHECKING, Any

import msgspec

from engine_agent.engines.sim.planning.vocabulary import LEXICON
from engine_agent.protocol.request_limits import repetitions, schema_objects

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_MAX_OBJECTS = 400
"""At about 1,500 nested schemas or chained `$ref`, llguidance 1.9.1 overflows a stack of 8 MiB and the process dies."""
_MAX_BYTES = 16_384
_MAX_PATTERN_LETTERS = 1000
_MAX_PATTERN_WORK = 50_000
"""Length of a pattern times its repetitions. llguidance expands text that has no alternative without a limit."""
_MAX_MIN_LENGTH = 1000
_MAX_MULTIPLES = 20_000
"""Product of the remainders of every `multipleOf`: llguidance builds a state for each."""
_MAX_STEPS = 2000
_USUAL_BYTES = 300
"""Longer documents get only their required parts."""
_USUAL_WORDS = 3
_FEW_WORDS = 20
"""With so few allowed words, the text is one of a list, such as the name of a property."""

_WORDS = [word.encode() for word in LEXICON if len(word) > 1]
_TOKENS = [*(bytes((byte,)) for byte in range(256)), *_WORDS, *(b" " + word for word in _WORDS), b"<end>"]
_FIRST_WORD, _FIRST_SPACED_WORD, _END = 256, 256 + len(_WORDS), len(_TOKENS) - 1
_QUOTE, _NEWLINE = ord('"'), ord("\n")
_CLOSING: tuple[int, ...] = (_END, *b":}],")
_LITERAL = re.compile(r"[^\\^$.|?*+(){}\[\]]++")
_DOT = "\ue000"
"""Stands for an escaped dot, as in `example\\.com`, while the literals of a pattern are found."""
_SEPARATORS = b" @.:/=-_,"
_OPENING = b'"n0tf-123456789[{'
"""First bytes of values; a document that is long enough prefers the first ones."""


class UnsupportedSchema(ValueError):
    """The schema or expression is wrong, unsatisfiable, too large or not supported; the text says why."""


def write_document(schema: Any, source: random.Random) -> bytes:
    """Returns a JSON document that satisfies `schema`. Raises UnsupportedSchema (see there)."""
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    if not isinstance(schema, dict):
        raise UnsupportedSchema("a JSON schema is an object")
    _check_size(schema)
    try:
        matcher = _matcher(_closed(schema))
    except UnsupportedSchema:
        matcher = _matcher(schema)
    return _drawn(matcher, _Document(source, _literals(schema)))


def matching_text(pattern: str, source: random.Random) -> str:
    """Returns a text that matches `pattern` as a whole. Raises UnsupportedSchema (see there)."""
    document = write_document({"type": "string", "pattern": f"^(?:{pattern})$"}, source)
    return msgspec.json.decode(document, type=str)


def _check_size(schema: dict[str, Any]) -> None:
    parts = list(schema_objects(schema))
    if len(parts) > _MAX_OBJECTS or len(msgspec.json.encode(schema)) > _MAX_BYTES:
        raise UnsupportedSchema(f"sim accepts schemas of at most {_MAX_OBJECTS} objects and {_MAX_BYTES} bytes")
    steps = set[int | float]()
    for part in parts:
        least, step, named = part.get("minLength", 0), part.get("multipleOf", 1), part.get("patternProperties")
        if isinstance(least, int | float) and least > _MAX_MIN_LENGTH:
            raise UnsupportedSchema(f"`minLength` is {least}; sim accepts at most {_MAX_MIN_LENGTH}")
        steps |= {step} if type(step) in {int, float} else set()
        for pattern in (part.get("pattern"), *(named if isinstance(named, dict) else ())):
            if isinstance(pattern, str) and (
                len(pattern) > _MAX_PATTERN_LETTERS or len(pattern) * repetitions(pattern) > _MAX_PATTERN_WORK
            ):
                raise UnsupportedSchema(f"the expression is too large for sim: {pattern:.60}")
    if math.prod(map(_states, steps)) > _MAX_MULTIPLES:
        raise UnsupportedSchema("`multipleOf` is too large or too fine for sim")


def _states(step: int | float) -> int:
    """Returns the number of remainders that tell multiples of `step` from other decimals."""
    given = Decimal(str(step))
    return max(1, int(abs(given) * Decimal(100) ** max(0, -int(given.as_tuple().exponent))))


def _closed(schema: Any) -> Any:
    """Returns the schema without additional properties: clients pass the arguments of a tool call to a function that
    may know no others."""
    if isinstance(schema, list):
        return list(map(_closed, schema))
    if not isinstance(schema, dict):
        return schema
    closed = {name: part if name in {"const", "enum"} else _closed(part) for name, part in schema.items()}
    return {"additionalProperties": False, **closed} if isinstance(schema.get("properties"), dict) else closed


def _literals(schema: dict[str, Any]) -> list[list[int]]:
    """Returns the texts without alternatives in the patterns of a schema, as tokens."""
    patterns = [part["pattern"] for part in schema_objects(schema) if isinstance(part.get("pattern"), str)]
    found = [text for pattern in patterns for text in _LITERAL.findall(pattern.replace(r"\.", _DOT))]
    return [list(msgspec.json.encode(text.replace(_DOT, "."))[1:-1]) for text in found]


def _drawn(matcher: "LLMatcher", document: "_Document") -> bytes:
    for _ in range(_MAX_STEPS):
        mask = matcher.compute_logit_bias()
        _check(matcher)
        allowed = [token for token, is_allowed in enumerate(mask) if is_allowed]
        tokens = document.next_tokens(mask, allowed)
        if tokens == [_END]:
            return bytes(document.written)
        for token in tokens[: matcher.try_consume_tokens(tokens)]:
            document.written += _TOKENS[token]
        if len(allowed) == 1:
            forced = matcher.compute_ff_bytes()
            matcher.consume_tokens(list(forced))
            document.written += forced
    raise UnsupportedSchema(f"sim found no document within {_MAX_STEPS} steps")


class _Document:
    """Draws the next tokens of a document from those that are allowed."""

    def __init__(self, source: random.Random, literals: list[list[int]]) -> None:
        self.written = bytearray()
        self._source = source
        self._literals = literals
        self._text_tokens = 0
        """Of the text that is being written."""

    def next_tokens(self, mask: bytes, allowed: list[int]) -> list[int]:
        """Returns one allowed token, or several of which only the first ones may be allowed."""
        # Between values any blank may come. Inside a text a line break may not.
        if mask[_NEWLINE] or mask[_END] or not self.written:
            self._text_tokens = 0
            return [self._next_value(mask, allowed)]
        self._text_tokens += 1
        return self._next_text(mask, allowed)

    def _next_value(self, mask: bytes, allowed: list[int]) -> int:
        closing = [token for token in _CLOSING if mask[token]]
        opening = [token for token in _OPENING if mask[token]]
        if len(self.written) > _USUAL_BYTES:
            return (closing or opening or allowed)[0]
        chosen = closing if closing and self._source.random() < 0.5 else opening
        return self._source.choice(chosen or closing or allowed)

    def _next_text(self, mask: bytes, allowed: list[int]) -> list[int]:
        is_long = self._text_tokens > _USUAL_WORDS or len(self.written) > _USUAL_BYTES
        if is_long and mask[_QUOTE]:
            return [_QUOTE]
        plain = [token for token in allowed if token < 128 and chr(token).isalnum()]
        if self._text_tokens > 2 * _USUAL_WORDS and self._source.random() < 0.5:
            # Words lead nowhere where, for instance, an @ must come.
            separators = [[token] for token in _SEPARATORS if mask[token]]
            others = [[token] for token in allowed if token < 128 and token not in plain]
            return self._source.choice(self._source.choice((self._literals, separators, others)) or [[allowed[0]]])
        wanted = range(_FIRST_WORD, _FIRST_SPACED_WORD) if self._text_tokens == 1 else range(_FIRST_SPACED_WORD, _END)
        words = [token for token in allowed if token in wanted]
        return [self._source.choice((words if len(words) > _FEW_WORDS else plain) or allowed)]


@cache
def _tokenizer() -> "LLTokenizer":
    from llguidance import LLTokenizer, TokenizerWrapper

    class Vocabulary:
        tokens, eos_token_id, bos_token_id, special_token_ids = _TOKENS, _END, None, [_END]

        def __call__(self, text: bytes) -> list[int]:
            return list(text)

    return LLTokenizer(TokenizerWrapper(Vocabulary()), slices=[])


def _matcher(schema: dict[str, Any]) -> "LLMatcher":
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(
        initial_lexer_fuel=200_000,
        step_lexer_fuel=20_000,
        step_max_items=5000,
        max_lexer_states=10_000,
        max_grammar_size=20_000,
        precompute_large_lexemes=False,
        verbose_errors=False,
    )
    schema = {name: value for name, value in schema.items() if name != "x-guidance"}
    try:
        # With blanks between values the only text without alternatives, which is expanded, is inside one value.
        grammar = LLMatcher.grammar_from_json_schema(
            msgspec.json.encode(schema).decode(), overrides={"whitespace_flexible": True, "coerce_one_of": True}
        )
    except ValueError as error:
        raise UnsupportedSchema(str(error)[:300]) from error
    matcher = LLMatcher(_tokenizer(), grammar, limits=limits, log_level=0)
    _check(matcher)
    return matcher


def _check(matcher: "LLMatcher") -> None:
    if matcher.is_error():
        raise UnsupportedSchema(matcher.get_error().removesuffix("\n<non-verbose/>")[:300])
