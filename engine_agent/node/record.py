"""The content of a node's journal: the order in force and its processes, and how to rebuild it from running processes.
It is saved after every accepted order and every started process, before anything that depends on it happens. Each
engine has its complete order in its environment, so that a serving engine can be adopted even if the journal is lost,
damaged or older (I11)."""

from collections.abc import Iterable
from dataclasses import replace

import msgspec
from msgspec import Struct

from engine_agent.engines.base import Launch
from engine_agent.node import procfs
from engine_agent.node.planning.node import Failure, Membership, ProcessKind, membership_of
from engine_agent.protocol.messages import Desired

JOURNAL_FILE = "journal.json"


class ProcessRecord(Struct, frozen=True):
    """A process that an agent of this node started. `boot` and `started_ticks` make its pid unique. `was_ready`: the
    engine was healthy once, so that a restarted agent does not apply the time limit of a start."""

    pid: int
    boot: str
    started_ticks: int
    cell: str
    generation: int
    rank: int
    was_ready: bool = False

    @property
    def membership(self) -> Membership:
        return Membership(self.cell, self.generation, self.rank)


class FailureRecord(Struct, frozen=True):
    """An engine that exited or was given up; stored so that a restarted agent does not start it again."""

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
        """The failure as if it had happened at `at_s`."""
        return Failure(Membership(self.cell, self.generation, self.rank), self.reason, at_s, self.in_a_row)


class NodeRecord(Struct, frozen=True):
    """Everything that an agent needs to continue the work of an earlier one."""

    node: str
    desired: Desired | None = None
    engine: ProcessRecord | None = None
    proxy: ProcessRecord | None = None
    failure: FailureRecord | None = None


ORDER_VARIABLE = "SWITCHYARD_ORDER"
ORDER_BYTES_MAX = 96 * 1024
"""Linux allows 128 KiB for one variable. A longer order is only in the journal."""


def with_order(launch: Launch, order: Desired | None) -> Launch:
    """The launch of an engine with its order in the environment."""
    encoded = msgspec.json.encode(order)
    if order is None or len(encoded) > ORDER_BYTES_MAX:
        return launch
    return replace(launch, env={**launch.env, ORDER_VARIABLE: encoded.decode()})


def newest_record(journalled: NodeRecord, node_id: str, boot: str) -> NodeRecord:
    """The journal's record, or the record of a running engine if that has a later order or the journal has no
    engine."""
    running = procfs.started_by_agents_of(node_id)
    known = -1 if journalled.desired is None else journalled.desired.version
    newest = journalled
    for process in _leaders(running):
        order = _order_of(process.pid)
        if order is None or order.node != node_id or order.assignment is None:
            continue
        is_unknown = journalled.engine is None and order.version == known
        if order.version > known or is_unknown:
            member = membership_of(order.assignment)
            engine = _record(process, boot, member)
            newest = NodeRecord(node_id, order, engine, _proxy_of(running, member, boot))
            known = order.version
    return newest


def _leaders(running: Iterable[procfs.ProcessStat]) -> list[procfs.ProcessStat]:
    """Those that agents started directly: each leads a session."""
    return [process for process in running if process.session == process.pid]


def _order_of(pid: int) -> Desired | None:
    text = procfs.environment(pid).get(ORDER_VARIABLE)
    try:
        return msgspec.json.decode(text, type=Desired) if text else None
    except msgspec.DecodeError:
        return None


def _proxy_of(running: Iterable[procfs.ProcessStat], member: Membership, boot: str) -> ProcessRecord | None:
    wanted = ("--cell", member.cell, "--generation", str(member.generation))
    for process in _leaders(running):
        is_proxy = procfs.environment(process.pid).get(procfs.PROCESS_KIND_VARIABLE) == ProcessKind.PROXY
        if is_proxy and " ".join(wanted) in " ".join(procfs.command(process.pid)):
            return _record(process, boot, member)
    return None


def _record(process: procfs.ProcessStat, boot: str, member: Membership) -> ProcessRecord:
    return ProcessRecord(process.pid, boot, process.started_ticks, member.cell, member.generation, member.rank)
