"""What cannot continue at another cell, with the reasons: one table. Pure. A request that its own members exclude is
known from the start: its cell is not asked for marks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from msgspec import DecodeError, Struct
from msgspec.json import Decoder

MOST_DEATHS: Final = 3
"""Cells that one stream may lose before it ends: its own request could be what ends them."""
MOST_MOVES: Final = 16
"""How often one stream may leave cells that drain or stall."""
STALLED_AFTER_S: Final = 15.0
"""Silence within a stream after which it continues elsewhere. An engine that reads other long prompts is silent for
seconds."""
CONTINUES_WITHIN_S: Final = 30.0
"""How long a stream waits for a cell that continues it."""
AGAIN_AFTER_S: Final = 0.1
"""Between two attempts to continue a stream for which no cell is free."""
AVOIDED_FOR_S: Final = 10.0
"""How long a stream does not return to a cell that it left. By then health checks have found a dead one."""
MOST_BODY_BYTES: Final = 1024 * 1024
"""Of a request that is kept until its answer ends, some 250,000 tokens of text."""
MOST_KEPT_BYTES: Final = 256 * 1024 * 1024
"""Of all requests that a relay keeps. Further ones are sent and forgotten."""


class _Asked(Struct):
    """The members of a request that decide. All others are skipped unread."""

    n: Any = None
    best_of: Any = None
    use_beam_search: Any = None
    echo: Any = None
    prompt_logprobs: Any = None
    prompt_embeds: Any = None
    prompt: Any = None
    include: Any = None


_decoder = Decoder(_Asked)


@dataclass(frozen=True, slots=True)
class Limit:
    """A row of the table. `code` counts streams that it applied to. `applies` is None for limits that follow from the
    course of a stream, or from the path that it took, and not from its request."""

    code: str
    what: str
    why: str
    applies: Callable[[_Asked], bool] | None = None


def _several(asked: _Asked) -> bool:
    prompts = asked.prompt
    return any(isinstance(number, int) and number > 1 for number in (asked.n, asked.best_of)) or (
        isinstance(prompts, list) and len(prompts) > 1 and not all(isinstance(one, int) for one in prompts)
    )


def _logprobs_of_response(asked: _Asked) -> bool:
    return isinstance(asked.include, list) and "message.output_text.logprobs" in asked.include


LIMITS: Final = (
    Limit(
        "several_answers",
        "`n` or `best_of` above 1, several prompts",
        "the events of all answers are mixed, and marks do not name the answer",
        _several,
    ),
    Limit(
        "beam_search",
        "`use_beam_search`",
        "the engine emits nothing until all beams have ended",
        lambda asked: bool(asked.use_beam_search),
    ),
    Limit(
        "prompt_logprobs",
        "`prompt_logprobs`, `echo`",
        "the prompt would be computed and sent again",
        lambda asked: bool(asked.echo) or asked.prompt_logprobs is not None,
    ),
    Limit(
        "prompt_embeddings",
        "`prompt_embeds`",
        "the prompt has no ids that tokens could be appended to",
        lambda asked: asked.prompt_embeds is not None,
    ),
    Limit(
        "logprobs_of_response",
        "`include: message.output_text.logprobs` of Responses",
        "the last events repeat those of all tokens, and the next engine knows only those of new tokens",
        _logprobs_of_response,
    ),
    Limit(
        "no_marks",
        "engines without replay; vLLM's own executor with several workers; `seed` where an engine cannot repeat its "
        "numbers",
        "only vLLM and sim begin with tokens that they did not compute, and vLLM knows which numbers a seed gives",
    ),
    Limit("not_streaming", "answers that are not streamed", "nothing reached the client, so the request is repeated"),
    Limit("kept_bytes", "bodies or events above 1 MiB, some 40,000 tokens", "memory of the relay is bounded"),
    Limit("attempts", "a stream that lost over 3 cells, or left over 16", "its own request may be what ends them"),
    Limit("no_cell", "no cell within 30 s whose version answers alike", "another version would give another answer"),
    Limit("engine_refused", "status 409 of the next engine", "its prompt has other ids: another template or date"),
    Limit("diverged", "a repeat with other events or tokens", "the client would get a mixture of two answers"),
    Limit(
        "no_relay",
        "deployments without `continuation`, and requests while no relay runs",
        "HAProxy cannot write into an answer that has begun. It closes the connection when the cell's proxy or host "
        "fails, so there is no failure event; an engine that fails alone still has one, from its proxy",
    ),
    Limit(
        "relay_died",
        "the relay, HAProxy or the host of the ingress fails",
        "the connection of the client ends there. Clients send the request to another ingress",
    ),
)
"""Streams with any of these end as without continuation."""


def limit_of(body: bytes) -> str:
    """The code of the first limit that applies to a request from its start, empty if it can continue."""
    if len(body) > MOST_BODY_BYTES:
        return "kept_bytes"
    try:
        asked = _decoder.decode(body)
    except (DecodeError, RecursionError):
        return "kept_bytes"  # the cell refuses it
    return next((limit.code for limit in LIMITS if limit.applies is not None and limit.applies(asked)), "")
