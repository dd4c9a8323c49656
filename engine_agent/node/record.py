"""What a node's journal holds: the order in force and what was started for it. Values only; nothing here acts.

It is saved after every order taken and every process started, before anything that depends on it happens.
"""

from msgspec import Struct

from engine_agent.node.planning.node import Failure, Membership
from engine_agent.protocol.messages import Desired

JOURNAL_FILE = "journal.json"


class ProcessRecord(Struct, frozen=True):
    """A process that an agent of this node started. `boot` and `started_ticks` make its pid unmistakable.

    `was_ready` says, of an engine, that it was healthy once, so that a restarted agent does not hold it to the time
    limit of a start.
    """

    pid: int
    boot: str
    started_ticks: int
    cell: str
    generation: int
    rank: int
    was_ready: bool = False

    @property
    def membership(self) -> Membership:
        """Which start of which cell it belongs to."""
        return Membership(self.cell, self.generation, self.rank)


class FailureRecord(Struct, frozen=True):
    """An engine that ended by itself or was given up; kept so that a restarted agent does not start it again."""

    cell: str
    generation: int
    rank: int
    reason: str
    in_a_row: int

    @classmethod
    def of(cls, failure: Failure) -> "FailureRecord":
        """The failure without its time, which means nothing to another agent process."""
        member = failure.membership
        return cls(member.cell, member.generation, member.rank, failure.reason, failure.in_a_row)

    def failure(self, at_s: float) -> Failure:
        """The failure as if it had been seen at `at_s`."""
        return Failure(Membership(self.cell, self.generation, self.rank), self.reason, at_s, self.in_a_row)


class NodeRecord(Struct, frozen=True):
    """Everything that an agent must know to go on where an earlier one ended."""

    node: str
    desired: Desired | None = None
    engine: ProcessRecord | None = None
    proxy: ProcessRecord | None = None
    failure: FailureRecord | None = None
