"""Does to the processes of a fleet what a schedule says, and takes it back."""

import contextlib
import random
import resource
import signal
from collections import Counter
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from pathlib import Path

import psutil

from bench.chaos.schedule import OF_CELLS, SERVICES, Fault, Harm, Target
from fleet.providers.local.processes import processes_by_node

JOURNAL = "journal.json"
_COMMANDS: Mapping[Target, tuple[str, ...]] = {
    Target.NODE_AGENT: ("engine_agent", "node"),
    Target.INGRESS_AGENT: ("engine_agent", "ingress"),
    Target.CELL_PROXY: ("engine_agent.proxy",),
}
"""What stands in a process's command line, in this order and one after the other."""


@dataclass(frozen=True, slots=True)
class Done:
    """What was done: to which node or service, and how to take it back (nothing, where it was over at once)."""

    fault: Fault
    subject: str
    undo: Callable[[], None]


def do(fault: Fault, home: Path, sessions: Mapping[str, int], nodes: Set[str], chance: random.Random) -> Done | None:
    """Do it to one of the processes that it can be done to, of nodes only to `nodes`; None if there is none now."""
    candidates = processes_of(fault.target, home, sessions)
    if fault.target in (Target.NODE_AGENT, *OF_CELLS):
        candidates = {node: processes for node, processes in candidates.items() if node in nodes}
    if not candidates:
        return None
    subject = chance.choice(sorted(candidates))
    processes = candidates[subject]
    match fault.harm:
        case Harm.KILL:
            _signal(processes, signal.SIGKILL)
        case Harm.PAUSE:
            _signal(processes, signal.SIGSTOP)
            return Done(fault, subject, lambda: _signal(processes, signal.SIGCONT))
        case Harm.CANNOT_WRITE:
            _limit_writes(processes, 0)
            return Done(fault, subject, lambda: _limit_writes(processes, resource.RLIM_INFINITY))
        case Harm.TORN_STATE | Harm.NO_STATE:
            _harm_state(home, subject, torn=fault.harm is Harm.TORN_STATE)
            _signal(processes, signal.SIGKILL)
    return Done(fault, subject, lambda: None)


def processes_of(target: Target, home: Path, sessions: Mapping[str, int]) -> dict[str, list[psutil.Process]]:
    """Name of the service or id of the node -> its processes of this kind, children with their parents."""
    if target in SERVICES:
        with contextlib.suppress(psutil.NoSuchProcess, KeyError):
            process = psutil.Process(sessions[target.value])
            return {target.value: [process, *process.children(recursive=True)]}
        return {}
    by_node = {
        node: [process for process in processes if _is(target, process)]
        for node, processes in processes_by_node(home).items()
    }
    return {node: processes for node, processes in by_node.items() if processes}


def census(home: Path, sessions: Mapping[str, int]) -> Counter[Target]:
    """How many of each kind run, a service counted once."""
    kinds = [target for target in Target if target is not Target.NODE]
    return Counter({target: len(processes_of(target, home, sessions)) for target in kinds})


def _is(target: Target, process: psutil.Process) -> bool:
    try:
        command = process.cmdline()
    except psutil.Error:
        return False
    kind = next((kind for kind, words in _COMMANDS.items() if _follows(words, command)), None)
    if kind is None:
        is_haproxy = bool(command) and Path(command[0]).name.startswith("haproxy")
        kind = Target.HAPROXY if is_haproxy else Target.ENGINE
    return kind is target or (target is Target.NODE and kind in {Target.NODE_AGENT, Target.ENGINE})


def _follows(words: tuple[str, ...], command: list[str]) -> bool:
    return any(tuple(command[at : at + len(words)]) == words for at in range(len(command)))


def _signal(processes: list[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def _limit_writes(processes: list[psutil.Process], most_bytes: int) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.rlimit(psutil.RLIMIT_FSIZE, (most_bytes, resource.RLIM_INFINITY))


def _harm_state(home: Path, subject: str, *, torn: bool) -> None:
    journal = home / ("ingresses" if subject.startswith("i-") else "nodes") / subject / JOURNAL
    with contextlib.suppress(FileNotFoundError):
        if torn:
            whole = journal.read_bytes()
            journal.write_bytes(whole[: len(whole) // 2])
        else:
            journal.unlink()
