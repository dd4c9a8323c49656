"""Asks the running worker for everything that plans and reports are made of. It reads; it never changes anything."""

import re
from collections.abc import Iterable

from engine_agent.ingress.command_socket import CommandSocket
from engine_agent.ingress.key_map import CONTENT_ENTRY, KEYS_MAP
from engine_agent.ingress.running import Running, read_running

STATS_OF_BACKENDS_AND_SERVERS = "show stat -1 6 -1"
"""All proxies (-1), types backend (2) and server (4), all server ids (-1): HAProxy management guide, `show stat`."""

MARK = re.compile(r'found=yes\b.*\bvalue="([^"]*)"')
"""How `get map` tells the value that it found."""


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
        maps={name: await _map_text(admin, name) for name in map_names},
    )


async def _map_text(admin: CommandSocket, name: str) -> str:
    """A map whole, as `show map` has it; of the keys, which may be thousands, the entry that stands for all of them."""
    if name != KEYS_MAP:
        return await admin.ask(f"show map {name}")
    found = MARK.search(await admin.ask(f"get map {name} {CONTENT_ENTRY}"))
    return f"0x0 {CONTENT_ENTRY} {found[1]}\n" if found else ""
