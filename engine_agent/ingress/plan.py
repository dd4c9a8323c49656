"""The steps from the running to the desired state, each with its reason. Pure. Servers and maps change in place,
through the runtime API. Only another structure (more or fewer pools, another limit, another version of the agent) or a
server at another address needs a reload. A server that is no longer wanted is drained first, and removed after its last
request; before a reload as well, because the old worker continues with its queue."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from engine_agent.ingress.desired import DesiredHaproxy, Server, ServerKey
from engine_agent.ingress.key_map import CONTENT_ENTRY
from engine_agent.ingress.running import RunningHaproxy, RunningServer
from engine_agent.ingress.steering import Steered


@dataclass(frozen=True, slots=True)
class Reload:
    """Writes the configuration and starts a new worker; the old one finishes its streams."""

    reason: str


@dataclass(frozen=True, slots=True)
class AddServer:
    server: Server
    reason: str


@dataclass(frozen=True, slots=True)
class DrainServer:
    """Sends no new requests; those in flight continue."""

    backend: str
    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class ReadyServer:
    """Ends a drain or a maintenance."""

    backend: str
    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class SetServerLimit:
    backend: str
    name: str
    max_connections: int
    reason: str


@dataclass(frozen=True, slots=True)
class SetServerWeight:
    backend: str
    name: str
    weight: int
    reason: str


@dataclass(frozen=True, slots=True)
class ReplaceMap:
    """Replaces all entries of a map together: no request sees half of it. Logs omit the entries, which can be
    thousands."""

    name: str
    entries: Mapping[str, str] = field(repr=False)
    reason: str


@dataclass(frozen=True, slots=True)
class RemoveServer:
    """Removes an unused server. HAProxy can refuse while a connection idles; then it is tried again."""

    backend: str
    name: str
    reason: str


NOT_STEERED: Mapping[ServerKey, Steered | None] = MappingProxyType({})

Step = Reload | AddServer | DrainServer | ReadyServer | SetServerLimit | SetServerWeight | ReplaceMap | RemoveServer


def plan_steps(
    running: RunningHaproxy,
    desired: DesiredHaproxy,
    structure: str,
    steered: Mapping[ServerKey, Steered | None] = NOT_STEERED,
) -> tuple[Step, ...]:
    """The steps from `running` to `desired`, whose structure digest is `structure`. New cells come before the maps that
    lead to them, and old ones go last. `steered` servers have another limit and weight than `desired` states; None:
    they are being changed now."""
    there = {(server.backend, server.name): server for server in running.servers}
    wanted = {(server.backend, server.name): server for server in desired.servers}
    if reason := _reason_to_reload(running.structure, structure, there, wanted):
        unwanted = {key: server for key, server in there.items() if key not in wanted or wanted[key].drain}
        return (*_drain(unwanted.values()), Reload(reason))
    steps: list[Step] = [AddServer(server, "new in the table") for key, server in wanted.items() if key not in there]
    for key, server in wanted.items():
        if key in there:
            steps += _adjust(there[key], server)
            steps += _steer(there[key], server, steered.get(key, Steered(server.weight, server.max_connections)))
    steps += _replace_maps(running, desired)
    for key, left in there.items():
        if key not in wanted:
            steps += _retire(left)
    return tuple(steps)


def _reason_to_reload(
    current: str, wanted_structure: str, there: Mapping[ServerKey, RunningServer], wanted: Mapping[ServerKey, Server]
) -> str:
    if current != wanted_structure:
        return f"structure is {current or 'unknown'}, should be {wanted_structure}"
    moved = [key for key in wanted if key in there and _has_moved(there[key], wanted[key])]
    return f"{'/'.join(moved[0])} is at another address" if moved else ""


def _drain(servers: Iterable[RunningServer]) -> Iterable[Step]:
    for server in servers:
        if not (server.draining or server.maintenance):
            yield DrainServer(server.backend, server.name, "drained or not there in the table")


def _has_moved(there: RunningServer, wanted: Server) -> bool:
    return (there.address, there.port) != (wanted.address, wanted.port)


def _adjust(there: RunningServer, wanted: Server) -> Iterable[Step]:
    backend, name = wanted.backend, wanted.name
    if wanted.drain and not there.draining:
        yield DrainServer(backend, name, "the table drains it")
    elif not wanted.drain and there.maintenance:
        yield ReadyServer(backend, name, "the table serves it, and it is in maintenance")
    elif not wanted.drain and there.draining:
        yield ReadyServer(backend, name, "the table serves it")


def _steer(there: RunningServer, wanted: Server, steered: Steered | None) -> Iterable[Step]:
    if steered is None:
        return
    backend, name = wanted.backend, wanted.name
    if there.max_connections != steered.limit:
        reason = f"limit is {there.max_connections}, should be {steered.limit}"
        yield SetServerLimit(backend, name, steered.limit, reason)
    if there.weight != steered.weight:
        reason = f"weight is {there.weight}, should be {steered.weight}"
        yield SetServerWeight(backend, name, steered.weight, reason)


def _replace_maps(running: RunningHaproxy, desired: DesiredHaproxy) -> Iterable[Step]:
    for name, entries in desired.maps.items():
        there = running.maps.get(name, {})
        if _content_of(there) != _content_of(entries):
            yield ReplaceMap(name, entries, "its entries differ from the table")


def _content_of(entries: Mapping[str, str]) -> object:
    """Identifies a map's content: the digest among its entries, else all of them."""
    return entries.get(CONTENT_ENTRY) or entries


def _retire(there: RunningServer) -> Iterable[Step]:
    if not (there.draining or there.maintenance):
        yield DrainServer(there.backend, there.name, "not in the table any more")
    elif there.in_flight == 0 and there.queued == 0 and there.rested:
        yield RemoveServer(there.backend, there.name, "not in the table any more, and idle")
