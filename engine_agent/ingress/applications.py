"""TLS between applications and an ingress: what HAProxy's configuration says of it, the files that it names, and how a
new certificate gets into a HAProxy that runs. What to show, and whom to serve without TLS, comes from the control
plane.

HTTP/1.1 only, here as on the port without TLS: every limit of an ingress counts connections, and one of HTTP/2 is a
hundred requests.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from engine_agent.ingress.api_paths import HEALTH_PATHS
from engine_agent.ingress.bad_table import BadTable
from engine_agent.ingress.command_socket import CommandRefused, CommandSocket
from engine_agent.ingress.links import MAX_FILE_BYTES, replace_file
from engine_agent.ingress.responses import ErrorResponse, refuse_rule
from engine_agent.node.journal import write_durably
from engine_agent.protocol.identity import is_identity_id
from engine_agent.protocol.ingress_messages import ApplicationTls
from engine_agent.protocol.ports import tls_port
from engine_agent.protocol.states import PlainHttp

FOLDER = "applications"
"""In the folder of the ingress. HAProxy reads it while it is root still, if it ever was."""
LIST_FILE = f"{FOLDER}/certificates.list"
"""A list, because a line of a configuration has 64 words at most."""
CIPHERS = ":".join(
    f"ECDHE-{key}-{cipher}"
    for cipher in ("AES128-GCM-SHA256", "AES256-GCM-SHA384", "CHACHA20-POLY1305")
    for key in ("ECDSA", "RSA")
)
"""Of TLS 1.2, those with forward secrecy and authenticated encryption (Mozilla's "intermediate", less DHE)."""
LOOPBACK = "127.0.0.0/8 ::1"
STALL_S = 15
"""Longest that an application may say nothing in a handshake, which has no limit of its own in HAProxy 2.8, or while it
sends a body, or take nothing of an answer."""


@dataclass(frozen=True, slots=True)
class Applications:
    """How applications reach this ingress: certificates by name, each as PEM with its chain and key, the first of which
    is shown where no other fits; and whom it serves without TLS."""

    certificates: Mapping[str, str] = field(default_factory=dict, repr=False)
    plain_http: PlainHttp = PlainHttp.SERVE

    @property
    def refuses_plain_http(self) -> bool:
        return self.plain_http is not PlainHttp.SERVE


def applications_from(stated: ApplicationTls, before: Applications) -> Applications:
    """What the control plane states, as far as it can be judged without HAProxy. A certificate that it names without
    its text, because it cannot open the key, stays as it was `before`; one that was not there is left out.

    Raises:
        BadTable: something in it cannot be carried out.
    """
    named = {each.name: each.pem or before.certificates.get(each.name, "") for each in stated.certificates}
    if len(named) < len(stated.certificates):
        raise BadTable("two certificates have one name")
    certificates = {name: pem for name, pem in named.items() if pem}
    for name, pem in certificates.items():
        if not is_identity_id(name):
            raise BadTable(f"certificate {name!r}: a name has lower-case letters, digits, - and _")
        if len(pem) > MAX_FILE_BYTES or not pem.isascii() or "\n\n" in pem:
            raise BadTable(f"certificate {name}: no PEM without blank lines of {MAX_FILE_BYTES} letters at most")
    try:
        return Applications(certificates, PlainHttp(stated.plain_http))
    except ValueError:
        raise BadTable(f"plain_http {stated.plain_http!r} is none of {', '.join(PlainHttp)}") from None


def listener_lines(applications: Applications, host: str, ingress_port: int) -> list[str]:
    """How the frontend for applications over TLS begins; none without a certificate. The comment makes another list of
    certificates another structure."""
    if not applications.certificates:
        return []
    return [
        f"# certificates: {' '.join(applications.certificates)}",
        f"bind {host}:{tls_port(ingress_port)} proto h1 name {FOLDER} ssl crt-list {LIST_FILE}"
        f" ssl-min-ver TLSv1.2 ciphers {CIPHERS} alpn http/1.1",
        f"timeout client {STALL_S}s",
    ]


def tls_required(ingress_port: int) -> ErrorResponse:
    port = tls_port(ingress_port)
    return ErrorResponse(403, "tls_required", f"this ingress serves you over TLS only: use https, and port {port}")


def plain_http_rules(applications: Applications, ingress_port: int) -> list[str]:
    """Whom the port without TLS serves. Whether this process lives is no secret: load balancers ask there."""
    if not applications.refuses_plain_http:
        return []
    others = f" !{{ src {LOOPBACK} }}" if applications.plain_http is PlainHttp.LOOPBACK else ""
    return [refuse_rule(tls_required(ingress_port), f"!{{ ssl_fc }} !{{ path {' '.join(HEALTH_PATHS)} }}{others}")]


def write_files(folder: Path, applications: Applications) -> None:
    """The files that the configuration in `folder` names, readable by their owner alone, and no others.

    Raises:
        OSError: one could not be written; each is the old or the new one whole.
    """
    wanted = {folder / _file(name): pem.encode() for name, pem in applications.certificates.items()}
    if wanted:
        wanted[folder / LIST_FILE] = "".join(f"{_file(name)}\n" for name in applications.certificates).encode()
    for path, content in wanted.items():
        if not path.exists() or path.read_bytes() != content:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            write_durably(path, content)
    for path in set((folder / FOLDER).glob("*")) - wanted.keys():
        path.unlink()


class CertificateLoader:
    """Which certificates the HAProxy that runs has been given since its worker started."""

    def __init__(self) -> None:
        self._life = ""
        self._loaded: dict[str, str] = {}

    async def load(self, life: str, applications: Applications, admin: CommandSocket) -> bool:
        """Have the worker of this life show these certificates from the next connection on; whether one was new.
        Streams go on. None waits for another one that is refused.

        Raises:
            CommandRefused: HAProxy refused some; the others are in use.
            Unreachable: HAProxy did not respond.
        """
        if self._life != life:
            self._life, self._loaded = life, {}
        is_new, problems = False, list[str]()
        for name, pem in applications.certificates.items():
            if self._loaded.get(name) == pem:
                continue
            try:
                await replace_file("cert", _file(name), pem, admin)
                self._loaded[name], is_new = pem, True
            except CommandRefused as error:
                problems.append(str(error))
        if problems:
            raise CommandRefused("; ".join(problems))
        return is_new


def _file(name: str) -> str:
    return f"{FOLDER}/{name}.pem"
