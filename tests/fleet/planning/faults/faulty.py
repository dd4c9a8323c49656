"""Faults for planner tests, said in a few words, beside the small fleets of `fleets`."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from engine_agent.protocol.signatures import FaultSignature
from fleet.planning.fault_rules import Rule
from fleet.planning.fault_views import FaultsView, IncidentView, ReplacementView, SignalView, StepWindow
from fleet.planning.snapshot import FleetView
from tests.fleet.planning.fleets import KIND, ago

HARD = FaultSignature.NEURON_HBM_UNCORRECTABLE
SOFT = FaultSignature.NVIDIA_XID
VAGUE = FaultSignature.NEURON_COLLECTIVES_HANG
WINDOW = 1000


def signal(node: str, signature: str = HARD, **changes: Any) -> SignalView:
    view = SignalView(node, signature, "it broke", KIND, first_at=ago(5), last_at=ago(5))
    return replace(view, **changes)


def incident(kind: str, subject: str, **changes: Any) -> IncidentView:
    view = IncidentView(id=7, kind=kind, subject=subject, opened_at=ago(100), seen_at=ago(1), node=subject)
    return replace(view, **changes)


def replacement(node: str, cell: str = "", **changes: Any) -> ReplacementView:
    view = ReplacementView(id=5, node=node, rule=Rule.HARD_SIGNATURE, region="east", instance_type=KIND, cell=cell)
    return replace(view, **changes)


def with_faults(view: FleetView, *signals: SignalView, **parts: Any) -> FleetView:
    return replace(view, faults=FaultsView(signals=signals, **parts))


def windows(cell: str, step_ms: Sequence[float], generation: int = 3, bucket: int = 3) -> tuple[StepWindow, ...]:
    """The last windows of a rank: 100 steps each, at one batch size."""
    return tuple(
        StepWindow(WINDOW + place, cell, generation, {bucket: 100}, {bucket: 100 * ms})
        for place, ms in enumerate(step_ms)
    )
