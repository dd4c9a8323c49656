"""Asks the running worker for everything that plans and reports are made of. It reads; it never changes anything."""

from collections.abc import Iterable

from engine_agent.ingress.command_socket import CommandSocket
from engine_agent.ingress.running import Running, read_running

STATS_OF_BACKENDS_AND_SERVERS = "show stat -1 6 -1"
"""All proxies (-1), types backend (2) and server (4), all server ids (-1): HAProxy management guide, `show stat`."""


async def observe(admin: CommandSocket, map_names: Iterable[str]) -> Running:
    """One look at the worker and at these maps of it.

    Raises:
        Unreachable: it does not answer.
        UnreadableAnswer: it answers in a format that this agent does not know.
    """
    return read_running(
        info=await admin.ask("show info"),
        stats=await admin.ask(STATS_OF_BACKENDS_AND_SERVERS),
        states=await admin.ask("show servers state"),
        maps={name: await admin.ask(f"show map {name}") for name in map_names},
    )
