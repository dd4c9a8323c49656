"""What a cell proxy and its engine say to each other about the tokens of one request. Names and forms only; see
docs/design/applications.md#token-counts."""

from typing import Final

import msgspec

EXCHANGE_HEADER: Final = b"x-switchyard-exchange"
"""On a request to the engine: the name under which it notes what it computes for it."""
CACHE_SCOPE_HEADER: Final = b"x-switchyard-cache-scope"
"""On a request to the engine, from the ingress: whose prompts in the cache it may find, and be found by."""
PROMPT_TOKENS_HEADER: Final = b"x-switchyard-prompt-tokens"
"""On an answer: how many tokens its prompts have, known before the first of them is sent."""
USAGE_PATH: Final = "/switchyard/usage"
"""`?exchange=NAME`: `ExchangeUsage`, once the answer to that request is over."""
READ_PATH: Final = "/switchyard/read"
"""`?exchange=NAME`: 200 once its prompts are read, 202 if they are not within `READ_LIMIT_S`."""
READ_LIMIT_S: Final = 2.0
"""How long a question waits; an exchange that is not known by then is none."""
COUNTED_APART_PATH: Final = "/switchyard/counted-apart"
"""`CountedApart`, since the engine started."""
END_LIMIT_S: Final = 5.0
"""How long an answer may take to notice that its connection was cut; then what it runs is stopped."""


class ExchangeUsage(msgspec.Struct, frozen=True):
    """Tokens of one request. `cached_tokens` are part of `prompt_tokens`; a prompt that was not read yet is none."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


class CountedApart(msgspec.Struct, frozen=True):
    """What is in the engine's counters and in nobody's usage: prompts that were read again for each of `n` answers, and
    tokens that were generated behind the end of an answer."""

    prompt_tokens: int
    completion_tokens: int
