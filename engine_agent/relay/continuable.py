"""What cannot continue at another cell, with the reasons: one table. Pure. A request is checked when its stream breaks,
not before."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

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


@dataclass(frozen=True, slots=True)
class Limit:
    """A row of the table. `code` counts streams that ended for it; `applies` is None for limits that follow from the
    course of a stream and not from its request."""

    code: str
    what: str
    why: str
    applies: Callable[[Mapping[str, Any]], bool] | None = None


def _several(request: Mapping[str, Any]) -> bool:
    return any(isinstance(request.get(name), int) and request[name] > 1 for name in ("n", "best_of")) or (
        isinstance(request.get("prompt"), list)
        and len(request["prompt"]) > 1
        and not all(isinstance(one, int) for one in request["prompt"])
    )


def _logprobs_of_response(request: Mapping[str, Any]) -> bool:
    include = request.get("include")
    return isinstance(include, list) and "message.output_text.logprobs" in include


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
        lambda request: bool(request.get("use_beam_search")),
    ),
    Limit(
        "prompt_logprobs",
        "`prompt_logprobs`, `echo`",
        "the prompt would be computed and sent again",
        lambda request: bool(request.get("echo")) or request.get("prompt_logprobs") is not None,
    ),
    Limit(
        "prompt_embeddings",
        "`prompt_embeds`",
        "the prompt has no ids that tokens could be appended to",
        lambda request: request.get("prompt_embeds") is not None,
    ),
    Limit(
        "logprobs_of_response",
        "`include: message.output_text.logprobs` of Responses",
        "the last events repeat those of all tokens, and the next engine knows only those of new tokens",
        _logprobs_of_response,
    ),
    Limit(
        "no_marks",
        "engines without replay; `seed` where an engine cannot repeat its numbers",
        "only vLLM and sim begin with tokens that they did not compute, and vLLM knows which numbers a seed gives",
    ),
    Limit("not_streaming", "answers that are not streamed", "nothing reached the client, so the request is repeated"),
    Limit("kept_bytes", "bodies or events above 1 MiB, some 40,000 tokens", "memory of the relay is bounded"),
    Limit("attempts", "a stream that lost over 3 cells, or left over 16", "its own request may be what ends them"),
    Limit("no_cell", "no cell of the same version within 30 s", "another version would give another answer"),
    Limit("engine_refused", "status 409 of the next engine", "its prompt has other ids: another template or date"),
    Limit("diverged", "a repeat with other events or tokens", "the client would get a mixture of two answers"),
)
"""Streams with any of these end as without continuation."""


def why_not(request: Mapping[str, Any]) -> str:
    """The code of the first limit that applies to a request, empty if it can continue."""
    return next((limit.code for limit in LIMITS if limit.applies is not None and limit.applies(request)), "")
