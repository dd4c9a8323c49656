"""Simulated engines: they load, connect to the other ranks of their cell and generation, serve, and fail together. An
engine knows its version's behaviour and the faults of its machine, but no planners or agents."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from engine_agent.node.planning.node import Membership
from engine_agent.protocol.messages import Assignment, Health
from simulator.context import SimulationContext

PEER_SEEN_S = 0.1
"""From the death of a rank until its leader answers 503 (docs/architecture.md)."""
PEER_ENDS_S = 1.0
"""From then until the other ranks exit."""
REQUEST_S = 4.0
"""Maximum duration of a request in flight."""
IN_FLIGHT = 4


@dataclass
class Engine:
    """One rank's process. `on_end` is called when it exits unexpectedly, `on_change` when its health changes."""

    assignment: Assignment
    membership: Membership
    pid: int
    started_s: float
    on_end: Callable[["Engine", str], None]
    on_change: Callable[[], None]
    loaded: bool = False
    ended: bool = False
    hung: bool = False
    blind: bool = False
    ready_since_s: float | None = None
    lost_peer: str = ""
    unhealthy_since_s: float | None = None

    @property
    def is_leader(self) -> bool:
        return self.membership.rank == 0

    def health(self, behaviour_wrong: bool) -> Health:
        if self.hung:
            return Health(ok=False, reason="no answer to a probe")
        if self.lost_peer and not (self.blind and self.is_leader):
            return Health(ok=False, reason=self.lost_peer)
        if self.ready_since_s is None:
            return Health(ok=False, reason="loading weights" if not self.loaded else "waiting for the other ranks")
        if behaviour_wrong and self.is_leader:
            return Health(ok=False, reason="a golden prompt was answered wrong", wrong=True)
        return Health(ok=True)


@dataclass
class Engines:
    """All running engines by cell and generation: ranks with the same secret form a cell."""

    context: SimulationContext
    groups: dict[tuple[str, int], dict[int, Engine]] = field(default_factory=lambda: defaultdict(dict))

    def start(
        self, assignment: Assignment, on_end: Callable[[Engine, str], None], on_change: Callable[[], None]
    ) -> Engine:
        member = Membership(assignment.cell, assignment.generation, assignment.rank)
        engine = Engine(assignment, member, self.context.next_serial(), self.context.queue.now_s, on_end, on_change)
        self.groups[member.cell, member.generation][member.rank] = engine
        behaviour = self.context.behaviour(assignment.plan.served_model)
        spread = 1.0 + behaviour.load_spread * (2.0 * self.context.random.random() - 1.0)
        if behaviour.never_starts:
            self.context.queue.after(
                behaviour.load_s * spread * 0.5, lambda: self.end(engine, "exit code 1: cannot load the weights")
            )
        else:
            self.context.queue.after(behaviour.load_s * spread, lambda: self._loaded(engine))
        return engine

    def adopt(
        self, assignment: Assignment, on_end: Callable[[Engine, str], None], on_change: Callable[[], None]
    ) -> Engine:
        """Adds a rank that has been serving for a long time."""
        member = Membership(assignment.cell, assignment.generation, assignment.rank)
        now_s = self.context.queue.now_s
        engine = Engine(assignment, member, self.context.next_serial(), now_s, on_end, on_change, loaded=True)
        engine.ready_since_s = now_s
        self.groups[member.cell, member.generation][member.rank] = engine
        return engine

    def end(self, engine: Engine, reason: str, *, by_order: bool = False) -> None:
        """A rank's process exits; the other ranks detect it."""
        if engine.ended:
            return
        engine.ended = True
        member = engine.membership
        group = self.groups[member.cell, member.generation]
        if group.get(member.rank) is engine:
            del group[member.rank]
        if not group:
            del self.groups[member.cell, member.generation]
        if not by_order:
            engine.on_end(engine, reason)
        for other in list(group.values()):
            self.context.queue.after(PEER_SEEN_S, partial(self._peer_lost, other, engine))

    def is_serving(self, cell: str, generation: int) -> bool:
        """Whether the whole cell would answer a request that is routed to it."""
        group = self.groups.get((cell, generation), {})
        leader = group.get(0)
        return leader is not None and leader.ready_since_s is not None and not leader.hung and not leader.lost_peer

    def unhealthy_for_s(self, cell: str, generation: int) -> float:
        """Returns since when a running leader would not answer; 0 if it would, or if its end is known."""
        leader = self.groups.get((cell, generation), {}).get(0)
        if leader is None or leader.unhealthy_since_s is None:
            return 0.0
        return self.context.queue.now_s - leader.unhealthy_since_s

    def hang(self, engine: Engine) -> None:
        """The engine keeps running and answers nothing."""
        engine.hung, engine.unhealthy_since_s = True, self.context.queue.now_s

    def unhang(self, engine: Engine) -> None:
        engine.hung, engine.unhealthy_since_s = False, None

    def _loaded(self, engine: Engine) -> None:
        if engine.ended:
            return
        engine.loaded = True
        member = engine.membership
        group = self.groups[member.cell, member.generation]
        if len(group) < len(engine.assignment.peers) or not all(rank.loaded for rank in group.values()):
            engine.on_change()
            return
        for rank in list(group.values()):
            rank.ready_since_s = self.context.queue.now_s
            rank.on_change()
        behaviour = self.context.behaviour(engine.assignment.plan.served_model)
        if behaviour.fails_after_s is not None and 0 in group:
            leader = group[0]
            self.context.queue.after(
                behaviour.fails_after_s, lambda: self.end(leader, "exit code 139: segmentation fault")
            )

    def _peer_lost(self, engine: Engine, gone: Engine) -> None:
        if engine.ended:
            return
        engine.unhealthy_since_s = self.context.queue.now_s
        engine.lost_peer = f"rank {gone.membership.rank} is gone"
        if engine.blind and engine.is_leader:
            return
        engine.on_change()
        if engine.is_leader or gone.is_leader:
            self.context.queue.after(PEER_ENDS_S, lambda: self.end(engine, f"exit code 70: {engine.lost_peer}"))
