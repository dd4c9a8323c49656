"""A model of HAProxy for tests of plans: its state as a value, and the result of each step."""

from collections.abc import Iterable
from dataclasses import replace

from engine_agent.ingress.desired import DesiredHaproxy, Server
from engine_agent.ingress.plan import (
    AddServer,
    DrainServer,
    ReadyServer,
    Reload,
    RemoveServer,
    ReplaceMap,
    SetServerLimit,
    SetServerWeight,
    Step,
)
from engine_agent.ingress.running import RunningHaproxy, RunningServer


def running_of(desired: DesiredHaproxy, structure: str) -> RunningHaproxy:
    """A worker that was started with this desired state."""
    return RunningHaproxy(
        structure=structure,
        worker_pid=1,
        servers=tuple(_started(server, maintenance=server.drain) for server in desired.servers),
        backends=(),
        maps=desired.maps,
    )


def step_of(running: RunningHaproxy, step: Step, desired: DesiredHaproxy, structure: str) -> RunningHaproxy:
    servers = {(server.backend, server.name): server for server in running.servers}
    match step:
        case Reload():
            return running_of(desired, structure)
        case ReplaceMap(name, entries):
            return replace(running, maps={**running.maps, name: entries})
        case AddServer(server):
            key = (server.backend, server.name)
            assert key not in servers, "a name is never added twice"
            servers[key] = replace(_started(server), draining=server.drain)
        case DrainServer(backend, name):
            servers[backend, name] = replace(servers[backend, name], draining=True, maintenance=False)
        case ReadyServer(backend, name):
            servers[backend, name] = replace(servers[backend, name], draining=False, maintenance=False)
        case SetServerLimit(backend, name, max_connections):
            servers[backend, name] = replace(servers[backend, name], max_connections=max_connections)
        case SetServerWeight(backend, name, weight):
            servers[backend, name] = replace(servers[backend, name], weight=weight)
        case RemoveServer(backend, name):
            assert servers[backend, name].in_flight == 0, "nothing that serves is removed"
            del servers[backend, name]
    return replace(running, servers=tuple(servers.values()))


def finished(running: RunningHaproxy) -> RunningHaproxy:
    """The same after every request ended."""
    return replace(running, servers=tuple(replace(server, in_flight=0) for server in running.servers))


def touched(steps: Iterable[Step]) -> set[tuple[str, str]]:
    """The servers that steps change individually."""
    changed = (DrainServer, ReadyServer, SetServerLimit, SetServerWeight, RemoveServer)
    named = {(step.backend, step.name) for step in steps if isinstance(step, changed)}
    return named | {(step.server.backend, step.server.name) for step in steps if isinstance(step, AddServer)}


def _started(server: Server, *, maintenance: bool = False) -> RunningServer:
    return RunningServer(
        backend=server.backend,
        name=server.name,
        address=server.address,
        port=server.port,
        weight=server.weight,
        max_connections=server.max_connections,
        draining=False,
        maintenance=maintenance,
        usable=True,
    )
