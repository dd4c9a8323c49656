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
    names = list(map_names)
    questions = ("show info", STATS_OF_BACKENDS_AND_SERVERS, "show servers state")
    info, stats, states, *maps = await admin.ask_all(*questions, *(_question(name) for name in names))
    texts = {name: _text(name, answer) for name, answer in zip(names, maps, strict=True)}
    return read_running(info=info, stats=stats, states=states, maps=texts)


def _question(name: str) -> str:
    """A map whole; of the keys, which may be thousands, the entry that stands for all of them."""
    return f"get map {name} {CONTENT_ENTRY}" if name == KEYS_MAP else f"show map {name}"


def _text(name: str, answer: str) -> str:
    """As `show map` has it."""
    if name != KEYS_MAP:
        return answer
    found = MARK.search(answer)
    return f"0x0 {CONTENT_ENTRY} {found[1]}\n" if found else ""
