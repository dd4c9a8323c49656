"""The reference store and the services over PostgreSQL react alike to the same decisions, correct, stale or forbidden.

Decisions are drawn at random from the rows, often slightly wrong. Effects of providers (launches, retirements and
restarts of agents) are tested elsewhere.
"""

from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from random import Random
from typing import Any

import pytest
from django.db import IntegrityError, transaction

from fleet.deployments.models import Deployment
from fleet.deployments.planner import GrantRule
from fleet.faults.models import Replacement
from fleet.faults.planning.views import Rule
from fleet.reconcile.planning.decisions import (
    ChangeRollout,
    CloseReplacement,
    CordonNode,
    CreateCell,
    Decision,
    DrainCell,
    ExplainCell,
    GrantCells,
    MoveCell,
    MoveNode,
    ReplaceNode,
    RequestReplacement,
    StartCell,
    StopCell,
    UncordonNode,
)
from fleet.reconcile.planning.snapshot import FleetView
from fleet.reconcile.planning.states import CellState, DisruptionCause, NodeState, RolloutState
from fleet.reconcile.selectors.snapshot import fleet_view
from fleet.reconcile.services import apply
from fleet.rollouts.models import Rollout
from kernel.transitions import StaleDecision
from simulator.rows import StaleWrite
from simulator.store import Store
from tests.fleet import rows

pytestmark = pytest.mark.django_db

REGION = "us-east-1"
DECISIONS = 60
LIKELY = 0.8
"""The probability that what a decision saw is correct."""


def small_fleet() -> None:
    """Three cells of two nodes, three spares, and a rollout that has begun."""
    deployment = rows.deployment(cells=3)
    old, new = rows.version("1"), rows.version("2")
    for number in range(1, 4):
        members = [rows.node(f"n-{number}{rank}", spare_since=None) for rank in range(2)]
        rows.cell(f"sim-70b-{REGION}-{number}", *members)
    for number in range(3):
        rows.node(f"n-spare{number}")
    Deployment.objects.update(next_ordinal=4, update_policy={"min_healthy_s": 5.0})
    Rollout.objects.create(
        deployment=deployment,
        from_version=old,
        to_version=new,
        reason="asked for",
        region_order=[REGION],
        policy={},
        actor="ada",
        created_at=rows.NOW,
        state_since=rows.NOW,
    )


class Draw:
    """Decisions about a store, from one seed."""

    def __init__(self, random: Random, store: Store) -> None:
        self._random = random
        self._store = store
        self._kinds: tuple[Callable[[], Decision], ...] = (
            self._create, self._start, self._start, self._drain, self._drain, self._move, self._move, self._move,
            self._stop, self._explain, self._move_node, self._cordon, self._rollout, self._condemn, self._condemn,
            self._grant,
        )  # fmt: skip

    def decision(self) -> Decision:
        return self._random.choice(self._kinds)()

    def _grant(self) -> Decision:
        claim = self._store.deployments["sim-70b"].claim(REGION)
        asked = claim.asked if self._is_right() else claim.asked + 1
        seen = claim.granted if self._is_right() else 7
        granted = self._random.choice((None, 0, 1, 2, 3))
        rule = self._random.choice(list(GrantRule))
        return GrantCells("sim-70b", REGION, asked, seen, granted, rule, "machines are short", "chat")

    def _cell(self) -> tuple[str, CellState, int]:
        """An existing one, mostly with its real state and generation."""
        cell = self._random.choice(sorted(self._store.cells.values(), key=lambda cell: cell.id))
        state = cell.state if self._is_right() else self._random.choice(list(CellState))
        generation = cell.generation if self._is_right() else cell.generation - 1
        return cell.id, state, generation

    def _is_right(self) -> bool:
        return self._random.random() < LIKELY

    def _create(self) -> Decision:
        return CreateCell("sim-70b", REGION, rows.KIND, "one more", self._random.choice(("", "sim-70b@2")))

    def _start(self) -> Decision:
        name, state, generation = self._cell()
        own = tuple(member.node for member in self._store.cells[name].members)
        free = sorted(node for node in self._store.nodes if node not in self._store.member_of)
        other = sorted(self._store.nodes)
        nodes = own if own and self._is_right() else tuple(self._random.sample(free if len(free) > 1 else other, 2))
        return StartCell(name, state, generation, nodes, "start", self._random.choice(("", "sim-70b@1", "sim-70b@2")))

    def _drain(self) -> Decision:
        name, _, generation = self._cell()
        return DrainCell(name, generation, self._random.choice(list(DisruptionCause)), "drain")

    def _move(self) -> Decision:
        name, state, generation = self._cell()
        to = self._random.choice((CellState.READY, CellState.READY, CellState.FAILED, CellState.LOST))
        return MoveCell(name, state, generation, to, "seen")

    def _stop(self) -> Decision:
        return StopCell(*self._cell(), "stop")

    def _explain(self) -> Decision:
        return ExplainCell(*self._cell(), f"waits for {self._random.randint(1, 9)}")

    def _move_node(self) -> Decision:
        node = self._random.choice(sorted(self._store.nodes))
        seen = self._store.nodes[node].state if self._is_right() else self._random.choice(list(NodeState))
        reported_at = self._store.nodes[node].report.last_seen_at if self._is_right() else None
        to = self._random.choice((NodeState.SUSPECT, NodeState.READY, NodeState.LOST))
        return MoveNode(node, seen, to, "heard", reported_at)

    def _cordon(self) -> Decision:
        node = self._random.choice(sorted(self._store.nodes))
        if self._random.random() < 0.3:
            return UncordonNode(node, "called off")
        return CordonNode(node, "a fault", for_notice=self._random.random() < 0.5)

    def _condemn(self) -> Decision:
        """Requests another node, takes one out of use, or completes that."""
        open_ones = [one.id for one in self._store.faults.replacements]
        if open_ones and self._random.random() < 0.4:
            return CloseReplacement(self._random.choice(open_ones) + (not self._is_right()), "done")
        node = self._store.nodes[self._random.choice(sorted(self._store.nodes))]
        cell = self._store.member_of.get(node.id, "") if self._is_right() else "sim-70b-us-east-1-1"
        if cell and self._random.random() < 0.4:
            return RequestReplacement(node.id, cell, Rule.SLOW, "slow")
        since = node.state_since if self._is_right() else node.state_since - timedelta(seconds=1)
        return ReplaceNode(node.id, node.state, since, cell, Rule.HARD_SIGNATURE, "broken")

    def _rollout(self) -> Decision:
        rollouts = list(self._store.rollouts.values())
        if not rollouts:
            return self._move()
        known = rollouts[0]
        to = self._random.choice((RolloutState.RUNNING, RolloutState.BAKING, RolloutState.PAUSED))
        if self._random.random() < 0.1:
            to = self._random.choice(list(RolloutState))
        revision = known.revision if self._is_right() else known.revision - 1
        return ChangeRollout(known.id, known.state, revision, to, known.stage + self._random.randint(0, 1), "goes on")


def as_numbered_there(decision: Decision, store: Store) -> Decision:
    """PostgreSQL numbers replacements differently."""
    if not isinstance(decision, CloseReplacement):
        return decision
    node = next((one.node for one in store.faults.replacements if one.id == decision.replacement), "")
    row = Replacement.objects.filter(node_id=node, closed_at__isnull=True).first()
    return replace(decision, replacement=row.pk if row is not None else 0)


def outcome(do: Callable[[Decision, datetime], None], decision: Decision, now: datetime) -> str:
    """The outcome of a decision, in a word."""
    try:
        with transaction.atomic():
            do(decision, now)
    except (StaleWrite, StaleDecision, IntegrityError):
        return "stale"
    except ValueError:
        return "forbidden"
    return "done"


def gist(view: FleetView) -> dict[str, Any]:
    """The fields that both must agree on; the store has no reports and addresses."""
    cells = {
        cell.id: (
            cell.state, cell.generation, cell.members, cell.version, cell.disruption, cell.restarts, cell.reason,
            cell.unrouted_at, cell.state_since,
        )
        for cell in view.cells.values()
    }  # fmt: skip
    nodes = {node.id: (node.state, node.cordoned, node.spare_since, node.state_since) for node in view.nodes.values()}
    rollouts = {
        rollout.id: (rollout.state, rollout.stage, rollout.revision, rollout.state_since, rollout.reason)
        for rollout in view.rollouts.values()
    }
    work = sorted((one.node, one.cell, one.begun, one.rule) for one in view.faults.replacements)
    spec = view.deployments["sim-70b"]
    of_spec = {"version": spec.version, "claim": spec.claim(REGION), "wanted": dict(spec.cells_wanted)}
    return {"cells": cells, "nodes": nodes, "rollouts": rollouts, "replacements": work, **of_spec}


def moments() -> Callable[[], datetime]:
    """A clock that moves two seconds with every reading."""
    now = rows.NOW

    def tick() -> datetime:
        nonlocal now
        now += timedelta(seconds=2)
        return now

    return tick


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 6))])
def test_store_and_services_agree(seed: int) -> None:
    small_fleet()
    store = Store(fleet_view(now=rows.NOW))
    draw, tick, seen = Draw(Random(seed), store), moments(), []
    for _ in range(DECISIONS):
        decision, now = draw.decision(), tick()
        there = as_numbered_there(decision, store)
        in_memory = outcome(store.apply, decision, now)
        in_database = outcome(apply, there, now)
        seen.append(in_memory)
        assert (in_memory, decision) == (in_database, decision), f"seed {seed}"
        if in_memory == "done":
            assert gist(store.fleet()) == gist(fleet_view(now=now)), f"seed {seed}, after {decision}"
    assert gist(store.fleet()) == gist(fleet_view(now=tick())), f"seed {seed}: a refused decision left something"
    assert {"done", "stale"} <= set(seen)
