"""The error for a routing table that an ingress cannot carry out, and checks of single values. Pure."""

import ipaddress
import re
from collections.abc import Iterable

from engine_agent.protocol.ports import HIGHEST_PORT

NAME = re.compile(r"[A-Za-z0-9._-]{1,80}")
"""Names that HAProxy accepts for backends and servers, without the colon."""


class BadTable(ValueError):
    """A routing table that no ingress can carry out; the text says why."""


def check_name(what: str, name: str) -> None:
    """Raises BadTable if the name is none that HAProxy takes."""
    if not NAME.fullmatch(name):
        raise BadTable(f"{what} {name!r}: a name is 1 to 80 letters, digits and ._-")


def check_distinct(what: str, names: Iterable[str]) -> None:
    """Raises BadTable if one is there twice."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise BadTable(f"{what} {name} is listed twice")
        seen.add(name)


def checked_address(what: str, address: str) -> str:
    """The address in canonical form. Raises BadTable if it is none."""
    try:
        return str(ipaddress.ip_address(address))
    except ValueError:
        raise BadTable(f"address of {what} must be an IP address, not {address!r}") from None


def checked_port(what: str, port: int) -> int:
    """Raises BadTable if there is no such port."""
    if not 0 < port <= HIGHEST_PORT:
        raise BadTable(f"port of {what} must be between 1 and {HIGHEST_PORT}, not {port}")
    return port
