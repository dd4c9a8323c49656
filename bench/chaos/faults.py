"""Does to the processes of a fleet what a schedule says, and takes it back."""

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import time
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random

import psutil

from bench.chaos import hostile_clients
from bench.chaos.schedule import SERVICES, Fault, Harm, Target
from fleet.clouds.local_processes import processes_by_node

Processes = list[psutil.Process]
INGRESS_PREFIX = "i-"
_COMMANDS: Mapping[Target, tuple[str, ...]] = {
    Target.NODE_AGENT: ("engine_agent", "node"),
    Target.INGRESS_AGENT: ("engine_agent", "ingress"),
    Target.CELL_PROXY: ("engine_agent.cell_proxy",),
    Target.RELAY: ("engine_agent.relay",),
}
"""Consecutive words in the command line of each kind of process."""
_PARSER = "body-parser"
"""In the path of the configuration of an HAProxy that only parses bodies."""
TAKEN_WITHIN_S = 60.0
_POLL_S = 0.5
_WORKERS = (Target.HAPROXY_WORKER, f"{Target.BODY_PARSER}'s worker")
ENDED = "ended"
_SERVED_BY_INGRESS = (Target.HAPROXY, Target.HAPROXY_WORKER, Target.EVERY_INGRESS)


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The fleet under faults. `sessions`: pid by service, including the launcher. `roles`: role by node, for nodes in
    cells of the deployment under load; `cells`: its ready cells. `region_of`: by node and ingress. `ingress_urls`: by
    ingress. `agents_url`: of web, for agents."""

    home: Path
    sessions: Mapping[str, int]
    roles: Mapping[str, str]
    cells: Collection[str]
    region_of: Mapping[str, str]
    ingress_urls: Mapping[str, str]
    web_url: str
    agents_url: str
    hostile_share: float
    taken_over_by: Callable[[str], str]
    """Returns the node that replaced this one, or ""."""
    order: Callable[[str], None]
    """Posts to a path of the API, with a reason."""
    roll_out: Callable[[], None]
    """Starts a rollout of the other version of the deployment."""


@dataclass(frozen=True, slots=True)
class Done:
    """An injected fault: its node, ingress, region or service, and the function that ends it."""

    fault: Fault
    subject: str
    undo: Callable[[], None]


def do(fault: Fault, around: Surroundings, chance: Random) -> Done | None:
    """Inject a fault into a random target of its kind. Returns None if there is no such target."""
    candidates = targets(fault.target, around)
    if not candidates:
        return None
    subject = chance.choice(sorted(candidates))
    return Done(fault, subject, _inject_fault(fault, subject, candidates[subject], around))


def targets(target: Target, around: Surroundings) -> dict[str, Processes]:
    """Returns processes of this kind by service, or by id of the node, ingress or region."""
    without_nodes: dict[Target, Callable[[], dict[str, Processes]]] = {
        Target.LAUNCHER: lambda: _alive(target, around.sessions, children=False),
        Target.BACKEND: lambda: _alive(Target.POSTGRES, around.sessions),
        Target.CELL: lambda: {cell: [] for cell in around.cells},
        Target.DEPLOYMENT: lambda: {str(target): []},
        Target.DISK: lambda: {str(target): []} if around.home.is_mount() else {},
        **dict.fromkeys(SERVICES, lambda: _alive(target, around.sessions)),
    }
    if target in without_nodes:
        return without_nodes[target]()
    by_node = processes_by_node(around.home)
    if target is Target.REGION:
        return _by_region(by_node, around)
    if target is Target.HOST:
        return {node: processes for node, processes in by_node.items() if node in around.roles}
    if target is Target.INGRESS_HOST:
        return {node: processes for node, processes in by_node.items() if node.startswith(INGRESS_PREFIX)}
    found = {node: [each for each in processes if _is(target, each, around.roles.get(node, ""))]
             for node, processes in by_node.items()}  # fmt: skip
    found = {node: processes for node, processes in found.items() if processes}
    if target is Target.EVERY_INGRESS:
        return {"every ingress": [each for processes in found.values() for each in processes]} if found else {}
    in_cells = {node: processes for node, processes in found.items() if node in around.roles}
    return found if any(node.startswith(INGRESS_PREFIX) for node in found) else in_cells


def census(home: Path, sessions: Mapping[str, int]) -> Counter[str]:
    """Counts processes by kind. A service counts once, and so do the workers of one HAProxy, because those from before
    a reload live as long as their connections."""
    counts = Counter({name: 1 for name in sessions if _alive(name, sessions)})
    seen = {_counted(process) for processes in processes_by_node(home).values() for process in processes}
    return counts + Counter(kind for kind, _ in seen if kind != ENDED)


def _counted(process: psutil.Process) -> tuple[str, int]:
    """Returns the kind of a process, and a number that counts once."""
    with contextlib.suppress(psutil.Error):
        kind = _kind(process)
        if kind == Target.RELAY:  # one that was replaced finishes its streams next to the new one
            return kind, zlib.crc32(" ".join(process.cmdline()).encode())
        return kind, process.ppid() if kind in _WORKERS else process.pid
    return ENDED, process.pid


def _alive(name: str, sessions: Mapping[str, int], *, children: bool = True) -> dict[str, Processes]:
    with contextlib.suppress(psutil.NoSuchProcess, KeyError):
        process = psutil.Process(sessions[str(name)])
        return {str(name): [process, *(process.children(recursive=True) if children else ())]}
    return {}


def _by_region(by_node: Mapping[str, Processes], around: Surroundings) -> dict[str, Processes]:
    regions: dict[str, Processes] = {}
    for node, processes in by_node.items():
        if region := around.region_of.get(node):
            regions.setdefault(region, []).extend(processes)
    return regions


def _kind(process: psutil.Process) -> str:
    """Returns the kind of a process, or `ENDED` if it has exited."""
    try:
        command, leads = process.cmdline(), os.getsid(process.pid) == process.pid
    except (psutil.Error, ProcessLookupError):
        return ENDED
    if kind := next((kind for kind, words in _COMMANDS.items() if _follows(words, command)), None):
        return kind
    if not command or not Path(command[0]).name.startswith("haproxy"):
        return "engine"
    if any(_PARSER in word for word in command):
        return Target.BODY_PARSER if leads else f"{Target.BODY_PARSER}'s worker"
    return Target.HAPROXY if leads else Target.HAPROXY_WORKER


def _is(target: Target, process: psutil.Process, role: str) -> bool:
    kind = _kind(process)
    if kind == "engine":
        return target is {"leader": Target.LEADER, "follower": Target.FOLLOWER}.get(role)
    return kind == target or (target is Target.EVERY_INGRESS and kind in _SERVED_BY_INGRESS)


def _follows(words: tuple[str, ...], command: list[str]) -> bool:
    return any(tuple(command[at : at + len(words)]) == words for at in range(len(command)))


def _nothing() -> None: ...


def _inject_fault(fault: Fault, subject: str, processes: Processes, around: Surroundings) -> Callable[[], None]:
    if fault.harm in _ORDERED:
        return _order(fault, subject, processes, around)
    if fault.harm in _SILENT:
        return _silence(fault, processes)
    match fault.harm:
        case Harm.CANNOT_WRITE:
            _limit_writes(processes, 0)
            # Processes that started in the meantime have inherited the limit.
            return lambda: _limit_writes([*processes, *_descendants(processes)], resource.RLIM_INFINITY)
        case Harm.FULL:
            return _fill(around.home)
        case Harm.TORN_STATE | Harm.NO_STATE:
            _harm_state(_folder(subject, around.home) / fault.state, torn=fault.harm is Harm.TORN_STATE)
        case Harm.SLOWLORIS | Harm.IDLE | Harm.UNKNOWN_CREDENTIALS:
            url = around.agents_url if fault.harm is Harm.UNKNOWN_CREDENTIALS else _url(subject, around)
            return hostile_clients.start(fault.harm, url, around.hostile_share, fault.lasts_s)
    again = _starter(processes[0]) if fault.target is Target.LAUNCHER else _nothing
    _signal(processes, signal.SIGKILL)
    if fault.harm is Harm.HERD:
        return hostile_clients.start(fault.harm, around.agents_url, around.hostile_share, fault.lasts_s)
    return (lambda: _kill_replacement(subject, around)) if fault.harm is Harm.TWICE else again


_SILENT = frozenset({Harm.PAUSE, Harm.POWER_LOSS})


def _silence(fault: Fault, processes: Processes) -> Callable[[], None]:
    if fault.target is Target.BACKEND:
        return _orphan(processes)
    _signal(processes, signal.SIGSTOP)
    if fault.harm is Harm.PAUSE:
        return lambda: _signal(processes, signal.SIGCONT)
    return lambda: _signal([*processes, *_descendants(processes)], signal.SIGKILL)


_ORDERED = frozenset({Harm.RELOAD, Harm.DRAIN, Harm.NOTICE, Harm.ROLLOUT})


def _order(fault: Fault, subject: str, processes: Processes, around: Surroundings) -> Callable[[], None]:
    """What an operator or a cloud orders, and what follows from it."""
    match fault.harm:
        case Harm.RELOAD:
            _signal(processes, signal.SIGUSR2)
        case Harm.DRAIN:
            around.order(f"cells/{subject}/drain")
        case Harm.ROLLOUT:
            around.roll_out()
        case Harm.NOTICE:
            around.order(f"nodes/{subject}/replace")
            return lambda: _signal(processes, signal.SIGKILL)
    return _nothing


def _url(subject: str, around: Surroundings) -> str:
    return around.ingress_urls.get(subject, around.web_url)


def _orphan(processes: Processes) -> Callable[[], None]:
    """Stop one backend and kill its server: the backend keeps the server's shared memory."""
    server, *children = processes
    backends = [each for each in children if "[local]" in " ".join(each.cmdline())]
    hung = (backends or children)[:1]
    _signal(hung, signal.SIGSTOP)
    _signal([server], signal.SIGKILL)
    return lambda: _signal(hung, signal.SIGCONT)


def _starter(launcher: psutil.Process) -> Callable[[], None]:
    """Returns a function that restarts the launcher, detached, as a host's supervisor would."""
    command, environment, folder = launcher.cmdline(), launcher.environ(), launcher.cwd()

    def start() -> None:
        subprocess.Popen(
            command, env=environment, cwd=folder, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    return start


def _kill_replacement(node: str, around: Surroundings) -> None:
    deadline = time.monotonic() + TAKEN_WITHIN_S
    while time.monotonic() < deadline:
        if other := around.taken_over_by(node):
            _signal(processes_by_node(around.home).get(other, []), signal.SIGKILL)
            return
        time.sleep(_POLL_S)


def _signal(processes: Processes, number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def _descendants(processes: Processes) -> Processes:
    found: Processes = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            found += process.children(recursive=True)
    return found


def _limit_writes(processes: Processes, most_bytes: int) -> None:
    """Set the limit of file sizes. Root of a container may not change other accounts' limits, so `prlimit` runs as
    each."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            try:
                process.rlimit(psutil.RLIMIT_FSIZE, (most_bytes, resource.RLIM_INFINITY))
            except psutil.AccessDenied:
                soft = "unlimited" if most_bytes == resource.RLIM_INFINITY else most_bytes
                command = ["prlimit", f"--pid={process.pid}", f"--fsize={soft}:"]
                subprocess.run(command, check=False, user=process.uids().real, group=process.gids().real)


def _fill(filesystem: Path) -> Callable[[], None]:
    filler = filesystem / "filler"
    with filler.open("wb") as file:
        size = shutil.disk_usage(filesystem).free
        while size:
            try:
                os.posix_fallocate(file.fileno(), file.tell(), size)
                file.seek(size, os.SEEK_CUR)
            except OSError:
                size //= 2
    return filler.unlink


def _folder(subject: str, home: Path) -> Path:
    if subject in {Target.LAUNCHER, *SERVICES}:
        return home
    return home / ("ingresses" if subject.startswith(INGRESS_PREFIX) else "nodes") / subject


def _harm_state(path: Path, *, torn: bool) -> None:
    with contextlib.suppress(FileNotFoundError):
        if torn:
            whole = path.read_bytes()
            path.write_bytes(whole[: len(whole) // 2])
        else:
            path.unlink()
