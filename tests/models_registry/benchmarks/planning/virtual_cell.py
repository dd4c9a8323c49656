"""A cell of engine `sim` on virtual time, with its own batching model and a workload's arrivals: a point of a minute
costs a second, and the right result can be computed. Pure, given its seed.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from engine_agent.engines.sim.batching import BatchingModel, ModelParameters, Sequence
from models_registry.benchmarks.planning.goodput import (
    Found,
    GoodputRules,
    Outcome,
    PointEvaluation,
    PointVerdict,
    early_verdict,
    final_verdict,
    first_rate,
    length_s,
    plan_goodput,
    warm_up_s,
)
from models_registry.benchmarks.planning.workload import Arrival, Slo, Workload
from models_registry.benchmarks.services.runner import arrival_gaps

LATE_CHECK_S = 2.0
"""How often a running point looks at what it knows."""


@dataclass
class _Request:
    due_s: float
    first_s: float = 0.0
    ended_s: float = 0.0
    tokens: int = 0

    def give(self, now_s: float, is_last: bool) -> None:
        self.tokens += 1
        self.first_s = self.first_s or now_s
        self.ended_s = now_s if is_last else 0.0


def mean_field_knee(parameters: ModelParameters, workload: Workload, slo: Slo) -> float:
    """Requests per second at which the mean time between tokens reaches its objective.

    A step of n sequences takes a + b n plus the prefill of new prompts; by Little's law n is the rate times output
    tokens times the step. So a step takes a / (1 - rate (prompt / prefill rate + b output)).
    """
    step_s, per_seq_s = parameters.decode_step_ms / 1000, parameters.decode_step_per_seq_ms / 1000
    work_s = workload.prompt / parameters.prefill_tokens_per_s + per_seq_s * workload.output
    return (1 - step_s / slo.itl_s) / work_s


def arrivals(rate: float, arrival: Arrival, seed: int) -> Iterator[float]:
    """Endless arrival times in seconds from the start."""
    at_s = 0.0
    for gap in arrival_gaps(arrival, random.Random(seed)):
        at_s += gap / rate
        yield at_s


@dataclass
class VirtualCell:
    """Measures points on virtual time. `spent_s`: virtual seconds of all points."""

    parameters: ModelParameters
    workload: Workload
    slo: Slo
    rules: GoodputRules = field(default_factory=GoodputRules)
    seed: int = 0
    spent_s: float = 0.0

    def measure(self, rate: float) -> PointEvaluation:
        point = _Point(self, warm_up_s(self.slo.longest_s(self.workload.output), self.rules))
        model, now_s = BatchingModel(self.parameters), 0.0
        coming = arrivals(rate, self.workload.arrival, self.seed)
        next_s = next(coming)
        while (judgement := point.judge(rate, now_s)) is None:
            while next_s <= now_s:
                model.submit(Sequence(str(len(point.requests)), self.workload.prompt, self.workload.output))
                point.requests.append(_Request(next_s))
                next_s = next(coming)
            step = model.begin_step(now_s)
            if step is None:
                now_s = next_s
                continue
            now_s = step.ends_at_s
            for token in model.finish_step():
                point.requests[int(token.sequence)].give(now_s, token.is_last)
        self.spent_s += now_s
        return judgement


class _Point:
    """State of a point. Outcomes are in the order of arrival, up to the first unknown one."""

    def __init__(self, cell: VirtualCell, warm_s: float) -> None:
        self.requests: list[_Request] = []
        self._cell, self._warm_s = cell, warm_s
        self._outcomes: list[Outcome] = []
        self._next, self._looked_s = 0, 0.0

    def judge(self, rate: float, now_s: float) -> PointEvaluation | None:
        rules = self._cell.rules
        while self._next < len(self.requests) and self._take(self.requests[self._next], now_s):
            self._next += 1
            if judgement := early_verdict(self._outcomes, rules, rate):
                return judgement
        if not self._outcomes or now_s < max(self._warm_s + rules.min_s, self._looked_s + LATE_CHECK_S):
            return None
        self._looked_s = now_s
        ends_s = self._warm_s + length_s(rate, [each.duration_s for each in self._outcomes], rules)
        is_known = self._next >= len(self.requests) or self.requests[self._next].due_s >= ends_s
        if now_s < ends_s or not is_known:
            return None
        return final_verdict(self._outcomes, rules, rate)

    def _take(self, request: _Request, now_s: float) -> bool:
        slo, so_far_s = self._cell.slo, (request.ended_s or now_s) - request.due_s
        if request.ended_s:
            inside = slo.is_inside(request.first_s - request.due_s, so_far_s, request.tokens)
        elif not request.first_s and so_far_s > slo.ttft_s:
            inside = False
        else:
            return request.due_s < self._warm_s
        if request.due_s >= self._warm_s:
            self._outcomes.append(Outcome(inside, so_far_s))
        return True


def search(cell: VirtualCell) -> tuple[Found, dict[float, PointEvaluation]]:
    alone_s = cell.slo.longest_s(cell.workload.output) / 4
    first = first_rate(alone_s, cell.parameters.max_num_seqs, cell.rules)
    points: dict[float, PointEvaluation] = {}
    while True:
        verdicts: dict[float, PointVerdict] = {rate: point.verdict for rate, point in points.items()}
        step = plan_goodput(verdicts, first, cell.rules)
        if isinstance(step, Found):
            return step, points
        points[step.rate] = cell.measure(step.rate)
