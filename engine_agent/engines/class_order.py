"""What a step of an engine may read of batch prompts, beside what is more urgent. Pure; the simulator's time model and
vLLM's scheduler follow the same rule.

Running requests take a step's tokens first, so a long batch prompt delays every later request, whatever its priority.
So batch prompts have a share of a step that keeps it short. While an urgent prompt is read, batch requests rest: a
prompt would lengthen the step, and so do answers, a few per cent for some thirty of them, of which an urgent prompt
suffers in each of its steps. Beside batch work urgent answers take longer, so more of them are there when an urgent
prompt is read, and the step that reads it is a little shorter for that. And an urgent request that finds no room in the
engine takes that of the batch request that came last, which is read again later.
"""

from collections.abc import Iterable

BATCH_PRIORITY = 200
"""That of the class in `engine_agent.cell_proxy.rewrite.PRIORITIES`, and of all that is less urgent."""
BATCH_PROMPT_TOKENS = 256
"""Per step; a version's engine options may set it. Measured values: docs/design/batch.md#batch-inside-a-cell."""


URGENT_SHARE = 7, 8
"""Of a step's tokens that urgent prompts have beside batch work."""


def is_batch(priority: int) -> bool:
    """Whether a request of this priority is batch work."""
    return priority >= BATCH_PRIORITY


def urgent_prompt_tokens(step_tokens: int, *, beside_batch: bool) -> int:
    """How many tokens of urgent prompts a step reads that may have `step_tokens`."""
    part, whole = URGENT_SHARE
    return max(1, step_tokens * part // whole) if beside_batch else step_tokens


def batch_prompt_room(limit: int | None, unread: Iterable[tuple[int, int]]) -> int | None:
    """How many more tokens of batch prompts may join those that are being read in this step. None: any number.

    Args:
        limit: tokens of batch prompts in a step; None: the rule is off.
        unread: of each prompt of which a part was read or that begins now, its priority and how many tokens are left.
    """
    if limit is None:
        return None
    left = 0
    for priority, tokens in unread:
        if not is_batch(priority):
            return 0
        left += tokens
    return max(0, limit - left)
