"""How long plans of several sizes take: made-up days, with the solver and without."""

import math
import random
import time
from datetime import UTC, datetime
from typing import Any

from fleet.planning.capacity.planner import plan_capacity
from fleet.planning.capacity.program import Program
from fleet.planning.capacity.solver import Solution
from fleet.planning.capacity.view import (
    BatchWork,
    CapacitySettings,
    CapacityView,
    CellKind,
    Demand,
    MachinePool,
    PlannedDeployment,
    PlannedPlace,
)

SIZES = ((3, 1, 1, 96), (4, 2, 2, 24), (8, 3, 2, 24), (16, 3, 2, 24), (8, 3, 2, 96), (16, 3, 2, 96), (32, 3, 2, 96))
AT = datetime(2026, 1, 1, tzinfo=UTC)
UNHURRIED = CapacitySettings(solve_s=3600.0, whole_most=0)
"""Limits are of a clock, which a busy machine makes worthless. Without whole numbers in the first slots."""


def made_up(deployments: int, regions: int, types: int, slots: int) -> CapacityView:
    """Days with a noisy wave each, a batch in every place, three pools of each type."""
    source = random.Random(1)

    def place(region: int) -> PlannedPlace:
        mean, peak = source.uniform(50, 600), source.uniform(0, 24)
        p50 = [
            mean * (1 + 0.7 * math.sin((slot / 4 + peak) / 24 * 2 * math.pi) + 0.1 * source.random())
            for slot in range(slots)
        ]
        demand = Demand(tuple(p50), tuple(value * (1.1 + 0.2 * slot / slots) for slot, value in enumerate(p50)))
        batch = BatchWork(mean * 6 * 3600.0, 3600.0 * source.randint(6, 22))
        return PlannedPlace(f"r{region}", 1, 60, {"t0": int(demand.p90[0] / 28)}, demand, (batch,))

    found = [
        PlannedDeployment(
            f"d{number}",
            source.choice([240.0, 600.0, 1200.0]),
            tuple(
                CellKind(f"t{kind}", source.choice([32.0, 48.0, 64.0]), source.choice([1, 2]), 0.5)
                for kind in range(types)
            ),
            tuple(place(region) for region in range(regions)),
        )
        for number in range(deployments)
    ]
    pools = tuple(
        MachinePool(f"r{region}", f"t{kind}", name, count * deployments, price * (1 + 0.2 * region) * (1 + 0.3 * kind))
        for region in range(regions)
        for kind in range(types)
        for name, count, price in (("on_demand", 12, 10.0), ("spot", 3, 4.0), ("owned", 4, 0.0))
    )
    return CapacityView(AT, tuple(found), pools, slots=slots)


def _unsolved(program: Program, **limits: Any) -> Solution:
    return Solution(None, "left out")


def print_sizes() -> None:
    """A table in processor seconds of this process, which has one thread."""
    print("| deployments x regions x types x slots | variables | seconds | found by | seconds, greedy | costs more |")
    print("| --- | --- | --- | --- | --- | --- |")
    plan_capacity(made_up(1, 1, 1, 4))  # imports
    for size in SIZES:
        view = made_up(*size)
        deployments, regions, types, slots = size
        variables = slots * regions * (2 * deployments * types + 2 * deployments + 3 * types) + deployments * regions
        began = time.process_time()
        plan = plan_capacity(view, UNHURRIED)
        solved = time.process_time()
        greedy = plan_capacity(view, UNHURRIED, _unsolved)
        ended = time.process_time()
        text = " x ".join(map(str, size))
        more = 100 * (greedy.total / plan.total - 1)
        print(
            f"| {text} | {variables:,} | {solved - began:.2f} | {plan.solver} | {ended - solved:.2f} | {more:.0f} % |",
            flush=True,
        )
