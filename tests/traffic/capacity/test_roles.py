"""The role planner on rows: from leaders' reports to the number of cells by role."""

from datetime import datetime, timedelta
from typing import Any

import pytest

from engine_agent.protocol.states import CellRole
from fleet.autoscaling.models import RoleState
from fleet.autoscaling.planning.policy import CellPools
from fleet.autoscaling.planning.role_split import RoleSplit
from fleet.autoscaling.services import autoscaling_pause
from fleet.cells.models import Cell
from fleet.deployments.models import Deployment, DeploymentRegion
from fleet.deployments.services.deployments import deployment_change, deployment_scale
from fleet.nodes.models import NodeReport
from fleet.nodes.selectors import desired_for
from fleet.rollouts.models import Rollout
from kernel.models import Event
from tests.fleet import rows
from traffic.capacity.services import roles_plan
from traffic.region_shares.selectors.traffic import ready_cells
from traffic.routing.selectors import RoutingCache
from traffic.usage.models import TokenFit

pytestmark = [pytest.mark.django_db, pytest.mark.slow]
EAST = "us-east-1"
FIT = {
    "prompt": 125, "cached": 0, "completion": 600, "step_us": 20_000.0, "sequence_us": 250.0, "prompt_us": 125.0,
    "cached_us": 0.0, "sequences": 30.0, "samples": 100, "nodes": 4, "error": 0.05, "weight_error": 0.05,
}  # fmt: skip
"""The simulator's default step model."""


class Planned:
    """Four cells that serve this request rate, with planned roles."""

    def __init__(self, **scaling: Any) -> None:
        self.now = rows.NOW
        self.totals = {"requests_total": 0, "prompt_tokens_total": 0, "completion_tokens_total": 0}
        rows.deployment(cells=4, nodes=1)
        rows.version().__class__.objects.update(max_concurrency=64)
        for number in range(4):
            rows.cell(f"c{number}", rows.node(f"n-{number}"))
        policy = {"mode": "act", "roles": "planned", "itl_p99_ms": 50, **scaling}
        deployment_change(name="sim-70b", actor="ada", now=self.now, scaling=policy, slo={"ttft_ms": 1500})
        TokenFit.objects.create(version="sim-70b@1", instance_type=rows.KIND, fitted_at=self.now, **FIT)
        Event.objects.all().delete()

    def serve(self, per_s: float, prompt: int, answer: int, seconds: float = 300.0) -> None:
        """This load arrives, and the first cell answers all of it."""
        count = int(per_s * seconds)
        self.now += timedelta(seconds=seconds)
        self.totals["requests_total"] += count
        self.totals["prompt_tokens_total"] += count * prompt
        self.totals["completion_tokens_total"] += count * answer
        load = {"usage": [{"since": 1.0, **self.totals}], "in_flight": 8}
        NodeReport.objects.update(last_seen_at=self.now)
        NodeReport.objects.filter(node="n-0").update(load=load)

    def look(self) -> list[str]:
        return roles_plan(now=self.now)

    @property
    def split(self) -> RoleSplit:
        return DeploymentRegion.objects.get().split

    @property
    def state(self) -> RoleState:
        return RoleState.objects.get()


def test_long_prompts_have_cells_of_their_own() -> None:
    fleet = Planned()
    fleet.serve(2.6, 3000, 200)
    assert fleet.look() == [], "the first pass has no previous counters"
    assert fleet.state.rule == "unknown"
    fleet.serve(2.6, 3000, 200)
    assert fleet.look() == ["sim-70b"]

    assert fleet.split == RoleSplit(prefill=3, decode=1)
    assert (fleet.state.rule, fleet.state.needed) == ("demand", 4)
    event = Event.objects.get(kind="deployment.roles")
    assert event.message.startswith(
        "sim-70b in us-east-1 should have 3 prefill, 1 decode: 2.60 requests per second of 3000"
    )
    assert event.actor == "role planner"


def test_decode_cells_are_told_from_which_length_a_handover_pays() -> None:
    fleet = Planned()
    fleet.serve(2.6, 3000, 200)
    fleet.look()
    Cell.objects.filter(pk="c0").update(role=CellRole.DECODE.value)
    before = desired_for(["n-0", "n-1"])
    fleet.serve(2.6, 3000, 200)
    fleet.look()
    after = desired_for(["n-0", "n-1"])

    assert fleet.state.from_tokens == 128
    told = [order["n-0"].assignment.prefill_from_tokens for order in (before, after) if order["n-0"].assignment]
    assert told == [512, 128]
    assert after["n-0"].version > before["n-0"].version, "its proxy gets the new role without a restart"
    assert after["n-1"].version == before["n-1"].version, "a mixed cell has no handovers"
    deployment_change(name="sim-70b", actor="ada", now=fleet.now, scaling={"roles": "stated"})
    order = desired_for(["n-0"])["n-0"].assignment
    assert order is not None
    assert order.prefill_from_tokens == 512


def test_between_two_looks_are_five_minutes_unless_the_number_of_cells_changes() -> None:
    fleet = Planned()
    fleet.serve(2.6, 3000, 200)
    fleet.look()
    fleet.serve(2.6, 3000, 200, seconds=60.0)
    assert fleet.look() == []
    deployment_scale(name="sim-70b", cells={EAST: 6}, actor="ada", now=fleet.now)
    assert fleet.look() == ["sim-70b"]
    assert fleet.split.total == 6


def test_in_shadow_paused_or_during_a_rollout_nothing_changes() -> None:
    fleet = Planned(mode="shadow")
    for _ in range(2):
        fleet.serve(2.6, 3000, 200)
        fleet.look()
    assert fleet.split == RoleSplit(mixed=4)
    assert (fleet.state.wanted, fleet.state.acting) == (RoleSplit(prefill=3, decode=1), False)

    deployment_change(name="sim-70b", actor="ada", now=fleet.now, scaling={"mode": "act"})
    autoscaling_pause(actor="ada", now=fleet.now)
    fleet.serve(2.6, 3000, 200)
    assert fleet.look() == []
    assert fleet.split == RoleSplit(mixed=4)


def test_during_a_rollout_roles_stay() -> None:
    fleet = Planned()
    fleet.serve(2.6, 3000, 200)
    fleet.look()
    fleet.serve(2.6, 3000, 200)
    start_rollout(fleet.now)
    assert fleet.look() == []
    assert fleet.state.rule == "rollout"


def start_rollout(now: datetime) -> None:
    Rollout.objects.create(
        deployment=Deployment.objects.get(), from_version=rows.version(), to_version=rows.version("2", nodes=1),
        state="running", region_order=[EAST], policy={}, actor="ada", created_at=now, state_since=now,
    )  # fmt: skip


def test_who_states_roles_himself_is_left_alone() -> None:
    fleet = Planned(roles="stated")
    deployment_scale(name="sim-70b", cells={EAST: CellPools(1, 3)}, actor="ada", now=fleet.now)
    fleet.serve(2.6, 3000, 200)

    assert fleet.look() == []
    assert not RoleState.objects.exists()


def test_prefill_cells_are_in_no_table_and_carry_nothing() -> None:
    rows.deployment(cells=2, nodes=1)
    rows.version().__class__.objects.update(max_concurrency=64, roles={"decode": {"max_concurrency": 32}})
    rows.cell("p", rows.node("n-p"), role=CellRole.PREFILL.value)
    rows.cell("d", rows.node("n-d"), role=CellRole.DECODE.value)
    cache = RoutingCache()
    cache.begin()

    assert [(one.id, one.max_connections) for one in cache.routable_cells()] == [("d", 32)]
    assert [(one.id, one.concurrency) for one in ready_cells()] == [("d", 32)]

    Cell.objects.filter(id="d").update(role=CellRole.MIXED.value)
    assert [(one.id, one.max_connections) for one in cache.routable_cells()] == [("d", 64)]
