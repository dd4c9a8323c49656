"""The invariants of the fleet (docs/architecture.md) as functions over a simulated world.

`on_write` looks at one transaction, `on_world` at everything between two passes. They count for themselves and use no
planner, so that a mistake there cannot hide here. Each yields one sentence per violation.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine_agent.protocol.states import EngineState
from fleet.planning.decisions import MoveCell, StopCell
from fleet.planning.states import CellState
from fleet.simulator.store import Write

if TYPE_CHECKING:
    from fleet.simulator.world import World

RESUMES_WITHIN_S = 16.0
"""The lease of a dead reconciler (15 s), and the second until the next pass."""


@dataclass(frozen=True, slots=True)
class Invariant:
    """A promise: its number in the design, its text, and how it is checked."""

    name: str
    text: str
    on_write: "Callable[[World, Write], Iterable[str]] | None" = None
    on_world: "Callable[[World], Iterable[str]] | None" = None


def availability_kept(world: "World", write: Write) -> Iterator[str]:
    """Called after the write: whoever takes an available cell down leaves enough of them."""
    before, after = write.before, write.after
    if before is None or after is None or before.state is not CellState.READY or isinstance(write.cause, str):
        return
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
        yield f"{len(down)} cells of {spec.name} are down on purpose ({', '.join(sorted(down))}), {budget} may be"


def cells_not_mixed(world: "World") -> Iterator[str]:
    for (cell, generation), ranks in world.engines.groups.items():
        versions = {engine.assignment.plan.served_model for engine in ranks.values()}
        if len(versions) > 1:
            yield f"{cell} generation {generation} runs {', '.join(sorted(versions))}"
        known = world.store.cells.get(cell)
        is_ready = known is not None and known.state is CellState.READY and known.generation == generation
        if known is not None and is_ready and versions != {known.version}:
            yield f"{cell} is said to run {known.version} and runs {', '.join(sorted(versions))}"


def drained_before_stopped(world: "World", write: Write) -> Iterator[str]:
    before = write.before
    if not isinstance(write.cause, StopCell) or before is None or before.state is not CellState.DRAINING:
        return
    spec = world.store.deployments[before.deployment]
    since = world.store.listening_since
    waited_s = (write.at - max(before.state_since, since or write.at)).total_seconds()
    if waited_s > spec.drain_deadline_s or not before.members:
        return
    if world.traffic.routes_to(before.id):
        yield f"{before.id} was stopped {waited_s:.0f} s into its drain while an ingress still sends to it"
    leader = world.machines.all.get(before.members[0].node)
    if leader is not None and leader.has_power and (left := leader.in_flight()):
        yield f"{before.id} was stopped {waited_s:.0f} s into its drain with {left} requests in flight"


def one_place_per_node(world: "World") -> Iterator[str]:
    members = Counter(member.node for cell in world.store.cells.values() for member in cell.members)
    yield from (f"{node} is in {count} cells" for node, count in members.items() if count > 1)
    for cell in world.store.cells.values():
        ranks = [member.rank for member in cell.members]
        if ranks != list(range(len(ranks))):
            yield f"{cell.id} has the ranks {ranks}"


def started_once(world: "World") -> Iterator[str]:
    for (node, cell, generation), count in world.journal.starts.items():
        if count > 1:
            yield f"{node} started generation {generation} of {cell} {count} times"


def generations_grow(world: "World", write: Write) -> Iterator[str]:
    before, after = write.before, write.after
    if before is not None and after is not None and after.generation < before.generation:
        yield f"{after.id} went from generation {before.generation} to {after.generation}"
    if before is None or after is None or before.generation != after.generation:
        return
    if after.members and before.members != after.members:
        yield f"{after.id} changed its members within generation {after.generation}"


def ready_on_evidence(world: "World", write: Write) -> Iterator[str]:
    after = write.after
    if not isinstance(write.cause, MoveCell) or after is None or after.state is not CellState.READY:
        return
    for member in after.members:
        node = world.store.nodes.get(member.node)
        report = node.report if node is not None else None
        if report is None or not report.speaks_of(after) or report.state is not EngineState.READY:
            yield f"{after.id} is called ready; {member.node} does not say so of generation {after.generation}"


def resumed_in_time(world: "World") -> Iterator[str]:
    killed_s = world.control.last_kill_s
    if killed_s is not None and world.queue.now_s - killed_s > RESUMES_WITHIN_S:
        yield f"the first pass after a kill came {world.queue.now_s - killed_s:.0f} s later"


INVARIANTS: tuple[Invariant, ...] = (
    Invariant("I1", "available >= wanted - max_unavailable, never lower because of us", on_write=availability_kept),
    Invariant("I2", "a cell never serves mixed versions", on_world=cells_not_mixed),
    Invariant("I3", "no cell stops while it is sent requests or works on some", on_write=drained_before_stopped),
    Invariant("I4", "a node is in one cell, at one rank", on_world=one_place_per_node),
    Invariant("I5", "a repeated order starts nothing twice, and never two engines", on_world=started_once),
    Invariant("I5", "generations only grow, and bind the members", on_write=generations_grow),
    Invariant("I6", "ready needs fresh evidence of every rank of this generation", on_write=ready_on_evidence),
    Invariant("I8", "work goes on within 15 s of any crash", on_world=resumed_in_time),
    Invariant("I9", "a node that is cut off ends nothing that is well"),
)
"""I9 is watched where an agent ends an engine (`fleet.simulator.machine`)."""
