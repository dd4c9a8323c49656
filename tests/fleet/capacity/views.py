"""Views of a day with two load shapes."""

import math
from datetime import UTC, datetime
from typing import Any

from fleet.capacity.planning.view import (
    CapacityPlan,
    CapacityView,
    CellKind,
    Demand,
    MachinePool,
    PlannedDeployment,
    PlannedPlace,
)

AT = datetime(2026, 11, 26, 12, 0, tzinfo=UTC)
EAST, WEST = "us-east-1", "us-west-2"
SLOTS = 96


def flat(requests: float, slots: int = SLOTS) -> Demand:
    """The same load all day, without uncertainty."""
    return Demand((requests,) * slots, (requests,) * slots)


def wave(low: float, high: float, peak_h: float = 12.0, slots: int = SLOTS, beyond: float = 1.0) -> Demand:
    """A day with its peak `peak_h` hours from now and its minimum half a day later; p90 is `beyond` times p50."""
    middle, half = (low + high) / 2, (high - low) / 2
    p50 = tuple(middle + half * math.cos((slot / 4 - peak_h) / 24 * 2 * math.pi) for slot in range(slots))
    return Demand(p50, tuple(value * beyond for value in p50))


def steps(before: float, after: float, at: int, slots: int = SLOTS) -> Demand:
    """One load until a slot, another from then on."""
    row = (before,) * at + (after,) * (slots - at)
    return Demand(row, row)


def place(region: str = EAST, demand: Demand | None = None, **changes: Any) -> PlannedPlace:
    known: dict[str, Any] = {"least": 1, "most": 50, "cells": {"trn1": 2}, "demand": demand, **changes}
    return PlannedPlace(region, **known)


def deployment(name: str = "chat", *places: PlannedPlace, **changes: Any) -> PlannedDeployment:
    """Cells of 10 concurrent requests on one machine; 5 at the target of 50 %. They start in 10 minutes."""
    known: dict[str, Any] = {"start_up_s": 600.0, "kinds": (CellKind("trn1", 10.0),), "target": 0.5, **changes}
    return PlannedDeployment(name, places=places or (place(demand=flat(10.0)),), **known)


def pool(name: str = "on_demand", count: int = 100, price: float = 10.0, **changes: Any) -> MachinePool:
    known: dict[str, Any] = {"region": EAST, "instance_type": "trn1", **changes}
    return MachinePool(name=name, count=count, price=price, **known)


def view(*deployments: PlannedDeployment, pools: tuple[MachinePool, ...] = (pool(),), **changes: Any) -> CapacityView:
    return CapacityView(AT, deployments or (deployment(),), pools, **changes)


def cells(plan: CapacityPlan, name: str = "chat", region: str = EAST, instance_type: str = "trn1") -> tuple[int, ...]:
    wanted = (name, region, instance_type)
    (row,) = (one for one in plan.cells if (one.deployment, one.region, one.instance_type) == wanted)
    return row.cells


def machines(plan: CapacityPlan, name: str, region: str = EAST) -> tuple[int, ...]:
    (row,) = (one for one in plan.machines if (one.pool, one.region) == (name, region))
    return row.machines


def budget(plan: CapacityPlan, name: str = "chat", region: str = EAST) -> tuple[float, ...]:
    (row,) = (one for one in plan.budgets if (one.deployment, one.region) == (name, region))
    return row.requests
