"""The kinds of faults, and their schedule. Pure: a seed gives the same schedule everywhere.

`MATRIX` is the table of all kinds. A new kind is a row there; a new harm also needs code in `faults`."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum


class Harm(StrEnum):
    KILL = "kill -9"
    PAUSE = "pause"
    """SIGSTOP, and SIGCONT after some seconds."""
    CANNOT_WRITE = "cannot write"
    """Every write of the process to a file fails with EFBIG for some seconds."""
    FULL = "full"
    """The filesystem has no free space for some seconds."""
    TORN_STATE = "torn state"
    """Its state file is cut in half, then it is killed."""
    NO_STATE = "no state"
    """Its state file is removed, then it is killed."""
    TWICE = "killed, and its replacement"
    SLOWLORIS = "slow clients"
    """Connections that send a byte of a request each second."""
    IDLE = "idle clients"
    """Connections that send nothing."""
    UNKNOWN_CREDENTIALS = "unknown credentials"
    """Connections to `/agents/ws` with credentials that were never issued."""
    HERD = "killed, and all agents reconnect together"


class Target(StrEnum):
    """Which process, or which group of them. One is drawn when the fault happens."""

    WEB = "web"
    CONTROLLER = "controller"
    WORKER = "worker"
    JOBS = "jobs"
    POSTGRES = "postgres"
    VALKEY = "valkey"
    LAUNCHER = "launcher"
    """Its exit stops the control plane; it is restarted as a host's supervisor would."""
    NODE_AGENT = "node agent"
    LEADER = "engine of a leader"
    FOLLOWER = "engine of a follower"
    CELL_PROXY = "cell proxy"
    INGRESS_AGENT = "ingress agent"
    HAPROXY = "haproxy"
    HAPROXY_WORKER = "haproxy's worker"
    BODY_PARSER = "body parser"
    NODE = "node"
    """Agent and engine of a leader together, as when a machine fails."""
    BACKEND = "postgres backend"
    """One backend is paused, then PostgreSQL is killed: the backend must not prevent its restart."""
    EVERY_INGRESS = "every haproxy"
    REGION = "region"
    """All processes of its nodes and its ingress."""
    DISK = "disk"
    """The disk of the whole fleet, if its folder is a separate filesystem."""


class Scope(StrEnum):
    """Requests that may fail during a fault."""

    NONE = "none"
    CELL = "cell"
    """Of the cell, until the fleet is whole again."""
    INGRESS = "ingress"
    """Sent to the region, until its HAProxy is back."""
    REGION = "region"
    """Both: of its cells and sent to it."""
    ALL = "all"
    """All, until every HAProxy is back."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One kind of fault, or with `at_s` (seconds after the start) a scheduled one. An instant fault has `lasts_s` 0.

    `state` is the state file of the fault, relative to the target's folder. `trail`: kinds of events or incidents, one
    of which must name the target afterwards; empty if none is required."""

    target: Target
    harm: Harm
    lasts_s: float = 0.0
    excuses: Scope = Scope.NONE
    state: str = ""
    trail: tuple[str, ...] = ()
    at_s: float = 0.0

    def __str__(self) -> str:
        of = f" ({self.state})" if self.state else ""
        return f"{self.target}: {self.harm}{of}" + (f" for {self.lasts_s:g} s" if self.lasts_s else "")


PAUSES_S = (5.0, 15.0, 60.0)
CANNOT_WRITE_S = 10.0
DISK_FULL_S = 60.0
FLOOD_S = 20.0
STARTED_AGAIN_AFTER_S = 5.0
"""How long the host's supervisor takes to start a launcher that was killed."""

PROCESSES = {
    Target.WEB: Scope.NONE,
    Target.CONTROLLER: Scope.NONE,
    Target.WORKER: Scope.NONE,
    Target.JOBS: Scope.NONE,
    Target.POSTGRES: Scope.NONE,
    Target.VALKEY: Scope.NONE,
    Target.LAUNCHER: Scope.NONE,
    Target.NODE_AGENT: Scope.NONE,
    Target.LEADER: Scope.CELL,
    Target.FOLLOWER: Scope.CELL,
    Target.CELL_PROXY: Scope.CELL,
    Target.INGRESS_AGENT: Scope.NONE,
    Target.HAPROXY: Scope.INGRESS,
    Target.HAPROXY_WORKER: Scope.INGRESS,
    Target.BODY_PARSER: Scope.NONE,
}
"""Requests that may fail when a process is killed or stopped: none for processes outside the request path."""
STATE = {
    Target.NODE_AGENT: ("journal.json",),
    Target.INGRESS_AGENT: ("journal.json",),
    Target.HAPROXY: ("haproxy.cfg",),
    Target.LAUNCHER: ("up.json",),
}
CONTROLS = frozenset({Target.CONTROLLER, Target.POSTGRES, Target.BACKEND, Target.LAUNCHER, Target.DISK})
"""Without them there are no passes."""
SERVICES = frozenset({Target.WEB, Target.CONTROLLER, Target.WORKER, Target.JOBS, Target.POSTGRES, Target.VALKEY})
"""Of the launcher, which starts them again."""
_TRAILS = {
    (Target.NODE_AGENT, Harm.KILL): ("node.agent_restarted",),
    (Target.LEADER, Harm.KILL): ("cell.failed", "cell.lost"),
    (Target.FOLLOWER, Harm.KILL): ("cell.failed", "cell.lost"),
}
_SILENCE = 15.0
"""A pause this long, or longer, is one that others must have seen."""


def _of_processes() -> Iterator[Fault]:
    for target, scope in PROCESSES.items():
        again_s = STARTED_AGAIN_AFTER_S if target is Target.LAUNCHER else 0.0
        yield Fault(target, Harm.KILL, again_s, scope, trail=_TRAILS.get((target, Harm.KILL), ()))
        for pause_s in PAUSES_S:
            is_seen = pause_s >= _SILENCE
            trail = {Target.NODE_AGENT: ("node.suspect",), Target.LEADER: ("cell.failed", "cell.lost")}.get(target, ())
            yield Fault(target, Harm.PAUSE, pause_s, scope, trail=trail if is_seen else ())
        yield Fault(target, Harm.CANNOT_WRITE, CANNOT_WRITE_S)
        for state in STATE.get(target, ()):
            yield Fault(target, Harm.TORN_STATE, again_s, scope, state)
            yield Fault(target, Harm.NO_STATE, again_s, scope, state)


MATRIX: tuple[Fault, ...] = (
    *_of_processes(),
    Fault(Target.NODE, Harm.KILL, excuses=Scope.CELL, trail=("node.lost",)),
    Fault(Target.NODE, Harm.TWICE, excuses=Scope.CELL, trail=("node.lost",)),
    Fault(Target.BACKEND, Harm.PAUSE, 5.0),
    Fault(Target.DISK, Harm.FULL, DISK_FULL_S),
    Fault(Target.EVERY_INGRESS, Harm.KILL, excuses=Scope.ALL),
    Fault(Target.REGION, Harm.KILL, excuses=Scope.REGION, trail=("node.lost",)),
    Fault(Target.HAPROXY, Harm.SLOWLORIS, FLOOD_S),
    Fault(Target.HAPROXY, Harm.IDLE, FLOOD_S),
    Fault(Target.WEB, Harm.UNKNOWN_CREDENTIALS, FLOOD_S),
    Fault(Target.WEB, Harm.HERD, FLOOD_S),
)


def kinds(longest_pause_s: float = max(PAUSES_S), named: str = "", without: str = "") -> list[Fault]:
    """Returns the kinds with pauses up to `longest_pause_s` and `named`, but not `without`, in their name."""
    short = [kind for kind in MATRIX if kind.harm is not Harm.PAUSE or kind.lasts_s <= longest_pause_s]
    return [kind for kind in short if named in str(kind) and not (without and without in str(kind))]


def schedule(seed: int, seconds: float, every_s: float, of: Sequence[Fault] = MATRIX) -> tuple[Fault, ...]:
    """Returns a fault every `every_s` for `seconds`: all kinds in a random order before one repeats."""
    chance, order, faults = random.Random(seed), list[Fault](), list[Fault]()
    at_s = every_s / 2
    while at_s < seconds:
        if not order:
            order = list(of)
            chance.shuffle(order)
        faults.append(replace(order.pop(), at_s=at_s))
        at_s += every_s
    return tuple(faults)
