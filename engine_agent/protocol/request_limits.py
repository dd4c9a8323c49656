"""How much work one request may cause in a cell, as a setting of its deployment. The routing table carries it,
ingresses add differences from the defaults to each request, and the cell proxy checks the limits. Pure.

Each limit bounds work that an engine does for a request before or between its steps, on the thread that also answers
its health checks: 10,000 answers to one prompt blocked vLLM's thread for 35 s.

Small schemas and patterns can make large grammars: counts of repetitions, references that lead back to themselves
without reading anything, and long chains of references. Engines expand or follow them without a limit, so this module
also measures them."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, Final

from msgspec import Meta, Struct, ValidationError, convert, structs


class RequestLimits(Struct, frozen=True):
    """Maximums for one request; `LIMIT_ROWS` says what counts and why the defaults are these."""

    sequences: Annotated[int, Meta(ge=1, le=1024)] = 128
    inputs: Annotated[int, Meta(ge=1, le=16_384)] = 2048
    stops: Annotated[int, Meta(ge=1, le=256)] = 4
    tools: Annotated[int, Meta(ge=1, le=1024)] = 128
    tools_bytes: Annotated[int, Meta(ge=1024, le=4_194_304)] = 524_288
    schema_bytes: Annotated[int, Meta(ge=1024, le=1_048_576)] = 65_536
    schema_depth: Annotated[int, Meta(ge=4, le=64)] = 32
    schema_counts: Annotated[int, Meta(ge=1, le=10_000_000)] = 100_000
    top_logprobs: Annotated[int, Meta(ge=0, le=1000)] = 20
    token_rules: Annotated[int, Meta(ge=1, le=16_384)] = 1024


@dataclass(frozen=True, slots=True)
class LimitRow:
    """One limit for docs/api-applications.md."""

    name: str
    counts: str
    why: str


LIMIT_ROWS: Final = (
    LimitRow(
        "sequences",
        "`n` or `best_of`, times the prompts in `prompt`",
        "OpenAI allows `n` up to 128; each sequence takes a place in the engine's scheduler",
    ),
    LimitRow(
        "inputs",
        "`input` of embeddings, pooling and classification; `documents` and the other lists of rerank and score; "
        "`messages`; items of `input` of responses",
        "OpenAI allows 2,048 inputs; an engine reads all of them before its next step",
    ),
    LimitRow(
        "stops",
        "`stop`, `stop_sequences`",
        "OpenAI and vLLM allow 4, vLLM more with `VLLM_MAX_STOP_STRINGS`; each is searched for after every token",
    ),
    LimitRow("tools", "`tools`", "OpenAI allows 128"),
    LimitRow("tools_bytes", "`tools`, as JSON", "a required tool call compiles one grammar of all tools"),
    LimitRow(
        "schema_bytes",
        "`response_format`, `structured_outputs`, `text`, `output_format`, `output_config`, each of `tools`, as JSON",
        "the engine compiles each into a grammar; OpenAI allows schemas of at most 120,000 characters",
    ),
    LimitRow(
        "schema_depth",
        "levels of objects and lists in the same; 1,000 with references followed",
        "OpenAI allows 10 levels of a schema, about 25 of JSON",
    ),
    LimitRow(
        "schema_counts",
        "`minLength`, `maxItems` and similar in the same, and `{m,n}` of patterns, multiplied if nested",
        "engines expand counts: a `minLength` of 100,000,000 blocked vLLM for 78 s and then stopped it",
    ),
    LimitRow(
        "top_logprobs",
        "`top_logprobs`, `prompt_logprobs`, and `logprobs` of completions",
        "OpenAI and vLLM allow 20; each token carries as many",
    ),
    LimitRow(
        "token_rules",
        "`logit_bias`, `allowed_token_ids`, `stop_token_ids`, `bad_words`",
        "each is applied to every step of the request",
    ),
)
DEFAULT_LIMITS: Final = RequestLimits()


def limits_text(limits: RequestLimits) -> str:
    """The differences from the defaults, as a header carries them: `sequences=256;stops=8`. Empty if there are none."""
    named = structs.asdict(limits)
    return ";".join(f"{name}={value}" for name, value in named.items() if value != getattr(DEFAULT_LIMITS, name))


@lru_cache(maxsize=256)
def limits_from_text(text: str) -> RequestLimits:
    """Parses the output of `limits_text`. Raises ValueError if it is something else."""
    if not text:
        return DEFAULT_LIMITS
    stated: Mapping[str, str] = dict(part.split("=", 1) for part in text.split(";"))
    if unknown := stated.keys() - set(RequestLimits.__struct_fields__):
        raise ValueError(f"there is no limit {min(unknown)!r}")
    try:
        return convert(stated, RequestLimits, strict=False)
    except ValidationError as error:
        raise ValueError(str(error)) from None


_COUNTS = tuple(f"{end}{what}" for end in ("min", "max") for what in ("Length", "Items", "Properties", "Contains"))
_PATTERNS = ("pattern", "regex", "grammar")
_CHOICES = ("anyOf", "oneOf", "allOf")
_TOKEN = re.compile(r"\\.|\{(\d*)(?:,(\d*))?\}|.", re.DOTALL)
"""Character classes are read like the rest: a bracket in a text of a grammar must hide nothing."""
_MOST_DIGITS = 12
"""A count with more digits is over every limit."""


def greatest_count(value: Any) -> int:
    """The greatest number of repetitions in a value with schemas and patterns."""
    greatest = 0
    for part in schema_objects(value):
        for name in _COUNTS:
            count = part.get(name)
            if isinstance(count, int | float) and not isinstance(count, bool):
                greatest = max(greatest, int(count))
        for name in _PATTERNS:
            if isinstance(part.get(name), str):
                greatest = max(greatest, repetitions(part[name]))
        if isinstance(patterns := part.get("patternProperties"), dict):
            greatest = max(greatest, *map(repetitions, patterns), 0)
    return greatest


def repetitions(pattern: str) -> int:
    """How often a regular expression, or the text of a grammar, repeats its most repeated part. Counts of nested groups
    multiply."""
    groups, here, last, greatest = list[int](), 1, 1, 0
    for token in _TOKEN.finditer(pattern):
        match token[0]:
            case "(":
                groups.append(here)
                here = last = 1
            case ")":
                last = here
                here = max(groups.pop(), last) if groups else here
            case "*" | "+" | "?":
                pass
            case text if text.startswith("{") and len(text) > 1:
                last *= max(1, *map(_count, token.groups()))
                here = max(here, last)
                greatest = max(greatest, last)
            case _:
                last = 1
    return greatest


def _count(digits: str | None) -> int:
    digits = digits or "0"
    return int(digits) if len(digits) <= _MOST_DIGITS else 10**_MOST_DIGITS


def has_endless_reference(root: Any) -> bool:
    """Whether a reference of this schema leads back to itself only through references and choices."""
    done: set[int] = set()
    for part in schema_objects(root):
        path, ahead = list[int](), [(part, False)]
        while ahead:
            node, is_left = ahead.pop()
            if is_left:
                done.add(path.pop())
            elif id(node) in path:
                return True
            elif id(node) not in done:
                path.append(id(node))
                ahead.append((node, True))
                ahead += ((each, False) for each in _led_to(root, node))
    return False


def levels_with_references(root: Any) -> int:
    """An upper bound for the levels of a schema with its references followed once. Compilers descend recursively on a
    limited stack."""
    order = [root]
    for part in order:
        inner = part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
        order += (each for each in inner if isinstance(each, dict | list))
    levels: dict[int, int] = {}
    for part in reversed(order):
        inner = part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
        levels[id(part)] = 1 + max((levels[id(each)] for each in inner if isinstance(each, dict | list)), default=0)
    names = {part["$ref"] for part in order if isinstance(part, dict) and isinstance(part.get("$ref"), str)}
    if any(name != "#" and not name.startswith("#/") for name in names):
        return len(order)  # names of `$id` and `$anchor` are not resolved here
    return levels[id(root)] + sum(levels.get(id(_resolved(root, name)), 0) for name in names)


def _led_to(root: Any, node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    found = [_resolved(root, node["$ref"])] if isinstance(node.get("$ref"), str) else []
    for name in _CHOICES:
        found += node[name] if isinstance(node.get(name), list) else []
    return (each for each in found if isinstance(each, dict))


def _resolved(root: Any, reference: str) -> Any:
    place, found = reference.removeprefix("#"), root
    if place == reference:
        return None
    for part in place.split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list):
            found = dict(enumerate(found)).get(int(name)) if re.fullmatch("[0-9]{1,9}", name) else None
        else:
            found = found.get(name) if isinstance(found, dict) else None
    return found


def schema_objects(value: Any) -> Iterator[dict[str, Any]]:
    """Yields every object inside a JSON value, including the value, level by level."""
    layer = [value]
    while layer := [part for part in layer if isinstance(part, dict | list)]:
        yield from (part for part in layer if isinstance(part, dict))
        layer = [inner for part in layer for inner in (part.values() if isinstance(part, dict) else part)]
