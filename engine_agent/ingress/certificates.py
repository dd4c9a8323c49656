"""Gives a running HAProxy new certificates, without a reload where they fit into a command. Links to other hosts of the
fleet (cells, other regions' ingresses) use mutual TLS: chain, revocation list and name of the other end are checked.
Applications get server certificates that the control plane states."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from engine_agent.ingress.bad_table import BadTable
from engine_agent.ingress.command_socket import CommandRefused, CommandSocket
from engine_agent.node.identity import BUNDLE_FILE, COMBINED_FILE, REVOKED_FILE, TLS_FOLDER, Identity
from engine_agent.node.journal import write_durably
from engine_agent.protocol.identity import is_identity_id
from engine_agent.protocol.ingress_messages import ApplicationTls
from engine_agent.protocol.states import PlainHttp

CERTIFICATE, AUTHORITIES, REVOKED = (f"{TLS_FOLDER}/{name}" for name in (COMBINED_FILE, BUNDLE_FILE, REVOKED_FILE))
"""As the configuration names them, in the folder of the ingress. HAProxy reads them before it gives up root."""
LINK_FILES = f"crt {CERTIFICATE} ca-file {AUTHORITIES} crl-file {REVOKED} verify required ssl-min-ver TLSv1.3"
KINDS = {REVOKED: "crl-file", AUTHORITIES: "ca-file", CERTIFICATE: "cert"}
"""In the order of replacement: an authority counts only with its revocation list, and its certificates come last."""
MAX_FILE_BYTES = 24 * 1024
"""Half of the smallest buffer, which a command with its content has to fit: some 300 revoked certificates. Longer files
need a reload."""
RELOAD_EVERY_S = 30.0
"""At most, for files that are too long for a command."""
APPLICATION_FOLDER = "applications"
"""In the folder of the ingress."""
APPLICATION_LIST = f"{APPLICATION_FOLDER}/certificates.list"
"""A list, because a line of a configuration has 64 words at most."""
CIPHERS = ":".join(
    f"ECDHE-{key}-{cipher}"
    for cipher in ("AES128-GCM-SHA256", "AES256-GCM-SHA384", "CHACHA20-POLY1305")
    for key in ("ECDSA", "RSA")
)
"""For TLS 1.2: forward secrecy and authenticated encryption (Mozilla's "intermediate" without DHE)."""


@dataclass(frozen=True, slots=True)
class Applications:
    """How applications reach this ingress. `certificates`: PEM with chain and key, by name; the first is the default.
    `plain_http`: whom the port without TLS serves."""

    certificates: Mapping[str, str] = field(default_factory=dict, repr=False)
    plain_http: PlainHttp = PlainHttp.SERVE

    @property
    def refuses_plain_http(self) -> bool:
        return self.plain_http is not PlainHttp.SERVE


def applications_from(stated: ApplicationTls, before: Applications) -> Applications:
    """The statement of the control plane, checked as far as possible without HAProxy. A certificate without text,
    because the control plane cannot decrypt its key, stays as it was `before`, or is left out if it is new. Raises
    BadTable if something in it cannot be carried out."""
    named = {each.name: each.pem or before.certificates.get(each.name, "") for each in stated.certificates}
    if len(named) < len(stated.certificates):
        raise BadTable("two certificates have one name")
    certificates = {name: pem for name, pem in named.items() if pem}
    for name, pem in certificates.items():
        if not is_identity_id(name):
            raise BadTable(f"certificate {name!r}: a name has lower-case letters, digits, - and _")
        if len(pem) > MAX_FILE_BYTES or not pem.isascii() or "\n\n" in pem:
            raise BadTable(f"certificate {name}: must be PEM without blank lines, at most {MAX_FILE_BYTES} characters")
    try:
        return Applications(certificates, PlainHttp(stated.plain_http))
    except ValueError:
        raise BadTable(f"plain_http {stated.plain_http!r} is none of {', '.join(PlainHttp)}") from None


class LinkFiles:
    """The certificate, the authorities and the revocation lists of one HAProxy that runs."""

    def __init__(self, identity: Identity) -> None:
        self._paths = {
            CERTIFICATE: identity.combined_file,
            AUTHORITIES: identity.bundle_file,
            REVOKED: identity.revoked_file,
        }
        self._life = ""
        self._loaded: dict[str, str] = {}
        self._loaded_by_reload: dict[str, str] = {}
        self._too_long: dict[str, str] = {}
        self._reload_after_s = -math.inf

    def exist(self) -> bool:
        return all(path.exists() for path in self._paths.values())

    async def load(self, life: str, admin: CommandSocket) -> bool:
        """Load the files into the worker with this `life`. Returns whether one was new. Streams continue, and a file
        that cannot be used does not delay the others. Raises CommandRefused if HAProxy refused some files, or they
        could not be read; the others are in use. Raises Unreachable if HAProxy did not respond."""
        if self._life != life:
            self._life, self._loaded = life, {}
        self._too_long.clear()
        is_new, problems = False, list[str]()
        for name, kind in KINDS.items():
            try:
                text = _without_blank_lines(self._paths[name])
                if len(text) > MAX_FILE_BYTES:
                    if self._loaded_by_reload.get(name) != text:
                        self._too_long[name] = text
                elif self._loaded.get(name) != text:
                    await replace_file(kind, name, text, admin)
                    self._loaded[name], is_new = text, True
            except (CommandRefused, OSError, UnicodeDecodeError) as error:
                problems.append(str(error))
        if problems:
            raise CommandRefused("; ".join(problems))
        return is_new

    def needs_reload(self, now_s: float) -> bool:
        """Whether the last `load` left files that are too long for a command. True at most every `RELOAD_EVERY_S`."""
        if not self._too_long or now_s < self._reload_after_s:
            return False
        self._reload_after_s = now_s + RELOAD_EVERY_S
        return True

    def reloaded(self) -> None:
        """Note that all new workers have read the files that the last `load` left."""
        self._loaded_by_reload |= self._too_long


def _without_blank_lines(path: Path) -> str:
    """A blank line would end the content of a command."""
    return "".join(f"{line}\n" for line in path.read_text(encoding="ascii").splitlines() if line.strip())


async def replace_file(kind: str, name: str, text: str, admin: CommandSocket) -> None:
    """Replace a file that the configuration names, in the worker's memory. `text` has no blank lines. Raises
    CommandRefused if HAProxy refused it and keeps the old one. Raises Unreachable if HAProxy did not respond."""
    output = await admin.send(f"set ssl {kind} {name} <<\n{text}\n")
    if "ransaction" not in output:
        raise CommandRefused(f"set ssl {kind} {name}: {output.strip()[:300]}")
    output = await admin.send(f"commit ssl {kind} {name}")
    if "Success!" not in output:
        await admin.send(f"abort ssl {kind} {name}")
        raise CommandRefused(f"commit ssl {kind} {name}: {output.strip()[:300]}")


def write_application_certificates(folder: Path, certificates: Mapping[str, str]) -> None:
    """Write the files that the configuration in `folder` names, readable by their owner only, and delete all others.
    Raises OSError if one could not be written; each file is the old or the new one as a whole."""
    wanted = {folder / _application_file(name): pem.encode() for name, pem in certificates.items()}
    if wanted:
        wanted[folder / APPLICATION_LIST] = "".join(f"{_application_file(name)}\n" for name in certificates).encode()
    for path, content in wanted.items():
        if not path.exists() or path.read_bytes() != content:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            write_durably(path, content)
    for path in set((folder / APPLICATION_FOLDER).glob("*")) - wanted.keys():
        path.unlink()


class ApplicationCertificates:
    """The certificates that a running worker has received for applications."""

    def __init__(self) -> None:
        self._life = ""
        self._loaded: dict[str, str] = {}

    async def load(self, life: str, certificates: Mapping[str, str], admin: CommandSocket) -> bool:
        """Load these certificates into the worker with this `life`, for new connections. Returns whether one was new.
        Raises CommandRefused if HAProxy refused some; the others are in use. Raises Unreachable if HAProxy did not
        respond."""
        if self._life != life:
            self._life, self._loaded = life, {}
        is_new, problems = False, list[str]()
        for name, pem in certificates.items():
            if self._loaded.get(name) == pem:
                continue
            try:
                await replace_file("cert", _application_file(name), pem, admin)
                self._loaded[name], is_new = pem, True
            except CommandRefused as error:
                problems.append(str(error))
        if problems:
            raise CommandRefused("; ".join(problems))
        return is_new


def _application_file(name: str) -> str:
    return f"{APPLICATION_FOLDER}/{name}.pem"
