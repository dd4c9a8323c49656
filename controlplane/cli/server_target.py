"""Decides the server and token of a command: options, then the environment, then a profile, then the fleet of this
checkout's `make up`. It never sends a token to another server than its own."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from controlplane.cli.errors import Failure
from controlplane.cli.exit_codes import ExitCode
from controlplane.cli.profiles import Profiles

CHECKOUT = Path(__file__).resolve().parents[2]
DEFAULT_PORT = 8000
LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, slots=True)
class ConnectionOptions:
    """The options of the command line; empty: not given."""

    server: str = ""
    token: str = ""
    profile: str = ""


@dataclass(frozen=True, slots=True)
class Target:
    """`source`: origin of the token, for people; empty: there is none."""

    server: str
    token: str
    source: str


def find_target(options: ConnectionOptions, environ: Mapping[str, str], profiles: Profiles) -> Target:
    """The server and its token. Raises Failure for an unknown profile, or an invalid address."""
    name = options.profile or environ.get("SWITCHYARD_PROFILE", "")
    if name and name not in profiles.known:
        there = ", ".join(sorted(profiles.known)) or "none"
        raise Failure(f"profile {name!r} does not exist; there are: {there}", ExitCode.USAGE)
    given = options.server or ("" if options.profile else environ.get("SWITCHYARD_SERVER", ""))
    own = local_target(environ)
    if not given:
        chosen = name or profiles.current
        if chosen in profiles.known:
            stored = profiles.known[chosen]
            return _with_token(options, environ, Target(stored.server, stored.token, f"profile {chosen}"))
        return _with_token(options, environ, own)
    server = checked_server(given)
    return _with_token(options, environ, _known_for(server, name, profiles, own))


def _known_for(server: str, name: str, profiles: Profiles, own: Target) -> Target:
    """The token for a server: from the named profile, any other profile, or this machine's fleet."""
    ordered = [name, profiles.current, *sorted(profiles.known)]
    for candidate in ordered:
        stored = profiles.known.get(candidate)
        if stored is not None and same_server(stored.server, server):
            return Target(server, stored.token, f"profile {candidate}")
    return Target(server, own.token, own.source) if same_server(own.server, server) else Target(server, "", "")


def _with_token(options: ConnectionOptions, environ: Mapping[str, str], target: Target) -> Target:
    if options.token:
        return Target(target.server, options.token, "--token")
    if environ.get("SWITCHYARD_TOKEN"):
        return Target(target.server, environ["SWITCHYARD_TOKEN"], "SWITCHYARD_TOKEN")
    return target


def local_target(environ: Mapping[str, str]) -> Target:
    """Port and operator token of this checkout's `make up`."""
    home = Path(environ.get("SWITCHYARD_HOME") or CHECKOUT / ".switchyard").expanduser()
    port = environ.get("SWITCHYARD_PORT") or _published_port(home)
    try:
        token, source = (home / "operator-token").read_text().strip(), str(home / "operator-token")
    except OSError:
        token, source = "", ""
    return Target(f"http://127.0.0.1:{port}", token, source)


def _published_port(home: Path) -> int:
    try:
        return int(json.loads((home / "up.json").read_text())["port"])
    except (OSError, ValueError, KeyError, TypeError):
        return DEFAULT_PORT


def checked_server(text: str) -> str:
    """A server's address without path and trailing slash. Adds `http://` for loopback, else `https://`. Raises Failure
    if it has no host, or another scheme."""
    if "://" not in text:
        host = urlsplit(f"//{text}").hostname or ""
        text = f"{'http' if host in LOOPBACK else 'https'}://{text}"
    parts = urlsplit(text)
    try:
        port = parts.port
    except ValueError:
        port = -1
    if parts.scheme not in {"http", "https"} or not parts.hostname or port == -1:
        raise Failure(
            f"{text!r} is not a server address; give one such as https://switchyard.example.com", ExitCode.USAGE
        )
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"


def same_server(one: str, other: str) -> bool:
    """Whether both addresses are the same server; loopback has three names."""
    return _scheme_host_port(one) == _scheme_host_port(other)


def _scheme_host_port(server: str) -> tuple[str, str, int]:
    parts = urlsplit(server)
    host = LOOPBACK[0] if parts.hostname in LOOPBACK else parts.hostname or ""
    return parts.scheme, host, parts.port or (443 if parts.scheme == "https" else 80)
