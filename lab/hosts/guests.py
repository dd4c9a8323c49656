"""Hosts that come and go while the laboratory runs: what is said of one when it comes. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import IPv4Address
from typing import Any

from lab.hosts.topology import Host, NoLaboratory, Role

LINK_LOCAL = "169.254."


@dataclass(frozen=True, slots=True)
class Guest:
    """`link_local`: addresses on its loopback, which it alone reaches. `environment`: what its processes get beside
    what those of every host get. `files`: path -> text; what begins with `#!` is executable."""

    host: Host
    link_local: tuple[IPv4Address, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.host.name


def write_guest(guest: Guest) -> dict[str, Any]:
    """What `read_guest` reads, and the laboratory's command `add`."""
    return {
        "name": guest.name,
        "site": guest.host.site,
        "address": str(guest.host.address),
        "link_local": [str(address) for address in guest.link_local],
        "environment": dict(guest.environment),
        "files": dict(guest.files),
    }


def read_guest(written: Mapping[str, Any]) -> Guest:
    """What `write_guest` wrote.

    Raises:
        NoLaboratory: an address is none.
    """
    try:
        host = Host(written["name"], Role.GUEST, written["site"], IPv4Address(written["address"]))
        link_local = tuple(IPv4Address(address) for address in written["link_local"])
    except ValueError as error:
        raise NoLaboratory(f"{written['name']}: {error}.") from None
    if wrong := [str(address) for address in link_local if not address.is_link_local]:
        raise NoLaboratory(f"{written['name']}: {wrong[0]} is not link-local: give one that begins with {LINK_LOCAL}")
    return Guest(host, link_local, written["environment"], written["files"])
