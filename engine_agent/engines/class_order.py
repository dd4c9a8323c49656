"""How many tokens of batch prompts a step may read next to more urgent work. Pure: the simulator's time model and
vLLM's scheduler follow the same rule.

Running requests take a step's tokens first, so a long batch prompt delays every later request, whatever its priority.
So batch prompts get a limited share of a step. While an urgent prompt is read, batch requests pause: their prompts
would lengthen the step, and so would their answers, by a few per cent for about 30 of them. Next to batch work urgent
answers take longer, so more of them run when an urgent prompt is read; the step that reads it is shortened to
compensate. An urgent request that finds no room in the engine preempts the latest batch request, which is read again
later."""

from collections.abc import Iterable

BATCH_PRIORITY = 200
"""Priority of the class in `engine_agent.cell_proxy.rewrite.PRIORITIES`; higher numbers are less urgent."""
BATCH_PROMPT_TOKENS = 256
"""Per step; a version's engine options may set it. Measured values: docs/design/batch.md#batch-inside-a-cell."""


URGENT_SHARE = 7, 8
"""Share of a step's tokens for urgent prompts next to batch work."""


def is_batch(priority: int) -> bool:
    return priority >= BATCH_PRIORITY


def urgent_prompt_tokens(step_tokens: int, *, beside_batch: bool) -> int:
    """Returns how many tokens of urgent prompts a step with `step_tokens` reads."""
    part, whole = URGENT_SHARE
    return max(1, step_tokens * part // whole) if beside_batch else step_tokens


def batch_prompt_room(limit: int | None, unread: Iterable[tuple[int, int]]) -> int | None:
    """Returns how many more tokens of batch prompts may join those that are being read; None means no limit.

    Args:
        limit: tokens of batch prompts in a step; None disables the rule.
        unread: priority and remaining tokens of each prompt that has been read in part or begins now."""
    if limit is None:
        return None
    left = 0
    for priority, tokens in unread:
        if not is_batch(priority):
            return 0
        left += tokens
    return max(0, limit - left)
