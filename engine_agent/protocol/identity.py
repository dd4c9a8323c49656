"""Names in certificates: who an agent or the control plane is, as a SPIFFE id and as a DNS name. Both say the same.

Pure: it reads and writes names, and trusts none. `engine_agent.node.identity` and the fleet's authority do.
"""

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

ID_LENGTH_MAX = 45
"""With the longest kind and the fleet it makes 64 characters, what a common name may have (RFC 5280, appendix A.1)."""
CONTROL_ID = "control"
"""The one name that all hosts of the control plane share."""
CERTIFICATE_WANTED = "x-switchyard-certificate-wanted"
"""Header of the refusal of a connection whose credential counts only with the agent's certificate."""
_FLEET = r"f-[0-9a-f]{8}"
_ID = r"[a-z0-9](?:[a-z0-9_-]{0,43}[a-z0-9_])?"
_KIND = r"node|ingress|machine|control"
_URI = re.compile(rf"spiffe://({_FLEET})/({_KIND})/({_ID})")
_DNS = re.compile(rf"({_ID})\.({_KIND})\.({_FLEET})")


class IdentityKind(StrEnum):
    """What a certificate's owner is."""

    NODE = "node"
    INGRESS = "ingress"
    MACHINE = "machine"
    CONTROL = "control"


class BadName(ValueError):
    """A name that no certificate of a fleet may have; the text says which, and what would be one."""


@dataclass(frozen=True, slots=True)
class IdentityName:
    """One owner of certificates: `id` of `kind` in `fleet`.

    Raises:
        BadName: a part has characters or a length that it may not have.
    """

    fleet: str
    kind: IdentityKind
    id: str

    def __post_init__(self) -> None:
        if not is_fleet_name(self.fleet):
            raise BadName(f"{self.fleet[:80]!r} is no name of a fleet: it is f- and 8 hexadecimal digits")
        if not is_identity_id(self.id):
            raise BadName(
                f"{self.id[:80]!r} can have no certificate: an id has 1 to {ID_LENGTH_MAX} lower-case letters, digits,"
                " - and _, and starts with a letter or digit"
            )

    def __str__(self) -> str:
        return f"{self.kind} {self.id}"

    @property
    def uri(self) -> str:
        """The SPIFFE id: `spiffe://FLEET/KIND/ID`."""
        return f"spiffe://{self.fleet}/{self.kind}/{self.id}"

    @property
    def dns(self) -> str:
        """What TLS clients check: `ID.KIND.FLEET`. It is in no DNS, and is the common name, too."""
        return f"{self.id}.{self.kind}.{self.fleet}"


def is_fleet_name(text: str) -> bool:
    return re.fullmatch(_FLEET, text) is not None


def is_identity_id(text: str) -> bool:
    return re.fullmatch(_ID, text) is not None


def control_name(fleet: str) -> IdentityName:
    """The control plane's name in this fleet."""
    return IdentityName(fleet, IdentityKind.CONTROL, CONTROL_ID)


def name_of_uri(uri: str) -> IdentityName:
    """Whose SPIFFE id this is.

    Raises:
        BadName: it is none of a fleet.
    """
    return _name(_URI.fullmatch(uri), 1, uri, "spiffe://FLEET/KIND/ID")


def name_of_dns(name: str) -> IdentityName:
    """Whose DNS name this is.

    Raises:
        BadName: it is none of a fleet.
    """
    return _name(_DNS.fullmatch(name), 3, name, "ID.KIND.FLEET")


def _name(found: "re.Match[str] | None", fleet_group: int, text: str, form: str) -> IdentityName:
    if found is None:
        raise BadName(f"{text[:120]!r} is no name of a fleet's certificate: one is {form}")
    id_group = 4 - fleet_group
    return IdentityName(found[fleet_group], IdentityKind(found[2]), found[id_group])


def name_of_peer(certificate: dict[str, Any] | None) -> IdentityName:
    """Whose certificate this is, as `ssl.SSLObject.getpeercert()` gives one that was verified.

    Raises:
        BadName: there is none, or it has not exactly one SPIFFE id, and the DNS name that belongs to it.
    """
    names = certificate.get("subjectAltName", ()) if certificate else ()
    uris = [value for kind, value in names if kind == "URI"]
    others = [value for kind, value in names if kind != "URI"]
    if len(uris) != 1:
        raise BadName(f"a certificate of a fleet has one SPIFFE id; this one has {len(uris)}")
    name = name_of_uri(uris[0])
    if others != [name.dns]:
        raise BadName(f"the certificate of {name} must be for {name.dns} alone, and is for {', '.join(others)[:120]!r}")
    return name
