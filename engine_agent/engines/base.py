"""What an engine is to the agent: a command line, its environment, and a URL that says whether it is up.

Adapters turn an assignment into these as pure functions: they touch no process, file or socket, and know nothing of
how the agent supervises what they describe.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from engine_agent.protocol.messages import Assignment
from engine_agent.protocol.ports import ENGINE, ENGINE_ADMIN, rendezvous_port
from engine_agent.protocol.states import MemberRole

LOOPBACK = "127.0.0.1"
NODE_ID_VARIABLE = "SWITCHYARD_NODE_ID"
CELL_SECRET_VARIABLE = "SWITCHYARD_CELL_SECRET"  # noqa: S105  (the name of a variable)
CELL_CERTIFICATE_VARIABLE = "SWITCHYARD_CELL_CERTIFICATE"
"""Of a leader: certificate and key, PEM, that it serves its followers with."""


class EngineUnavailable(Exception):
    """This node cannot run the engine that the assignment asks for; the text says why and what would help."""


@dataclass(frozen=True)
class EngineContext:
    """What only the node knows.

    `host` is the address that its cell proxy and leader listen on, `port_base` the first of its ports, `repo_root` the
    folder that holds the package `engine_agent`, `engine_pythons` the interpreter of each installed engine environment
    by engine.
    """

    node_id: str
    home: Path
    host: str
    port_base: int
    repo_root: Path
    engine_pythons: Mapping[str, Path]
    cache: Path
    """Of what comes from S3, for all nodes of the machine."""


@dataclass(frozen=True)
class Launch:
    """How to start an engine process; `env` is what to add to the agent's own environment.

    `reads` and `writes` are folders beside its installation, `programs` what the first program becomes.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str]
    reads: tuple[Path, ...] = ()
    writes: tuple[Path, ...] = ()
    programs: tuple[Path, ...] = ()


class EngineAdapter(Protocol):
    """One engine, as the agent sees it."""

    @property
    def name(self) -> str:
        """The value of `EnginePlan.engine` that means this engine."""

    def launch(self, assignment: Assignment, context: EngineContext) -> Launch:
        """Say how to start this rank's engine process.

        Raises:
            EngineUnavailable: this node cannot run it.
        """

    def health_url(self, assignment: Assignment, context: EngineContext) -> str:
        """URL that answers 200 while this rank's engine can do its work, and anything else while it cannot.

        Raises:
            EngineUnavailable: this node cannot run it.
        """


@runtime_checkable
class MeasuresSteps(Protocol):
    """What an engine's adapter has besides, if its ranks can say what each of them computed."""

    def steps_url(self, assignment: Assignment, context: EngineContext) -> str:
        """URL that answers with this rank's `StepTimes` as JSON, or not with 200 while it has none."""


def member_args(assignment: Assignment, context: EngineContext) -> tuple[str, ...]:
    """Which member of the cell this rank is, on which ports it listens, and whom it meets: options that every engine
    takes. What an engine serves, it serves on loopback, to the cell proxy beside it."""
    return (
        *("--node-id", context.node_id),
        *("--cell", assignment.cell),
        *("--generation", str(assignment.generation)),
        *("--rank", str(assignment.rank)),
        *("--role", assignment.role.value),
        *("--port", str(context.port_base + ENGINE)),
        *("--admin-port", str(context.port_base + ENGINE_ADMIN)),
        *("--leader", leader_endpoint(assignment, context)),
        *("--followers", str(follower_count(assignment))),
    )


def member_environment(assignment: Assignment, context: EngineContext) -> dict[str, str]:
    """The variables of the plan and of the member; the member's win."""
    return {
        **assignment.plan.env,
        "PYTHONPATH": str(context.repo_root),
        NODE_ID_VARIABLE: context.node_id,
        CELL_SECRET_VARIABLE: assignment.secret,
    }


def member_health_url(assignment: Assignment, context: EngineContext) -> str:
    """`/health` of the leader's API; a follower has no API and answers on its administration port."""
    return f"http://{LOOPBACK}:{member_health_port(assignment, context)}/health"


def member_health_port(assignment: Assignment, context: EngineContext) -> int:
    """The port on loopback where a member is asked for its health."""
    return context.port_base + (ENGINE if assignment.role is MemberRole.LEADER else ENGINE_ADMIN)


def follower_count(assignment: Assignment) -> int:
    """Number of ranks in the cell besides the leader."""
    ranks = {peer.rank for peer in assignment.peers} | {assignment.rank}
    return len(ranks - {0})


def leader_endpoint(assignment: Assignment, context: EngineContext) -> str:
    """`host:port` where the followers of this generation meet their leader.

    Raises:
        EngineUnavailable: the assignment names no leader.
    """
    if assignment.role is MemberRole.LEADER:
        return f"{context.host}:{rendezvous_port(context.port_base, assignment.generation)}"
    for peer in assignment.peers:
        if peer.rank == 0:
            return f"{peer.address}:{rendezvous_port(peer.port_base, assignment.generation)}"
    raise EngineUnavailable(f"cell {assignment.cell} names no peer of rank 0, so rank {assignment.rank} has no leader")
