"""The kinds of faults, and their schedule. Pure: a seed gives the same schedule everywhere.

`MATRIX` is the table of all kinds. A new kind is a row there; a new harm also needs code in `faults`."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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
    POWER_LOSS = "power loss"
    """Silence, and all of its processes are gone."""
    RELOAD = "reload"
    DRAIN = "drain"
    NOTICE = "spot notice"
    """It is replaced as after a notice, and loses power when the notice ends."""
    ROLLOUT = "rollout"
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
    RELAY = "relay"
    HOST = "host of a cell"
    """All processes of a node. Paused, it is as silent as one whose network is cut."""
    INGRESS_HOST = "host of an ingress"
    CELL = "cell"
    DEPLOYMENT = "deployment"
    BACKEND = "postgres backend"
    """One backend is paused, then PostgreSQL is killed: the backend must not prevent its restart."""
    EVERY_INGRESS = "every haproxy"
    REGION = "region"
    """All processes of its nodes and its ingress."""
    DISK = "disk"
    """The disk of the whole fleet, if its folder is a separate filesystem."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One kind of fault. An instant fault has `lasts_s` 0.

    `state` is the state file of the fault, relative to the target's folder. `trail`: kinds of events or incidents, one
    of which must name the target afterwards; empty if none is required."""

    target: Target
    harm: Harm
    lasts_s: float = 0.0
    state: str = ""
    trail: tuple[str, ...] = ()

    def __str__(self) -> str:
        of = f" ({self.state})" if self.state else ""
        return f"{self.target}: {self.harm}{of}" + (f" for {self.lasts_s:g} s" if self.lasts_s else "")


PAUSES_S = (5.0, 30.0)
CANNOT_WRITE_S = 10.0
DISK_FULL_S = 60.0
FLOOD_S = 20.0
SILENT_S = 20.0
"""A host that is cut off for less than the 30 s after which it counts as lost."""
NOTICE_S = 30.0
"""From a spot notice to the end of its machine. Clouds give two minutes."""
HANGS_AFTER_S = 10.0
"""`silent_after_s` of `engine_agent.ingress.settings.Times`."""
STARTED_AGAIN_AFTER_S = 5.0
"""How long the host's supervisor takes to start a launcher that was killed."""

PROCESSES = (
    Target.WEB,
    Target.CONTROLLER,
    Target.WORKER,
    Target.JOBS,
    Target.POSTGRES,
    Target.VALKEY,
    Target.LAUNCHER,
    Target.NODE_AGENT,
    Target.LEADER,
    Target.FOLLOWER,
    Target.CELL_PROXY,
    Target.INGRESS_AGENT,
    Target.HAPROXY,
    Target.HAPROXY_WORKER,
    Target.BODY_PARSER,
    Target.RELAY,
)
"""Each is killed, paused and kept from writing."""
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
    for target in PROCESSES:
        again_s = STARTED_AGAIN_AFTER_S if target is Target.LAUNCHER else 0.0
        yield Fault(target, Harm.KILL, again_s, trail=_TRAILS.get((target, Harm.KILL), ()))
        for pause_s in PAUSES_S:
            is_seen = pause_s >= _SILENCE
            trail = {Target.NODE_AGENT: ("node.suspect",), Target.LEADER: ("cell.failed", "cell.lost")}.get(target, ())
            yield Fault(target, Harm.PAUSE, pause_s, trail=trail if is_seen else ())
        yield Fault(target, Harm.CANNOT_WRITE, CANNOT_WRITE_S)
        for state in STATE.get(target, ()):
            yield Fault(target, Harm.TORN_STATE, again_s, state)
            yield Fault(target, Harm.NO_STATE, again_s, state)


MATRIX: tuple[Fault, ...] = (
    *_of_processes(),
    Fault(Target.HOST, Harm.KILL, trail=("node.lost",)),
    Fault(Target.HOST, Harm.TWICE, trail=("node.lost",)),
    Fault(Target.HOST, Harm.POWER_LOSS, SILENT_S, trail=("node.lost",)),
    Fault(Target.HOST, Harm.PAUSE, SILENT_S, trail=("node.suspect",)),
    Fault(Target.HOST, Harm.NOTICE, NOTICE_S),
    Fault(Target.INGRESS_HOST, Harm.KILL),
    Fault(Target.INGRESS_HOST, Harm.POWER_LOSS, SILENT_S),
    Fault(Target.INGRESS_HOST, Harm.PAUSE, SILENT_S),
    Fault(Target.HAPROXY, Harm.RELOAD),
    Fault(Target.CELL, Harm.DRAIN),
    Fault(Target.DEPLOYMENT, Harm.ROLLOUT),
    Fault(Target.BACKEND, Harm.PAUSE, 5.0),
    Fault(Target.DISK, Harm.FULL, DISK_FULL_S),
    Fault(
        Target.EVERY_INGRESS,
        Harm.KILL,
    ),
    Fault(Target.REGION, Harm.KILL, trail=("node.lost",)),
    Fault(Target.HAPROXY, Harm.SLOWLORIS, FLOOD_S),
    Fault(Target.HAPROXY, Harm.IDLE, FLOOD_S),
    Fault(Target.WEB, Harm.UNKNOWN_CREDENTIALS, FLOOD_S),
    Fault(Target.WEB, Harm.HERD, FLOOD_S),
)


def kinds(longest_pause_s: float = max(PAUSES_S), named: str = "", without: str = "") -> list[Fault]:
    """Returns the kinds with pauses up to `longest_pause_s` and `named`, but not `without`, in their name."""
    short = [kind for kind in MATRIX if kind.harm is not Harm.PAUSE or kind.lasts_s <= longest_pause_s]
    return [kind for kind in short if named in str(kind) and not (without and without in str(kind))]


def schedule(seed: int, of: Sequence[Fault] = MATRIX) -> Iterator[Fault]:
    """Yields faults without end: all kinds in a random order before one repeats."""
    chance = random.Random(seed)
    while of:
        yield from chance.sample(of, len(of))


@dataclass(frozen=True, slots=True)
class Exemption:
    """Faults that may break the connection of a stream, where and why: its client sends it again and continues. No
    fault may make a request fail, or a stream end early. Shorter ones than `at_least_s` may not break any."""

    why: str
    where: str
    kinds: frozenset[tuple[Target, Harm]]
    at_least_s: float = 0.0

    def covers(self, fault: Fault) -> bool:
        return (fault.target, fault.harm) in self.kinds and fault.lasts_s >= self.at_least_s


_ENDS_HAPROXY = {
    *((Target.HAPROXY, harm) for harm in (Harm.KILL, Harm.TORN_STATE, Harm.NO_STATE)),
    (Target.HAPROXY_WORKER, Harm.KILL),
    *((target, harm) for target in (Target.INGRESS_HOST,) for harm in (Harm.KILL, Harm.POWER_LOSS)),
    (Target.EVERY_INGRESS, Harm.KILL),
    (Target.REGION, Harm.KILL),
}
EXEMPTIONS = (
    Exemption(
        "the client's connection ends at the HAProxy that dies",
        "streams that pass this ingress",
        frozenset(_ENDS_HAPROXY),
    ),
    Exemption(
        f"its agent kills a HAProxy that has not answered for {HANGS_AFTER_S:g} s",
        "streams that pass this ingress",
        frozenset({(Target.HAPROXY_WORKER, Harm.PAUSE)}),
        at_least_s=HANGS_AFTER_S,
    ),
    Exemption(
        "only the relay that dies knows which part of the answer its client has",
        "streams that pass this relay",
        frozenset({(Target.RELAY, Harm.KILL)}),
    ),
    Exemption(
        f"its agent kills a relay that has not answered for {HANGS_AFTER_S:g} s",
        "streams that pass this relay",
        frozenset({(Target.RELAY, Harm.PAUSE)}),
        at_least_s=HANGS_AFTER_S,
    ),
)
"""The only broken connections that a campaign accepts."""


def exemption(fault: Fault) -> Exemption | None:
    return next((each for each in EXEMPTIONS if each.covers(fault)), None)
