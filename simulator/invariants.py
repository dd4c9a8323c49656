"""The invariants of the fleet (docs/architecture.md) as functions over a simulated world, and what scenarios expect at
the end of a run. `on_write` checks one transaction, `on_world` everything between two passes. They count for themselves
and use no planner, so that a mistake there cannot hide here. Each yields one sentence per violation."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import datetime

from engine_agent.protocol.states import EngineState
from fleet.deployments.planner import GrantRule
from fleet.reconcile.planning.decisions import ChangeRollout, DrainCell, GrantCells, MoveCell, StopCell
from fleet.reconcile.planning.snapshot import CellView, Finding
from fleet.reconcile.planning.states import ROLLOUT_ALLOWED, CellState, RolloutState
from simulator.rows import Write
from simulator.world import Invariant, World

RESUMES_WITHIN_S = 15.0
HURRIES_S = 45.0
CUT_OFF_S = 10.0
"""In the last seconds before its machine ends, a cell may be stopped with requests in flight."""
KNOWN_WITHIN_S = 15.0
"""A cell that answers nothing shows in its next reports; evidence is at most 10 s old, lost messages included."""


def availability_kept(world: World, write: Write) -> Iterator[str]:
    """Called after the write: a decision that takes an available cell down must leave enough of them."""
    before, after = write.before, write.after
    if before is None or after is None or before.state is not CellState.READY or isinstance(write.cause, str):
        return
    if isinstance(write.cause, DrainCell) and write.cause.forced:
        return  # its machine ends in any case; `forced_by_an_end` checks these
    if after.state not in {CellState.DRAINING, CellState.STOPPED, CellState.STARTING}:
        return
    spec = world.store.deployments[after.deployment]
    budget = spec.policy.max_unavailable
    cells = [cell for cell in world.store.cells.values() if cell.deployment == spec.name]
    ready = Counter(cell.region for cell in cells if cell.state is CellState.READY)
    floor = spec.cells_wanted.get(after.region, 0) - budget
    if ready[after.region] < floor:
        yield f"{after.id} was taken down; {ready[after.region]} cells are left in {after.region}, the floor is {floor}"
    down = [cell.id for cell in cells if cell.disruption is not None and cell.state is not CellState.READY]
    short = sum(max(0, wanted - ready[region]) for region, wanted in spec.cells_wanted.items())
    if len(down) > budget and short > budget:
        yield f"{len(down)} cells of {spec.name} are down on purpose ({', '.join(sorted(down))}), budget {budget}"


def forced_by_an_end(world: World, write: Write) -> Iterator[str]:
    """Only cells on a machine that ends soon are taken down without budget."""
    before, cause = write.before, write.cause
    if before is not None and isinstance(cause, DrainCell) and cause.forced:
        drain_s = world.store.deployments[before.deployment].drain_deadline_s
        if _ends_in_s(world, before, write.at) > drain_s + HURRIES_S:
            yield f"{before.id} was taken down without budget, and none of its machines ends within {drain_s:.0f} s"


def _ends_in_s(world: World, cell: CellView, now: datetime) -> float:
    members = {member.node for member in cell.members}
    ends = (notice.ends_at for notice in world.store.notices if notice.node in members)
    return min(((end - now).total_seconds() for end in ends if end is not None), default=math.inf)


def floors_kept(world: World, write: Write) -> Iterator[str]:
    """A higher priority never takes cells below a floor, unless they are preemptible."""
    grant = write.cause
    if not isinstance(grant, GrantCells) or grant.rule is not GrantRule.PRIORITY or grant.granted is None:
        return
    spec = world.store.deployments[grant.deployment]
    least = spec.claim(grant.region).least
    if grant.granted < least and not spec.sharing.preemptible:
        yield f"{spec.name} may have {grant.granted} cells in {grant.region}, and its floor is {least}"


def cells_not_mixed(world: World) -> Iterator[str]:
    for (cell, generation), ranks in world.engines.groups.items():
        versions = {engine.assignment.plan.served_model for engine in ranks.values()}
        if len(versions) > 1:
            yield f"{cell} generation {generation} runs {', '.join(sorted(versions))}"
        known = world.store.cells.get(cell)
        is_ready = known is not None and known.state is CellState.READY and known.generation == generation
        if known is not None and is_ready and versions != {known.version}:
            yield f"{cell} should run {known.version} and runs {', '.join(sorted(versions))}"


def drained_before_stopped(world: World, write: Write) -> Iterator[str]:
    before = write.before
    if not isinstance(write.cause, StopCell) or before is None or before.state is not CellState.DRAINING:
        return
    spec = world.store.deployments[before.deployment]
    since = world.store.listening_since
    waited_s = (write.at - max(before.state_since, since or write.at)).total_seconds()
    if waited_s > spec.drain_deadline_s or not before.members or _ends_in_s(world, before, write.at) <= CUT_OFF_S:
        return
    if world.routing.routes_to(before.id):
        yield f"{before.id} was stopped {waited_s:.0f} s into its drain while an ingress still sends to it"
    leader = world.provider.machines.get(before.members[0].node)
    if leader is not None and leader.has_power and (left := leader.in_flight()):
        yield f"{before.id} was stopped {waited_s:.0f} s into its drain with {left} requests in flight"


def one_place_per_node(world: World) -> Iterator[str]:
    members = Counter(member.node for cell in world.store.cells.values() for member in cell.members)
    yield from (f"{node} is in {count} cells" for node, count in members.items() if count > 1)
    for cell in world.store.cells.values():
        ranks = [member.rank for member in cell.members]
        if ranks != list(range(len(ranks))):
            yield f"{cell.id} has the ranks {ranks}"


def started_once(world: World) -> Iterator[str]:
    for (node, cell, generation), count in world.timeline.starts.items():
        if count > 1:
            yield f"{node} started generation {generation} of {cell} {count} times"


def generations_grow(world: World, write: Write) -> Iterator[str]:
    before, after = write.before, write.after
    if before is not None and after is not None and after.generation < before.generation:
        yield f"{after.id} went from generation {before.generation} to {after.generation}"
    if before is None or after is None or before.generation != after.generation:
        return
    if after.members and before.members != after.members:
        yield f"{after.id} changed its members within generation {after.generation}"


def ready_on_evidence(world: World, write: Write) -> Iterator[str]:
    after = write.after
    if not isinstance(write.cause, MoveCell) or after is None or after.state is not CellState.READY:
        return
    for member in after.members:
        node = world.store.nodes.get(member.node)
        report = node.report if node is not None else None
        if report is None or not report.is_about(after) or report.state is not EngineState.READY:
            yield f"{after.id} is ready; {member.node} does not report so for generation {after.generation}"


def resumed_in_time(world: World) -> Iterator[str]:
    killed_s = world.reconciler.last_kill_s
    if killed_s is not None and world.queue.now_s - killed_s > RESUMES_WITHIN_S:
        yield f"the first pass after a kill was {world.queue.now_s - killed_s:.0f} s later"


def promoted_on_evidence(world: World, write: Write) -> Iterator[str]:
    before, after = write.rollout_before, write.rollout_after
    if before is None or after is None or not isinstance(write.cause, ChangeRollout):
        return
    is_further = after.stage > before.stage or after.state is RolloutState.SUCCEEDED
    if not is_further or after.state in {RolloutState.ROLLING_BACK, RolloutState.ROLLED_BACK}:
        return
    verdict = write.cause.verdict
    if before.state is RolloutState.BAKING and (verdict is None or verdict.finding is not Finding.PASSED):
        yield f"rollout {after.id} continued from its bake without a verdict"
    spec = world.store.deployments[after.deployment]
    for cell in world.store.cells.values():
        updated = cell.deployment == spec.name and cell.version == after.to_version
        unwell_s = world.engines.unhealthy_for_s(cell.id, cell.generation)
        if updated and cell.state is CellState.READY and unwell_s > KNOWN_WITHIN_S:
            yield f"rollout {after.id} continued while {cell.id}, updated, has answered nothing for {unwell_s:.0f} s"


def way_back_open(world: World) -> Iterator[str]:
    for rollout in world.store.rollouts.values():
        if RolloutState.ROLLING_BACK not in ROLLOUT_ALLOWED[rollout.state]:
            yield f"rollout {rollout.id} is {rollout.state} and cannot be rolled back"
        spec = world.store.deployments[rollout.deployment]
        if rollout.from_version != spec.version and rollout.from_version not in spec.others:
            yield f"rollout {rollout.id} has lost {rollout.from_version}, where it came from"


def charged_with_the_step(world: World, write: Write) -> Iterator[str]:
    before, after = write.before, write.after
    if before is None or after is None or before.state is not CellState.READY:
        return
    if after.state is CellState.DRAINING and after.disruption is None:
        yield f"{after.id} was taken down and nothing was charged for it"


def charges_end(world: World) -> Iterator[str]:
    for cell in world.store.cells.values():
        if cell.disruption is not None and cell.state in {CellState.READY, CellState.STOPPED, CellState.PENDING}:
            yield f"{cell.id} is {cell.state} and still charged for {cell.disruption}"


INVARIANTS: tuple[Invariant, ...] = (
    Invariant("I1", "available >= wanted - max_unavailable, except for faults", on_write=availability_kept),
    Invariant("I1", "only cells on ending machines are taken down without budget", on_write=forced_by_an_end),
    Invariant("I1", "no cell is taken below a floor that is not preemptible", on_write=floors_kept),
    Invariant("I2", "a cell never serves mixed versions", on_world=cells_not_mixed),
    Invariant("I3", "no cell stops while it receives or processes requests", on_write=drained_before_stopped),
    Invariant("I4", "a node is in one cell, at one rank", on_world=one_place_per_node),
    Invariant("I5", "a repeated order starts nothing twice, and never two engines", on_world=started_once),
    Invariant("I5", "generations only grow, and bind the members", on_write=generations_grow),
    Invariant("I6", "ready needs fresh evidence of every rank of this generation", on_write=ready_on_evidence),
    Invariant("I6", "a rollout continues only after its bake has passed", on_write=promoted_on_evidence),
    Invariant("I7", "a rollout can be rolled back from every active state", on_world=way_back_open),
    Invariant("I8", "work continues within 15 s of any crash", on_world=resumed_in_time),
    Invariant("I9", "a disconnected node stops nothing that is healthy"),
    Invariant("I10", "a disruption is charged in the write that causes it", on_write=charged_with_the_step),
    Invariant("I10", "a charge ends when the cell is ready or gone", on_world=charges_end),
)
"""I9 is checked where an agent stops an engine (`simulator.machine`)."""


def not_all_ready(world: World) -> Iterator[str]:
    """Yields places that lack cells, or have too many."""
    for name, spec in world.store.deployments.items():
        for region, wanted in spec.cells_wanted.items():
            cells = [c for c in world.store.cells.values() if (c.deployment, c.region) == (name, region)]
            ready = [cell for cell in cells if cell.state is CellState.READY]
            if len(ready) != wanted or len(cells) != wanted:
                states = ", ".join(f"{cell.id} {cell.state}: {cell.reason}" for cell in cells if cell not in ready)
                yield f"{name} in {region}: {len(ready)} of {wanted} cells are ready; {states or 'there are no others'}"


def not_serving(world: World) -> Iterator[str]:
    for cell in world.store.cells.values():
        if cell.state is CellState.READY and not world.engines.is_serving(cell.id, cell.generation):
            yield f"{cell.id} is ready and does not answer"


def all_well(world: World) -> Iterator[str]:
    yield from not_all_ready(world)
    yield from not_serving(world)


def never_touched(world: World, kinds: Iterable[str]) -> Iterator[str]:
    for kind in kinds:
        if count := world.timeline.counts[kind]:
            example = next(entry for entry in world.timeline.entries if entry.kind == kind)
            yield f"{kind} happened {count} times, first at {example.at_s:.1f} s: {example.subject}: {example.text}"


def mixed_versions(world: World) -> Iterator[str]:
    """Yields deployments whose cells run several versions, or another than theirs."""
    for name, spec in world.store.deployments.items():
        versions = {cell.version for cell in world.store.cells.values() if cell.deployment == name}
        if name not in world.store.rollouts and versions - {spec.version}:
            yield f"{name} should serve {spec.version}; its cells run {', '.join(sorted(versions))}"


def touched_cells(world: World) -> set[str]:
    kinds = {"cell.draining", "cell.failed", "cell.lost"}
    return {entry.subject for entry in world.timeline.entries if entry.kind in kinds}
