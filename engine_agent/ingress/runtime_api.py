"""HAProxy's runtime API, through the worker's admin socket: reads its whole state, and carries out the steps of
`plan`."""

import re
from collections.abc import Iterable, Mapping

from engine_agent.ingress.command_socket import CommandSocket
from engine_agent.ingress.config import server_arguments
from engine_agent.ingress.desired import Server, ServerKey
from engine_agent.ingress.key_map import CONTENT_ENTRY, KEYS_MAP
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
from engine_agent.ingress.running import RunningHaproxy, read_running
from engine_agent.ingress.settings import Times
from engine_agent.ingress.steering import Steered

SHOW_STATS = "show stat -1 6 -1"
"""All proxies (-1), types backend (2) and server (4), all server ids (-1): HAProxy management guide, `show stat`."""
MAP_VALUE = re.compile(r'found=yes\b.{0,1000}\bvalue="([^"]*)"')
BYTES_PER_COMMAND = 16 * 1024
"""Of map entries in one command, far below HAProxy's buffer. A single entry can be longer."""

COMMANDS_PER_WRITE = 100
"""About 8 KiB, half of HAProxy's buffer."""


async def read_worker(admin: CommandSocket, map_names: Iterable[str]) -> RunningHaproxy:
    """The state of the worker, with these maps. Raises Unreachable if it does not answer. Raises UnexpectedOutput if it
    answers in a format that this agent does not know."""
    names = list(map_names)
    commands = ("show info", SHOW_STATS, "show servers state", "show table overflow")
    info, stats, states, overflow, *maps = await admin.send_all(*commands, *map(_show_map_command, names))
    texts = {name: _map_text(name, output) for name, output in zip(names, maps, strict=True)}
    return read_running(info=info, stats=stats, states=states, maps=texts, overflow=overflow)


def _show_map_command(name: str) -> str:
    """The whole map; for the keys, which can be thousands, only the entry with their digest."""
    return f"get map {name} {CONTENT_ENTRY}" if name == KEYS_MAP else f"show map {name}"


def _map_text(name: str, output: str) -> str:
    if name != KEYS_MAP:
        return output
    match = MAP_VALUE.search(output)
    return f"0x0 {CONTENT_ENTRY} {match[1]}\n" if match else ""


async def apply_step(step: Step, admin: CommandSocket, times: Times) -> None:
    """Carries out one step other than a reload. Raises CommandRefused if HAProxy refused; the text is its own. Raises
    Unreachable if it did not answer."""
    match step:
        case AddServer(server):
            await _add_server(server, admin, times)
        case DrainServer(backend, name):
            await admin.execute(f"set server {backend}/{name} state drain")
        case ReadyServer(backend, name):
            await admin.execute(f"set server {backend}/{name} state ready")
        case SetServerLimit(backend, name, max_connections):
            await admin.execute(f"set maxconn server {backend}/{name} {max_connections}")
        case SetServerWeight(backend, name, weight):
            await admin.execute(f"set server {backend}/{name} weight {weight}")
        case ReplaceMap(name, entries):
            await _replace_map(name, entries, admin)
        case RemoveServer(backend, name):
            await admin.execute(f"set server {backend}/{name} state maint")
            await admin.execute(f"del server {backend}/{name}", success="Server deleted.")
        case Reload():
            raise TypeError("a reload is no command to a worker")


async def take_back_requests(server: ServerKey, admin: CommandSocket) -> None:
    """Closes this server's connections: requests whose answer has not begun are tried elsewhere, and clients of the
    others are disconnected."""
    await admin.execute("shutdown sessions server {}/{}".format(*server))


async def steer_servers(changes: Mapping[ServerKey, Steered], admin: CommandSocket) -> None:
    """Sets limits and weights of several servers. Raises CommandRefused if HAProxy refused any, such as that of a
    server that does not exist yet; the others of the same write are set."""
    commands = []
    for (backend, name), steered in changes.items():
        commands.append(f"set maxconn server {backend}/{name} {steered.limit}")
        commands.append(f"set server {backend}/{name} weight {steered.weight}")
    for at in range(0, len(commands), COMMANDS_PER_WRITE):
        await admin.execute("; ".join(commands[at : at + COMMANDS_PER_WRITE]))


async def _add_server(server: Server, admin: CommandSocket, times: Times) -> None:
    """In one write, so that a crash of the agent leaves no server without its checks."""
    name = f"{server.backend}/{server.name}"
    commands = [f"add server {name} {server_arguments(server, times)}", f"enable health {name}"]
    commands.append(f"set server {name} state {'drain' if server.drain else 'ready'}")
    await admin.execute("; ".join(commands), success="New server registered.")


async def _replace_map(name: str, entries: Mapping[str, str], admin: CommandSocket) -> None:
    """Writes the new entries as a second version, which then replaces the first in one instant."""
    version = (await admin.send(f"prepare map {name}")).rpartition(":")[2].strip()
    for batch in _batches(f"{key} {value}\n" for key, value in entries.items()):
        await admin.execute(f"add map @{version} {name} <<\n{batch}")
    await admin.execute(f"commit map @{version} {name}")


def _batches(lines: Iterable[str]) -> Iterable[str]:
    batch = ""
    for line in lines:
        if batch and len(batch) + len(line) > BYTES_PER_COMMAND:
            yield batch
            batch = ""
        batch += line
    if batch:
        yield batch
