"""TLS between an ingress and the other hosts of its fleet: to cells, to other regions' ingresses, and from those. What
HAProxy's configuration says of it, which is pure text, and how new certificates get into one that runs.

Both ends show a certificate of the fleet. Of the other's the chain, the revocation list and the name are checked: the
names of cells and ingresses come from the table. Applications' connections are none of these.
"""

import math
from pathlib import Path

from engine_agent.ingress.command_socket import CommandRefused, CommandSocket
from engine_agent.node.identity import BUNDLE_FILE, COMBINED_FILE, REVOKED_FILE, TLS_FOLDER, Identity
from engine_agent.protocol.identity import IdentityKind
from engine_agent.protocol.ports import hop_port

CERTIFICATE, AUTHORITIES, REVOKED = (f"{TLS_FOLDER}/{name}" for name in (COMBINED_FILE, BUNDLE_FILE, REVOKED_FILE))
"""As the configuration names them: in the folder of the ingress, which they never leave. HAProxy reads them while it is
root still, if it ever was."""
KINDS = {REVOKED: "crl-file", AUTHORITIES: "ca-file", CERTIFICATE: "cert"}
"""In the order in which new ones are used: an authority without its revocation list signs nothing that counts, and what
it signed is shown last."""
HOPS = "hops"
"""The name of the socket on which other regions' ingresses come in."""
MAX_FILE_BYTES = 24 * 1024
"""Half of the smallest buffer that a command with its content must fit into: some 300 revoked certificates. What is
longer, a reload takes."""
RELOAD_EVERY_S = 30.0
"""At most, for files that are too long."""
_FILES = f"crt {CERTIFICATE} ca-file {AUTHORITIES} crl-file {REVOKED} verify required ssl-min-ver TLSv1.3"


def server_arguments(tls_name: str) -> list[str]:
    """Of a server line, also at run time: health checks, too, use TLS and check the name."""
    # A session that is resumed shows no certificate. Without a name to ask for (SNI) connections to a server are all
    # alike, and so are shared.
    return [f"ssl {_FILES} verifyhost {tls_name} check-ssl no-ssl-reuse"] if tls_name else []


def global_lines(fleet: str) -> list[str]:
    """No session is kept, and so none resumed: a certificate that was revoked would never be looked at again."""
    return ["tune.ssl.cachesize 0"] if fleet else []


def listener_lines(fleet: str, host: str, ingress_port: int) -> list[str]:
    """Where other regions' ingresses and the control plane come in, and nobody else, whatever certificate of the fleet
    it has."""
    if not fleet:
        return []
    ends = f".{IdentityKind.INGRESS}.{fleet} .{IdentityKind.CONTROL}.{fleet}"
    return [
        f"bind {host}:{hop_port(ingress_port)} proto h1 name {HOPS} ssl {_FILES} no-tls-tickets",
        f"tcp-request session reject if {{ so_name {HOPS} }} !{{ ssl_c_s_dn(cn) -m end {ends} }}",
    ]


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
        self._taken_by_reload: dict[str, str] = {}
        self._too_long: dict[str, str] = {}
        self._reload_after_s = -math.inf

    def are_there(self) -> bool:
        return all(path.exists() for path in self._paths.values())

    async def load(self, life: str, admin: CommandSocket) -> bool:
        """Have the worker of this life use what lies in the files now; whether that was new. Streams go on. No file
        waits for another one that cannot be used.

        Raises:
            CommandRefused: HAProxy refused some, or they cannot be read; the others are in use.
            Unreachable: HAProxy did not respond.
        """
        if self._life != life:
            self._life, self._loaded = life, {}
        self._too_long.clear()
        is_new, problems = False, list[str]()
        for name, kind in KINDS.items():
            try:
                text = _without_blank_lines(self._paths[name])
                if len(text) > MAX_FILE_BYTES:
                    if self._taken_by_reload.get(name) != text:
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
        """Whether the last `load` left files that are too long for a command; True again `RELOAD_EVERY_S` later."""
        if not self._too_long or now_s < self._reload_after_s:
            return False
        self._reload_after_s = now_s + RELOAD_EVERY_S
        return True

    def reloaded(self) -> None:
        """Every worker from now on has read at least what the last `load` left."""
        self._taken_by_reload |= self._too_long


def _without_blank_lines(path: Path) -> str:
    """A blank line ends the content of a command."""
    return "".join(f"{line}\n" for line in path.read_text(encoding="ascii").splitlines() if line.strip())


async def replace_file(kind: str, name: str, text: str, admin: CommandSocket) -> None:
    """Have a worker use a text, without blank lines, for a file that its configuration names.

    Raises:
        CommandRefused: it cannot; what it used before goes on.
        Unreachable: it did not respond.
    """
    said = await admin.send(f"set ssl {kind} {name} <<\n{text}\n")
    if "ransaction" not in said:
        raise CommandRefused(f"set ssl {kind} {name}: {said.strip()[:300]}")
    said = await admin.send(f"commit ssl {kind} {name}")
    if "Success!" not in said:
        await admin.send(f"abort ssl {kind} {name}")
        raise CommandRefused(f"commit ssl {kind} {name}: {said.strip()[:300]}")
