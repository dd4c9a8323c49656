"""vLLM's scheduler with an order of classes (`engine_agent.engines.class_order`), given to vLLM with `--scheduler-cls`.

The decision is pure (`plan_step`). vLLM's `schedule` then runs unchanged, with its running requests sorted, its budget
for this step lowered, and some batch requests hidden from it. It runs in the engine's core, in a cell of several nodes
only on the leader: followers execute its steps. It uses neither clock nor chance, changes no answer, and keeps one bit
of state. If this vLLM lacks a needed attribute, or a limit could block prompts forever, vLLM's scheduler runs and the
log states why."""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any

from engine_agent.engines.class_order import BATCH_PROMPT_TOKENS, is_batch, urgent_prompt_tokens
from engine_agent.engines.vllm import vllm_versions
from engine_agent.engines.vllm.continuation.core import patch_core

TOKENS_VARIABLE = "SWITCHYARD_BATCH_PROMPT_TOKENS"
"""Passes the limit from the launcher to the core, because vLLM has no option for it."""


@dataclass(frozen=True, slots=True)
class RunningRequest:
    """A request in vLLM's batch. `wanted`: tokens that it would take of a step if it were alone."""

    id: str
    priority: int
    is_reading: bool
    wanted: int


@dataclass(frozen=True, slots=True)
class StepOrder:
    """The limits of a step. `order`: running requests in the order in which they take tokens. `set_aside`: running
    requests without tokens. `holds_waiting`: no batch request is admitted. `most_tokens`: of the step."""

    order: tuple[str, ...]
    most_tokens: int
    set_aside: frozenset[str] = frozenset()
    holds_waiting: bool = False


def plan_step(running: Sequence[RunningRequest], *, urgent_waits: bool, limit: int, step_tokens: int) -> StepOrder:
    """Returns the order of one step. `urgent_waits`: a request more urgent than batch work may be admitted; `limit`:
    tokens of batch prompts in a step; `step_tokens`: maximum tokens of a step.

    All batch requests pause while an urgent prompt is read. The uncached length of a waiting prompt is unknown before
    its admission, so a limit on the step's tokens could not replace the pause. An answer's last token is counted
    although vLLM may skip it: a batch prompt then gets one token more."""
    order = tuple(each.id for each in sorted(running, key=lambda each: (is_batch(each.priority), each.is_reading)))
    if urgent_waits or any(each.is_reading and not is_batch(each.priority) for each in running):
        aside = frozenset(each.id for each in running if is_batch(each.priority))
        most = urgent_prompt_tokens(step_tokens, beside_batch=bool(aside))
        return StepOrder(order, set_aside=aside, holds_waiting=True, most_tokens=most)
    answers = sum(each.wanted for each in running if not each.is_reading)
    return StepOrder(order, most_tokens=answers + limit)


class ClassOrder:
    """Mixed into one of vLLM's schedulers, whose attributes it uses."""

    batch_prompt_tokens = BATCH_PROMPT_TOKENS
    _has_no_room = False
    """No urgent request could be admitted in the previous step for lack of memory."""

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
            # vLLM's mark of a request that skips a step: it keeps its place, and may be preempted.
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
            none_admitted = all(each.request_id in by_id for each in self.running)
            self._has_no_room = urgent_waits and none_admitted and urgent_request_waits(self)


def urgent_request_waits(scheduler: Any) -> bool:
    """Whether an urgent request waits only for a place and memory."""
    return any(
        not is_batch(each.priority) and not scheduler._is_blocked_waiting_status(each.status)
        for queue in (scheduler.kv_holding_waiting, scheduler.waiting)
        for each in queue
    )


def preempt_batch_request(scheduler: Any) -> None:
    """Preempts the latest batch request, as vLLM does when a running request lacks memory: it waits again, and most of
    its blocks are likely still cached."""
    batch = [each for each in scheduler.running if is_batch(each.priority)]
    last = max(batch, key=lambda each: (each.priority, each.arrival_time), default=None)
    if last is not None and scheduler._request_blocks_can_be_freed(last):
        scheduler.running.remove(last)
        scheduler._preempt_request(last, monotonic(), drop_stale_output=scheduler.requires_kv_delivery)


def _running(request: Any) -> RunningRequest:
    wanted = request.num_tokens_with_spec + request.num_output_placeholders - request.num_computed_tokens
    return RunningRequest(request.request_id, request.priority, request.is_prefill_chunk, max(0, wanted))


def class_aware_scheduler(**given: Any) -> Any:
    """Returns vLLM's scheduler for this configuration, with the order of classes if possible. vLLM's core calls it in
    place of a class."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request

    patch_core()  # vLLM's own executors do not
    config = given["vllm_config"]
    base = AsyncScheduler if config.scheduler_config.async_scheduling else Scheduler
    if why := vllm_versions.why_no_class_order(config, given["kv_cache_config"], Scheduler, Request):
        sys.stderr.write(f"batch requests are scheduled like all others: {why}\n")
        return base(**given)
    scheduler: Any = type("ClassAwareScheduler", (ClassOrder, base), {})(**given)
    scheduler.batch_prompt_tokens = tokens_from(os.environ)
    return scheduler


def tokens_from(environment: Mapping[str, str]) -> int:
    return int(environment.get(TOKENS_VARIABLE, BATCH_PROMPT_TOKENS))
