"""The sites, hosts, routers and addresses of a laboratory. Pure.

A site has its own router: a region, or the site of the control plane. One more router connects the sites, and on it
`outside` is the entry of clients from the real host."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from ipaddress import IPv4Address, IPv4Network
from itertools import permutations
from typing import Any

CONTROL_SITE = "control"
OUTSIDE = "outside"
CLOUD = "aws"
"""The host at which the cloud of tests answers, where a laboratory has one."""
DATABASE = "db"
"""The host of the database that several hosts of the control plane share."""
CORE = "core"
"""The router between the sites. The hosts of the control plane are on it themselves: they belong to no region."""
REGIONS = ("us-east-1", "us-west-2")
EVERYTHING = IPv4Network("10.0.0.0/8")
MOST_REGIONS = 100
CLOUD_NUMBER = 200
"""Of its address in the control plane's network."""
DATABASE_NUMBER = 201
DATABASE_PORT = 5432
MOST_HOSTS_OF_A_SITE = 99
"""Of one role: their addresses are `FIRST_OF_ROLE` and upwards."""
LONGEST_NAME = 15
"""Of a network interface, in bytes (IFNAMSIZ less its end)."""


def database_url(address: IPv4Address) -> str:
    return f"postgres://switchyard@{address}:{DATABASE_PORT}/switchyard?sslmode=require&sslnegotiation=direct"


class Role(StrEnum):
    CONTROL = "control"
    INGRESS = "ingress"
    NODE = "node"
    CLOUD = "cloud"
    DATABASE = "database"
    TEMPORARY = "temporary"
    """It comes and goes while the laboratory runs."""


LETTER = {Role.CONTROL: "c", Role.INGRESS: "i", Role.NODE: "n"}
FIRST_OF_ROLE = {Role.NODE: 1, Role.INGRESS: 101, Role.CONTROL: 1}


class NoLaboratory(Exception):
    """Why there can be no such laboratory, or no such command in it, in one sentence."""


@dataclass(frozen=True, slots=True)
class Host:
    name: str
    role: Role
    site: str
    address: IPv4Address


@dataclass(frozen=True)
class Topology:
    """Hosts by site. `round_trip_s`: between the hosts of two different sites, in seconds; clients outside are near.
    `cloud`: with one, whose instances are hosts. `temporary_hosts`: those that exist now."""

    regions: tuple[str, ...] = REGIONS
    controls: int = 2
    ingresses: int = 2
    nodes: int = 4
    round_trip_s: float = 0.06
    cloud: bool = False
    temporary_hosts: tuple[Host, ...] = ()

    @cached_property
    def networks(self) -> dict[str, IPv4Network]:
        """Site -> its addresses; the control plane's, the regions', and `outside`."""
        sites = (CONTROL_SITE, *self.regions, OUTSIDE)
        return {site: IPv4Network(f"10.{number}.0.0/16") for number, site in enumerate(sites)}

    @cached_property
    def hosts(self) -> dict[str, Host]:
        """Name -> host: c1 and upwards, then i1 and n1 and upwards, region after region, the database of several
        control hosts, the cloud, then temporary hosts."""
        controls = [(CONTROL_SITE, Role.CONTROL, self.controls)]
        rest = [
            (region, role, count)
            for role, count in ((Role.INGRESS, self.ingresses), (Role.NODE, self.nodes))
            for region in self.regions
        ]
        hosts: dict[str, Host] = {}
        numbers = dict.fromkeys(Role, 0)
        for site, role, count in (*controls, *rest):
            for index in range(count):
                numbers[role] += 1
                name = f"{LETTER[role]}{numbers[role]}"
                hosts[name] = Host(name, role, site, self.networks[site][FIRST_OF_ROLE[role] + index])
        if self.controls > 1:
            address = self.networks[CONTROL_SITE][DATABASE_NUMBER]
            hosts[DATABASE] = Host(DATABASE, Role.DATABASE, CONTROL_SITE, address)
        if self.cloud:
            hosts[CLOUD] = Host(CLOUD, Role.CLOUD, CONTROL_SITE, self.networks[CONTROL_SITE][CLOUD_NUMBER])
        return hosts | {added.name: added for added in self.temporary_hosts}

    @cached_property
    def routers(self) -> tuple[str, ...]:
        return (CORE, *self.regions)

    def router_of(self, host: Host) -> str:
        return CORE if host.site == CONTROL_SITE else host.site

    def network_of(self, name: str) -> IPv4Network:
        """The addresses that a host, region or site stands for. Raises NoLaboratory if there is nothing of this
        name."""
        if host := self.hosts.get(name):
            return IPv4Network(host.address)
        if network := self.networks.get(name):
            return network
        raise NoLaboratory(f"There is no {name!r} in this laboratory: give one of {', '.join(self.names)}.")

    @property
    def names(self) -> list[str]:
        return [*self.hosts, *self.networks]

    def host(self, name: str) -> Host:
        if host := self.hosts.get(name):
            return host
        raise NoLaboratory(f"There is no host {name!r} in this laboratory: give one of {', '.join(self.hosts)}.")

    def gateway(self, site: str) -> IPv4Address:
        return self.networks[site][254]

    def with_temporary_host(self, added: Host) -> "Topology":
        if not is_name(added.name) or added.name in {CORE, *self.names}:
            raise NoLaboratory(
                f"{added.name!r}: give a name that is not in use, of at most {LONGEST_NAME} letters, digits "
                "and hyphens."
            )
        network = self.networks.get(added.site)
        if network is None or added.site == OUTSIDE or added.address not in network:
            raise NoLaboratory(
                f"{added.name} at {added.address} in {added.site}: give a region and one of its addresses."
            )
        taken = {host.address: host.name for host in self.hosts.values()} | {self.gateway(added.site): "the router"}
        if holder := taken.get(added.address):
            raise NoLaboratory(f"{added.name} cannot have {added.address}: {holder} has it.")
        return replace(self, temporary_hosts=(*self.temporary_hosts, added))

    def without_temporary_host(self, name: str) -> "Topology":
        if name not in {added.name for added in self.temporary_hosts}:
            raise NoLaboratory(f"{name} is not a temporary host, so it cannot be removed.")
        return replace(self, temporary_hosts=tuple(added for added in self.temporary_hosts if added.name != name))

    def distances(self) -> dict[tuple[str, str], float]:
        """Two sites -> seconds that a packet takes from the one to the other."""
        far = (CONTROL_SITE, *self.regions)
        return dict.fromkeys(permutations(far, 2), self.round_trip_s / 2)


def checked(topology: Topology) -> Topology:
    """The topology, if hosts can be made of it. Raises NoLaboratory for too many of something, none where one is
    needed, or a name that no interface can have."""
    if not 1 <= len(topology.regions) <= MOST_REGIONS:
        raise NoLaboratory(f"{len(topology.regions)} regions: give 1 to {MOST_REGIONS}.")
    for region in topology.regions:
        if not is_name(region) or region in {CORE, CONTROL_SITE, OUTSIDE} or topology.regions.count(region) > 1:
            raise NoLaboratory(
                f"Region {region!r}: give each another name, of at most {LONGEST_NAME} letters, digits and hyphens, "
                f"that is not {CORE}, {CONTROL_SITE} or {OUTSIDE}."
            )
        if region in topology.hosts:
            raise NoLaboratory(f"Region {region!r} has the name of a host: give it another.")
    for what, count, least in (
        ("hosts of the control plane", topology.controls, 1),
        ("ingresses in a region", topology.ingresses, 0),
        ("nodes in a region", topology.nodes, 0),
    ):
        if not least <= count <= MOST_HOSTS_OF_A_SITE:
            raise NoLaboratory(f"{count} {what}: give {least} to {MOST_HOSTS_OF_A_SITE}.")
    return topology


def is_name(text: str) -> bool:
    return 0 < len(text) <= LONGEST_NAME and text.isascii() and text.replace("-", "").isalnum() and text[0] != "-"


LINK_LOCAL = "169.254."


@dataclass(frozen=True, slots=True)
class TemporaryHost:
    """`link_local`: addresses on its loopback, which it alone reaches. `environment`: what its processes get beside
    what those of every host get. `files`: path -> text; what begins with `#!` is executable. `devices`:
    names of files in its /dev."""

    host: Host
    link_local: tuple[IPv4Address, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    devices: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.host.name


def write_temporary_host(added: TemporaryHost) -> dict[str, Any]:
    return {
        "name": added.name,
        "site": added.host.site,
        "address": str(added.host.address),
        "link_local": [str(address) for address in added.link_local],
        "environment": dict(added.environment),
        "files": dict(added.files),
        "devices": list(added.devices),
    }


def read_temporary_host(written: Mapping[str, Any]) -> TemporaryHost:
    try:
        host = Host(written["name"], Role.TEMPORARY, written["site"], IPv4Address(written["address"]))
        link_local = tuple(IPv4Address(address) for address in written["link_local"])
    except ValueError as error:
        raise NoLaboratory(f"{written['name']}: {error}.") from None
    if wrong := [str(address) for address in link_local if not address.is_link_local]:
        raise NoLaboratory(f"{written['name']}: {wrong[0]} is not link-local: give one that begins with {LINK_LOCAL}")
    devices = tuple(written.get("devices", ()))
    if wrong_names := [name for name in devices if not all(part.isalnum() for part in name.split("/"))]:
        raise NoLaboratory(f"{written['name']}: {wrong_names[0]!r} is no name of a device")
    return TemporaryHost(host, link_local, written["environment"], written["files"], devices)
