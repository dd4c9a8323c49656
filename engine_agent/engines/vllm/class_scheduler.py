"""vLLM's scheduler with an order of classes, given to it with `--scheduler-cls`: batch requests are served as
`engine_agent.engines.class_order` says. What decides is here and pure; vLLM's own `schedule` then does what it always
does, with its running requests sorted, its budget for this step lowered, and what is set aside out of its sight.

It runs in the engine's core, of a cell of several nodes on the leader alone: followers do the steps that it plans. It
decides by neither clock nor chance, changes no answer and keeps no state of its own but one bit. Where a vLLM lacks
what it needs, or serves in a way that a limit would stop for ever, vLLM's own scheduler runs and says why in the log.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any

from engine_agent.engines.class_order import BATCH_PROMPT_TOKENS, is_batch, urgent_prompt_tokens
from engine_agent.engines.vllm import vllm_versions

TOKENS_VARIABLE = "SWITCHYARD_BATCH_PROMPT_TOKENS"
"""How the launcher tells the core: vLLM has no option for it."""


@dataclass(frozen=True, slots=True)
class RunningRequest:
    """A request in vLLM's batch. `wanted`: tokens that it would take of a step if it were alone."""

    id: str
    priority: int
    is_reading: bool
    wanted: int


@dataclass(frozen=True, slots=True)
class StepOrder:
    """What a step may do. `order`: running requests as they take their tokens. `set_aside`: running requests that get
    none. `holds_waiting`: no batch request is admitted. `most_tokens`: of the step."""

    order: tuple[str, ...]
    most_tokens: int
    set_aside: frozenset[str] = frozenset()
    holds_waiting: bool = False


def plan_step(running: Sequence[RunningRequest], *, urgent_waits: bool, limit: int, step_tokens: int) -> StepOrder:
    """The order of one step. `urgent_waits`: a request that is more urgent than batch work may be admitted in it;
    `limit`: tokens of batch prompts in a step; `step_tokens`: of all in it, at most.

    With an urgent prompt to read all batch requests rest. How long it is, less what a cache holds, nobody knows before
    it is admitted, so a limit on the step's tokens could not stand for that. An answer's last token is planned for
    although vLLM may skip it: a batch prompt then gets one token more.
    """
    order = tuple(each.id for each in sorted(running, key=lambda each: (is_batch(each.priority), each.is_reading)))
    if urgent_waits or any(each.is_reading and not is_batch(each.priority) for each in running):
        aside = frozenset(each.id for each in running if is_batch(each.priority))
        most = urgent_prompt_tokens(step_tokens, beside_batch=bool(aside))
        return StepOrder(order, set_aside=aside, holds_waiting=True, most_tokens=most)
    answers = sum(each.wanted for each in running if not each.is_reading)
    return StepOrder(order, most_tokens=answers + limit)


class ClassOrder:
    """What is laid over one of vLLM's schedulers, whose names these are."""

    batch_prompt_tokens = BATCH_PROMPT_TOKENS
    _has_no_room = False
    """Urgent requests were tried last time, and there was no memory for any."""

    def schedule(self: Any, *args: Any, **named: Any) -> Any:
        urgent_waits = urgent_request_waits(self)
        if urgent_waits and (self._has_no_room or len(self.running) >= self.max_num_active_reqs):
            preempt_batch_request(self)
        by_id = {each.request_id: each for each in self.running}
        most = self.max_num_scheduled_tokens
        plan = plan_step(
            [_running(each) for each in self.running],
            urgent_waits=urgent_waits,
            limit=self.batch_prompt_tokens,
            step_tokens=most,
        )
        self.running[:] = [by_id[name] for name in plan.order]
        for name in plan.set_aside:
            # vLLM's own mark of a request that takes no part in a step: it keeps its place, and can lose its memory.
            by_id[name].next_decode_eligible_step = max(by_id[name].next_decode_eligible_step, self.current_step + 2)
        held = [each for each in self.waiting if is_batch(each.priority)] if plan.holds_waiting else []
        self.waiting.remove_requests(held)
        self.max_num_scheduled_tokens = min(most, plan.most_tokens)
        try:
            return super().schedule(*args, **named)  # type: ignore[misc]  # of the other base
        finally:
            self.max_num_scheduled_tokens = most
            for each in held:
                self.waiting.add_request(each)
            nobody_came = all(each.request_id in by_id for each in self.running)
            self._has_no_room = urgent_waits and nobody_came and urgent_request_waits(self)


def urgent_request_waits(scheduler: Any) -> bool:
    """Whether an urgent request waits for nothing but a place and memory."""
    return any(
        not is_batch(each.priority) and not scheduler._is_blocked_waiting_status(each.status)
        for queue in (scheduler.kv_holding_waiting, scheduler.waiting)
        for each in queue
    )


def preempt_batch_request(scheduler: Any) -> None:
    """Take the batch request that came last out of vLLM's batch, as vLLM does where a running request lacks memory: it
    waits again, and what is computed anew is most likely still in the cache."""
    batch = [each for each in scheduler.running if is_batch(each.priority)]
    last = max(batch, key=lambda each: (each.priority, each.arrival_time), default=None)
    if last is not None and scheduler._request_blocks_can_be_freed(last):
        scheduler.running.remove(last)
        scheduler._preempt_request(last, monotonic(), drop_stale_output=scheduler.requires_kv_delivery)


def _running(request: Any) -> RunningRequest:
    wanted = request.num_tokens_with_spec + request.num_output_placeholders - request.num_computed_tokens
    return RunningRequest(request.request_id, request.priority, request.is_prefill_chunk, max(0, wanted))


def class_aware_scheduler(**given: Any) -> Any:
    """vLLM's scheduler for this configuration, with the order of classes if that can be had. vLLM's core calls it in
    place of a class, with what it gives a scheduler.
    """
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request

    config = given["vllm_config"]
    base = AsyncScheduler if config.scheduler_config.async_scheduling else Scheduler
    if why := vllm_versions.why_no_class_order(config, given["kv_cache_config"], Scheduler, Request):
        sys.stderr.write(f"batch requests are served like all others: {why}\n")
        return base(**given)
    scheduler: Any = type("ClassAwareScheduler", (ClassOrder, base), {})(**given)
    scheduler.batch_prompt_tokens = tokens_from(os.environ)
    return scheduler


def tokens_from(environment: Mapping[str, str]) -> int:
    """Tokens of batch prompts in a step, as the launcher says."""
    return int(environment.get(TOKENS_VARIABLE, BATCH_PROMPT_TOKENS))
