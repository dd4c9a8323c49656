"""Asks the engine what it used for a request whose answer did not say, and what it counts apart: the proxy's side of
`engine_agent.protocol.proxy_messages`. An engine that keeps no ledger says nothing, and then nobody knows."""

import msgspec

from engine_agent.cell_proxy.http_call import call
from engine_agent.cell_proxy.upstream import EnginePool
from engine_agent.cell_proxy.usage_reader import TokenUsage
from engine_agent.protocol.proxy_messages import (
    COUNTED_APART_PATH,
    END_LIMIT_S,
    READ_LIMIT_S,
    READ_PATH,
    USAGE_PATH,
    CountedApart,
    ExchangeUsage,
)

_ASK_LIMIT_S = END_LIMIT_S + 2.0
_APART_LIMIT_S = 1.0


async def fetch_usage(pool: EnginePool, exchange: bytes) -> TokenUsage | None:
    """What the request of this name used, once it is over; None: the engine does not know, or is gone."""
    try:
        answer = await call(pool, b"GET", b"%b?exchange=%b" % (USAGE_PATH.encode(), exchange), None, _ASK_LIMIT_S)
        used = msgspec.json.decode(answer.body, type=ExchangeUsage) if answer.status == 200 else None
    except (OSError, msgspec.DecodeError):  # a TimeoutError is one of the first
        return None
    return None if used is None else TokenUsage(used.prompt_tokens, used.completion_tokens, used.cached_tokens)


async def prompt_is_read(pool: EnginePool, exchange: bytes) -> bool:
    """Wait until the engine has read the prompts of this request, or it is over; False: the engine does not tell."""
    target = b"%b?exchange=%b" % (READ_PATH.encode(), exchange)
    try:
        while (answer := await call(pool, b"GET", target, None, READ_LIMIT_S + _APART_LIMIT_S)).status == 202:
            continue  # each question has a limit, and its request one of its own
    except OSError:
        return False
    return answer.status == 200


async def fetch_counted_apart(pool: EnginePool) -> CountedApart:
    """What is in the engine's counters and in no usage; nothing of an engine that keeps no ledger.

    Raises:
        OSError: it cannot be reached.
    """
    answer = await call(pool, b"GET", COUNTED_APART_PATH.encode(), None, _APART_LIMIT_S)
    try:
        return msgspec.json.decode(answer.body, type=CountedApart) if answer.status == 200 else CountedApart(0, 0)
    except msgspec.DecodeError:
        return CountedApart(0, 0)
