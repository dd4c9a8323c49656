"""Carries out planned steps on the running worker, through its admin socket. It never decides a step; see `plan`."""

from collections.abc import Iterable, Mapping

from engine_agent.ingress.backends import server_arguments
from engine_agent.ingress.command_socket import CommandSocket
from engine_agent.ingress.layout import Server
from engine_agent.ingress.plan import (
    AddServer,
    DrainServer,
    LimitServer,
    ReadyServer,
    Reload,
    RemoveServer,
    ReplaceMap,
    Step,
    WeighServer,
)
from engine_agent.ingress.settings import Times

BYTES_PER_COMMAND = 16 * 1024
"""Of map entries sent at once, far below the buffer that a command must fit into. One entry may be longer."""


async def apply_step(step: Step, admin: CommandSocket, times: Times) -> None:
    """Carry out one step other than a reload, which is not the worker's to do.

    Raises:
        CommandRefused: HAProxy said no; the text is its own.
        Unreachable: it did not answer.
    """
    match step:
        case AddServer(server):
            await _add(server, admin, times)
        case DrainServer(backend, name):
            await admin.order(f"set server {backend}/{name} state drain")
        case ReadyServer(backend, name):
            await admin.order(f"set server {backend}/{name} state ready")
        case LimitServer(backend, name, max_connections):
            await admin.order(f"set maxconn server {backend}/{name} {max_connections}")
        case WeighServer(backend, name, weight):
            await admin.order(f"set server {backend}/{name} weight {weight}")
        case ReplaceMap(name, entries):
            await _replace_map(name, entries, admin)
        case RemoveServer(backend, name):
            await admin.order(f"set server {backend}/{name} state maint")
            await admin.order(f"del server {backend}/{name}", success="Server deleted.")
        case Reload():
            raise TypeError("a reload is no command to a worker")


async def _add(server: Server, admin: CommandSocket, times: Times) -> None:
    """All in one write, so that no crash of ours leaves a server without its checks."""
    name = f"{server.backend}/{server.name}"
    commands = [f"add server {name} {server_arguments(server, times)}", f"enable health {name}"]
    if server.agent_check_port is not None:
        commands.append(f"enable agent {name}")
    commands.append(f"set server {name} state {'drain' if server.drain else 'ready'}")
    await admin.order("; ".join(commands), success="New server registered.")


async def _replace_map(name: str, entries: Mapping[str, str], admin: CommandSocket) -> None:
    """The new entries are written beside the old and take over in one instant."""
    version = (await admin.ask(f"prepare map {name}")).rpartition(":")[2].strip()
    for some in _pieces(f"{key} {value}\n" for key, value in entries.items()):
        await admin.order(f"add map @{version} {name} <<\n{some}")
    await admin.order(f"commit map @{version} {name}")


def _pieces(lines: Iterable[str]) -> Iterable[str]:
    piece = ""
    for line in lines:
        if piece and len(piece) + len(line) > BYTES_PER_COMMAND:
            yield piece
            piece = ""
        piece += line
    if piece:
        yield piece
