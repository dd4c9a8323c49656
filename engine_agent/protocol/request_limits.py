"""How much work one request may ask of a cell, as a setting of its deployment. The routing table carries it, ingresses
send what differs from the defaults with each request, and the cell proxy checks. Pure.

Each limit bounds something that an engine does for a request before or between its steps, on the one thread that also
answers its health checks: 10,000 answers to one prompt kept vLLM's for 35 s.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Final

from msgspec import Meta, Struct, ValidationError, convert, structs


class RequestLimits(Struct, frozen=True):
    """The most of each in one request; `LIMIT_ROWS` says what counts and why the defaults are these."""

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
        "OpenAI takes `n` up to 128; each sequence has a place in the engine's scheduler",
    ),
    LimitRow(
        "inputs",
        "`input` of embeddings, pooling and classification; `documents` and the other lists of rerank and score; "
        "`messages`; items of `input` of responses",
        "OpenAI takes 2,048 inputs; an engine reads all of them before its next step",
    ),
    LimitRow(
        "stops",
        "`stop`, `stop_sequences`",
        "OpenAI and vLLM take 4, vLLM more by `VLLM_MAX_STOP_STRINGS`; each is searched for after every token",
    ),
    LimitRow("tools", "`tools`", "OpenAI takes 128"),
    LimitRow("tools_bytes", "`tools`, as JSON", "a required tool call compiles one grammar of all tools"),
    LimitRow(
        "schema_bytes",
        "`response_format`, `structured_outputs`, `text`, `output_format`, `output_config`, each of `tools`, as JSON",
        "the engine compiles each into a grammar; OpenAI takes schemas of 120,000 characters at most",
    ),
    LimitRow(
        "schema_depth",
        "objects and lists within each other in the same; 1,000 with its references followed",
        "OpenAI takes 10 levels of a schema, which are some 25 of JSON",
    ),
    LimitRow(
        "schema_counts",
        "`minLength`, `maxItems` and their like in the same, and `{m,n}` of patterns, multiplied where they nest",
        "engines expand counts: a `minLength` of 100,000,000 kept vLLM for 78 s and then ended it",
    ),
    LimitRow(
        "top_logprobs",
        "`top_logprobs`, `prompt_logprobs`, and `logprobs` of completions",
        "OpenAI and vLLM take 20; each token carries as many",
    ),
    LimitRow(
        "token_rules",
        "`logit_bias`, `allowed_token_ids`, `stop_token_ids`, `bad_words`",
        "each is applied to every step of the request",
    ),
)
DEFAULT_LIMITS: Final = RequestLimits()


def limits_text(limits: RequestLimits) -> str:
    """What differs from the defaults, as a header carries it: `sequences=256;stops=8`. Empty: nothing does."""
    named = structs.asdict(limits)
    return ";".join(f"{name}={value}" for name, value in named.items() if value != getattr(DEFAULT_LIMITS, name))


@lru_cache(maxsize=256)
def limits_from_text(text: str) -> RequestLimits:
    """What `limits_text` wrote.

    Raises:
        ValueError: it is something else.
    """
    if not text:
        return DEFAULT_LIMITS
    stated: Mapping[str, str] = dict(part.split("=", 1) for part in text.split(";"))
    if unknown := stated.keys() - set(RequestLimits.__struct_fields__):
        raise ValueError(f"there is no limit {min(unknown)!r}")
    try:
        return convert(stated, RequestLimits, strict=False)
    except ValidationError as error:
        raise ValueError(str(error)) from None
