"""Identities of agents and of the control plane: names in certificates, files in the folder `tls` of a home, and TLS
contexts made of them. Links between hosts of a fleet use TLS, and each side checks the other's name. It writes no file
and issues no certificate: `engine_agent.node.identity` and the fleet's authority do."""

import os
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

ID_LENGTH_MAX = 45
"""With the longest kind and the fleet this makes 64 characters, the limit of a common name (RFC 5280, appendix A.1)."""
CONTROL_ID = "control"
"""The id that all hosts of the control plane share."""
CERTIFICATE_WANTED = "x-switchyard-certificate-wanted"
"""Header of a rejected connection whose credential is only valid together with the agent's certificate."""
_FLEET = r"f-[0-9a-f]{8}"
_ID = r"[a-z0-9](?:[a-z0-9_-]{0,43}[a-z0-9_])?"
_KIND = r"node|ingress|machine|control"
_URI = re.compile(rf"spiffe://({_FLEET})/({_KIND})/({_ID})")


class IdentityKind(StrEnum):
    """The kind of a certificate's owner."""

    NODE = "node"
    INGRESS = "ingress"
    MACHINE = "machine"
    CONTROL = "control"


class BadName(ValueError):
    """A name that no certificate of a fleet may have; the text names it and the valid form."""


@dataclass(frozen=True, slots=True)
class IdentityName:
    """An owner of certificates: `id` of `kind` in `fleet`. Raises BadName if a part has invalid characters or an
    invalid length."""

    fleet: str
    kind: IdentityKind
    id: str

    def __post_init__(self) -> None:
        if not is_fleet_name(self.fleet):
            raise BadName(f"{self.fleet[:80]!r} is not a fleet name: f- and 8 hexadecimal digits")
        if not is_identity_id(self.id):
            raise BadName(
                f"{self.id[:80]!r} cannot have a certificate: an id has 1 to {ID_LENGTH_MAX} lower-case letters,"
                " digits, - and _, and starts with a letter or digit"
            )

    def __str__(self) -> str:
        return f"{self.kind} {self.id}"

    @property
    def uri(self) -> str:
        """The SPIFFE id: `spiffe://FLEET/KIND/ID`."""
        return f"spiffe://{self.fleet}/{self.kind}/{self.id}"

    @property
    def dns(self) -> str:
        """The name that TLS clients check: `ID.KIND.FLEET`. It is also the common name, and no DNS server knows it."""
        return f"{self.id}.{self.kind}.{self.fleet}"


def is_fleet_name(text: str) -> bool:
    return re.fullmatch(_FLEET, text) is not None


def is_identity_id(text: str) -> bool:
    return re.fullmatch(_ID, text) is not None


def control_name(fleet: str) -> IdentityName:
    return IdentityName(fleet, IdentityKind.CONTROL, CONTROL_ID)


def name_of_uri(uri: str) -> IdentityName:
    """Parses a SPIFFE id. Raises BadName if it is not a name of a fleet."""
    found = _URI.fullmatch(uri)
    if found is None:
        raise BadName(f"{uri[:120]!r} is not a name in a fleet's certificates; the form is spiffe://FLEET/KIND/ID")
    return IdentityName(found[1], IdentityKind(found[2]), found[3])


def name_of_peer(certificate: dict[str, Any] | None) -> IdentityName:
    """The name in a verified certificate, as `ssl.SSLObject.getpeercert()` returns it. Raises BadName if there is no
    certificate, or it does not have exactly one SPIFFE id and the DNS name that belongs to it."""
    names = certificate.get("subjectAltName", ()) if certificate else ()
    uris = [value for kind, value in names if kind == "URI"]
    others = [value for kind, value in names if kind != "URI"]
    if len(uris) != 1:
        raise BadName(f"a certificate of a fleet has one SPIFFE id; this one has {len(uris)}")
    name = name_of_uri(uris[0])
    if others != [name.dns]:
        raise BadName(f"the certificate of {name} must be for {name.dns} only, and is for {', '.join(others)[:120]!r}")
    return name


TLS_FOLDER = "tls"
KEY_FILE = "key.pem"
CERTIFICATE_FILE = "cert.pem"
BUNDLE_FILE = "ca.pem"
REVOKED_FILE = "crl.pem"
COMBINED_FILE = "combined.pem"
REVOKED_SERIALS_FILE = "revoked"
"""Revoked serial numbers in hexadecimal, one per line, for the cell proxy: parsing revocation lists takes 13 MB
more."""
MINIMUM_VERSION = ssl.TLSVersion.TLSv1_3
"""Of links within a fleet. TLS 1.3 has no renegotiation. Servers issue no tickets, because a resumed session would show
no certificate."""


class IdentityFiles:
    """The files of one home. Each is read when it is used, so that two processes can share a home."""

    def __init__(self, home: Path) -> None:
        self.folder = home / TLS_FOLDER
        self.key_file = self.folder / KEY_FILE
        self.certificate_file = self.folder / CERTIFICATE_FILE
        self.bundle_file = self.folder / BUNDLE_FILE
        self.revoked_file = self.folder / REVOKED_FILE
        """The revocation lists of the authorities."""
        self.combined_file = self.folder / COMBINED_FILE
        """Certificate and key in one file, as HAProxy reads them."""
        self._clients: dict[bool, tuple[object, ssl.SSLContext]] = {}

    @property
    def has_bundle(self) -> bool:
        """Whether there is an authority to check the control plane with."""
        return self.bundle_file.exists()

    @property
    def has_certificate(self) -> bool:
        """Whether there is a certificate, possibly an expired one."""
        return self.combined_file.exists()

    def client_context(self, *, shows_certificate: bool = True) -> ssl.SSLContext:
        """The context for connections to the fleet. It checks the chain, revocation, and the name given as
        `server_hostname`.

        It shows the own certificate if there is one and `shows_certificate`. Get the context for each connection: it is
        only built again when a file has changed. Raises FileNotFoundError if there is no bundle. Raises ssl.SSLError if
        a file is damaged."""
        stamp = self.stamp()
        known = self._clients.get(shows_certificate)
        if known is None or known[0] != stamp:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            self._load(context, with_certificate=shows_certificate and self.has_certificate)
            known = self._clients[shows_certificate] = (stamp, context)
        return known[1]

    def server_context(self) -> ssl.SSLContext:
        """The context of a listener that accepts only certificates of the fleet, for the whole life of the listener.
        Connections after a change of the files use the new files. Raises FileNotFoundError if there is no certificate
        or bundle. Raises ssl.SSLError if a file is damaged."""
        return renewed_server_context(self, client_certificate=ssl.CERT_REQUIRED)

    def _load(self, context: ssl.SSLContext, *, with_certificate: bool) -> None:
        context.minimum_version = MINIMUM_VERSION
        context.load_verify_locations(self.bundle_file)
        if self.revoked_file.exists():
            context.load_verify_locations(self.revoked_file)
            context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF
        if with_certificate:
            context.load_cert_chain(self.combined_file)

    def stamp(self) -> object:
        """A value that differs whenever a file has changed."""
        return tuple(_stamp_of(path) for path in (self.combined_file, self.bundle_file, self.revoked_file))


def renewed_server_context(identity: IdentityFiles, *, client_certificate: ssl.VerifyMode) -> ssl.SSLContext:
    """A server's context that follows the files of `identity`. Raises FileNotFoundError if there is no certificate or
    bundle. Raises ssl.SSLError if a file is damaged."""

    def made() -> ssl.SSLContext:
        if not identity.has_certificate:
            raise FileNotFoundError(f"there is no certificate at {identity.combined_file}")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        identity._load(context, with_certificate=True)
        context.verify_mode = client_certificate
        context.num_tickets = 0
        return context

    stamp, first = identity.stamp(), made()
    current = (stamp, first)

    def renew(connection: ssl.SSLObject, _name: str | None, _first: ssl.SSLContext) -> None:
        nonlocal current
        stamp = identity.stamp()
        if current[0] != stamp:
            try:
                current = (stamp, made())
            except (OSError, ssl.SSLError):
                # Only some of the new files are written: this connection uses the earlier ones.
                return
        if current[1] is not first:
            connection.context = current[1]

    first.sni_callback = renew
    return first


def peer_name(connection: ssl.SSLObject | ssl.SSLSocket) -> IdentityName:
    """The name of the peer of a TLS connection after the handshake. Raises BadName if it showed no certificate of a
    fleet."""
    return name_of_peer(connection.getpeercert())


def _stamp_of(path: Path) -> tuple[int, int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return (status.st_ino, status.st_mtime_ns, status.st_size)


PLAIN_LINKS_VARIABLE = "SWITCHYARD_PLAIN_LINKS"
"""1 turns TLS off on all links, to measure its cost."""


def links_are_plain(environment: Mapping[str, str]) -> bool:
    """Whether links of this process do not use TLS. Raises ValueError if the variable is neither 0 nor 1."""
    stated = environment.get(PLAIN_LINKS_VARIABLE) or "0"
    if stated not in {"0", "1"}:
        raise ValueError(f"{PLAIN_LINKS_VARIABLE} is {stated!r}; it must be 1 (no TLS) or 0")
    return stated == "1"
