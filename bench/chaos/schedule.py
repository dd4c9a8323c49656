"""Which fault happens when, and which failed requests it excuses. Pure: a seed gives the same story everywhere."""

import itertools
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol


class Harm(StrEnum):
    """What is done to a process."""

    KILL = "kill -9"
    PAUSE = "pause"
    """SIGSTOP, and SIGCONT after some seconds."""
    CANNOT_WRITE = "cannot write"
    """Every write to a file fails with EFBIG for some seconds, as on a full disk."""
    TORN_STATE = "torn state"
    """Its state file is cut in half, then it is killed."""
    NO_STATE = "no state"
    """Its state file is removed, then it is killed."""


class Target(StrEnum):
    """Which process. Of a node or an ingress, one is drawn when the fault happens."""

    WEB = "web"
    CONTROLLER = "controller"
    WORKER = "worker"
    BEAT = "beat"
    SENDER = "sender"
    POSTGRES = "postgres"
    VALKEY = "valkey"
    NODE_AGENT = "node agent"
    ENGINE = "engine"
    NODE = "node"
    """Agent and engine at once, as when a machine goes."""
    CELL_PROXY = "cell proxy"
    INGRESS_AGENT = "ingress agent"
    HAPROXY = "haproxy"


SERVICES = (Target.WEB, Target.CONTROLLER, Target.WORKER, Target.BEAT, Target.SENDER, Target.VALKEY, Target.POSTGRES)
"""Of the launcher, which starts them again."""
AGENTS = (Target.NODE_AGENT, Target.INGRESS_AGENT)
"""They keep a state file of their own, `journal.json`."""
OF_CELLS = (Target.ENGINE, Target.NODE, Target.CELL_PROXY)
"""Harm to them ends streams of their cell."""
PAUSES_S = (5.0, 15.0, 60.0)
CANNOT_WRITE_S = 10.0


@dataclass(frozen=True, slots=True)
class Fault:
    """`at_s` after the begin. `lasts_s` 0: it is over at once."""

    at_s: float
    target: Target
    harm: Harm
    lasts_s: float = 0.0

    def __str__(self) -> str:
        return f"{self.target}: {self.harm}" + (f" for {self.lasts_s:g} s" if self.lasts_s else "")


def every_kind(longest_pause_s: float = max(PAUSES_S)) -> list[Fault]:
    """Each kind of fault once, at no moment yet."""
    kinds = [Fault(0, target, Harm.KILL) for target in Target]
    kinds += [
        Fault(0, target, Harm.PAUSE, pause)
        for target, pause in itertools.product(Target, PAUSES_S)
        if pause <= longest_pause_s and target is not Target.NODE
    ]
    kinds += [Fault(0, target, Harm.CANNOT_WRITE, CANNOT_WRITE_S) for target in AGENTS]
    kinds += [Fault(0, target, harm) for target in AGENTS for harm in (Harm.TORN_STATE, Harm.NO_STATE)]
    return kinds


def schedule(seed: int, seconds: float, every_s: float, kinds: Sequence[Fault] | None = None) -> tuple[Fault, ...]:
    """A fault every `every_s` until `seconds` are over: all kinds in a random order before one comes again."""
    chance, order, faults = random.Random(seed), list[Fault](), list[Fault]()
    at_s = every_s / 2
    while at_s < seconds:
        if not order:
            order = list(kinds or every_kind())
            chance.shuffle(order)
        kind = order.pop()
        faults.append(Fault(at_s, kind.target, kind.harm, kind.lasts_s))
        at_s += every_s
    return tuple(faults)


@dataclass(frozen=True, slots=True)
class Window:
    """A promise that does not hold from `begins` to `ends`: streams of `cells` may end, of all if it is empty.

    Times are those of the load's clock, in seconds.
    """

    begins: float
    ends: float
    cells: frozenset[str]
    why: str


class Request(Protocol):
    """What the load remembers of a request; `cell` is empty if none answered."""

    began: float
    ended: float
    cell: str
    error: str


def excused_by(request: Request, windows: Iterable[Window]) -> Window | None:
    """The window in which this request may have failed: it was under way in it, on a cell of it."""
    for window in windows:
        overlaps = request.began <= window.ends and request.ended >= window.begins
        if overlaps and (not window.cells or request.cell in window.cells):
            return window
    return None


def unexcused(requests: Iterable[Request], windows: Sequence[Window]) -> list[Request]:
    """Requests that failed where nothing had been done to what served them."""
    return [request for request in requests if request.error and excused_by(request, windows) is None]
