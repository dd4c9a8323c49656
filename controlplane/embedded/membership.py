"""Which hosts make up a control plane, and what one of them must know to belong to it: the file `control-hosts.json`
of its home. A home without that file is a control plane of one host.
"""

import ipaddress
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from controlplane.embedded.configuration import CannotStart
from controlplane.embedded.state_directory import StateDirectory, write_private_json

MEMBERSHIP_FILE = "control-hosts.json"
NAMES = ("control-1", "control-2")
"""Of the hosts: the one that invited and the one that joined. PostgreSQL, certificates and pages call them so."""


@dataclass(frozen=True, slots=True)
class ControlHost:
    """A host of the control plane. `joined`: it has had the database, so it may have been promoted since."""

    name: str
    address: str
    database_port: int
    agent_url: str
    joined: bool = False


@dataclass(frozen=True, slots=True)
class Passwords:
    """Of the roles of the database: with them and a certificate of ours one gets in, from either host."""

    owner: str
    application: str
    replication: str


@dataclass(frozen=True, slots=True)
class Membership:
    """What this host knows. `certificate` and `key` are its own, `authority` signed both, and its key is kept by
    nobody; `shared`: variables of the environment that hosts must agree on, as the first one had them."""

    own_name: str
    hosts: tuple[ControlHost, ...]
    passwords: Passwords
    authority: str
    certificate: str
    key: str
    shared: Mapping[str, str]

    @property
    def own(self) -> ControlHost:
        return next(host for host in self.hosts if host.name == self.own_name)

    @property
    def other(self) -> ControlHost:
        return next(host for host in self.hosts if host.name != self.own_name)

    @property
    def agent_urls(self) -> str:
        """Where agents reach web, on each host."""
        return ",".join(dict.fromkeys(url for host in self.hosts for url in host.agent_url.split(",")))

    def with_joined(self, name: str) -> "Membership":
        """As it is once that host has the database."""
        hosts = tuple(replace(host, joined=True) if host.name == name else host for host in self.hosts)
        return replace(self, hosts=hosts)


def read_membership(home: StateDirectory) -> Membership | None:
    """What the home says, or None for a control plane of one host.

    Raises:
        CannotStart: the file is damaged.
    """
    path = home.path / MEMBERSHIP_FILE
    if not path.exists():
        return None
    try:
        return membership_of(json.loads(path.read_text()))
    except (OSError, ValueError) as error:
        raise CannotStart(f"{path} is damaged ({error}): join this host anew, from a home without it.") from error


def write_membership(home: StateDirectory, membership: Membership) -> None:
    """Keep it, whole or not at all, readable by its owner only."""
    write_private_json(home.path / MEMBERSHIP_FILE, asdict(membership))


def forget_membership(home: StateDirectory) -> None:
    """From now on this home is a control plane of one host."""
    (home.path / MEMBERSHIP_FILE).unlink(missing_ok=True)


def keep_membership(home: StateDirectory, membership: Membership | None) -> None:
    """Write or forget it, whichever it is."""
    if membership is None:
        forget_membership(home)
    else:
        write_membership(home, membership)


def membership_of(stored: Any) -> Membership:
    """What `asdict` made of one.

    Raises:
        ValueError: it is none; the text says what is wrong.
    """
    hosts = tuple(_host(each) for each in _of(stored, "hosts", list))
    shared = _of(stored, "shared", dict)
    texts = {field.name: _of(stored, field.name, str) for field in fields(Membership) if field.type is str}
    passwords = _of(stored, "passwords", dict)
    if sorted(host.name for host in hosts) != sorted(NAMES) or texts["own_name"] not in NAMES:
        raise ValueError(f"its hosts are not {' and '.join(NAMES)}")
    if not all(isinstance(each, str) for pair in shared.items() for each in pair):
        raise ValueError("its shared variables are not all text")
    return Membership(
        hosts=hosts,
        passwords=Passwords(**{field.name: _of(passwords, field.name, str) for field in fields(Passwords)}),
        shared=shared,
        **texts,
    )


def _host(stored: Any) -> ControlHost:
    return ControlHost(
        name=_of(stored, "name", str),
        address=str(ipaddress.ip_address(_of(stored, "address", str))),
        database_port=_of(stored, "database_port", int),
        agent_url=_of(stored, "agent_url", str),
        joined=_of(stored, "joined", bool),
    )


def _of(stored: Any, name: str, kind: type) -> Any:
    if not isinstance(stored, dict) or type(stored.get(name)) is not kind:
        raise ValueError(f"it has no usable {name!r}")
    return stored[name]


def in_url(address: str) -> str:
    """As it stands before a port: IPv6 in brackets."""
    return f"[{address}]" if ":" in address else address


def links_folder(sockets: Path, host: ControlHost) -> Path:
    """Where clients of this host find the database of another one: a folder, as libpq takes it for a host."""
    return sockets / host.name
