"""`python -m engine_agent join`, which the script of the join line calls after unpacking the agent, and `leave`.
Joining checks the host, enrols it and installs its machine agent. If it fails, nothing is left of it, and the errors
say why. Leaving first has the fleet replace what serves here; `leave --now` does not wait."""

import argparse
import asyncio
import base64
import contextlib
import hashlib
import hmac
import http.client
import json
import os
import secrets
import shutil
import socket
import ssl
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from engine_agent.engines.builds.store import host_facts
from engine_agent.node.enrolment import NONCE_FILE, Enrolment, EnrolmentRefused, EnrolmentUnreachable
from engine_agent.node.identity import Identity
from engine_agent.node.imds import CLOUD_VARIABLE
from engine_agent.node.journal import write_durably
from engine_agent.node.machine import service
from engine_agent.node.machine.facts import Seen, failures, read_driverless, read_facts
from engine_agent.node.machine.paths import HostPaths, Joined
from engine_agent.node.machine.reboots import COMMAND_VARIABLE, DEFAULT_COMMAND
from engine_agent.node.machine.releases import let_all_read
from engine_agent.node.machine.tenant import Tenant, tenant_names
from engine_agent.node.telemetry.fingerprint import AGENT_ROOT
from engine_agent.protocol.engine_builds import NeededBuild, why_no_build_runs
from engine_agent.protocol.machine_messages import MachineFacts, machine_id_of
from engine_agent.protocol.ports import PORTS_PER_NODE, PROXY, first_ports, ingress_ports
from engine_agent.protocol.states import AgentKind
from engine_agent.protocol.strict_json import strict_loads

TIMEOUT_S = 20.0
MAX_RESPONSE_BYTES = 64 * 1024


class ControlRefused(Exception):
    pass


class JoinClient:
    """Calls of the control plane with one token, before the host has a credential. `pin` is the control plane's key as
    for curl (`sha256//…;sha256//…`); "" for plain links."""

    def __init__(self, server: str, pin: str, token: str) -> None:
        self._server, self._pin, self.token = urlsplit(server), pin, token

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Sends JSON and returns the JSON of the answer. Raises ControlRefused without an answer within `TIMEOUT_S`,
        with another key than the pinned one, or with a status other than 2xx."""
        connection = self._connection()
        headers = {"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"}
        try:
            connection.connect()
            self._check_pin(connection)
            connection.request("POST", path, json.dumps(body), headers)
            answer = connection.getresponse()
            content = answer.read(MAX_RESPONSE_BYTES)
            found = strict_loads(content) if content else {}
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise ControlRefused(f"{self._server.geturl()} does not answer: {error}") from None
        finally:
            connection.close()
        if answer.status >= 300:
            raise ControlRefused(str(found.get("error", answer.reason)))
        return dict(found)

    def _connection(self) -> http.client.HTTPConnection:
        host, port = self._server.hostname or "", self._server.port
        if self._server.scheme == "http":
            return http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # the pinned key is checked instead
        return http.client.HTTPSConnection(host, port, timeout=TIMEOUT_S, context=context)

    def _check_pin(self, connection: http.client.HTTPConnection) -> None:
        if self._server.scheme == "http":
            return
        sock = connection.sock
        shown = sock.getpeercert(binary_form=True) if isinstance(sock, ssl.SSLSocket) else None
        if not shown or not any(hmac.compare_digest(pin_of(shown), pin) for pin in self._pin.split(";")):
            raise ControlRefused(f"{self._server.geturl()} shows another key than the pinned one")


def pin_of(certificate: bytes) -> str:
    """The key of a certificate (DER) as curl's --pinnedpubkey expects it."""
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    key = x509.load_der_x509_certificate(certificate).public_key()
    digest = hashlib.sha256(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).digest()
    return f"sha256//{base64.b64encode(digest).decode()}"


OF_USER_DATA = ("SWITCHYARD_CACHE", "AWS_REGION", "AWS_ENDPOINT_URL")
NODE_PORT, INGRESS_PORT = 21000, 8080
MOST_DIGITS = 5
JOIN_POLL_S = 0.1
ACCEPT_LIMIT_S = 10.0


class NotJoined(Exception):
    """The host did not join; the sentences say why."""

    def __init__(self, *sentences: str) -> None:
        super().__init__("; ".join(sentences))
        self.sentences = sentences


def run(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m engine_agent join", description=__doc__)
    parser.add_argument("--code", required=True, type=Path, help="folder of the installation")
    parser.add_argument("--release", required=True, type=Path, help="folder below it with this unpacked release")
    parser.add_argument("--server", required=True)
    parser.add_argument("--pin", default="", help="sha256//… of the control plane's key")
    parser.add_argument("--port", default="0", help="first port; default: 21000 for a node, 8080 for an ingress")
    parser.add_argument("--nonce", default="", help="file with the nonce that this machine used as proof, if it did")
    parser.add_argument("--allow-reboot", action="store_true", help="let the control plane reboot it to repair it")
    options = parser.parse_args(argv)
    client = JoinClient(options.server, options.pin, sys.stdin.readline().strip())
    try:
        nonce = Path(options.nonce).read_text(encoding="ascii").strip() if options.nonce else ""
        paths, reboot = HostPaths(options.code), options.allow_reboot
        message = join(paths, options.release, client, options.server, options.port, nonce, allow_reboot=reboot)
    except (OSError, ValueError) as error:
        sys.stderr.write(f"switchyard: the nonce cannot be read: {error}\n")
        return 1
    except NotJoined as refusal:
        for sentence in refusal.sentences:
            sys.stderr.write(f"switchyard: {sentence}\n")
        return 1
    sys.stdout.write(f"{message}\n")
    return 0


def join(
    paths: HostPaths,
    release: Path,
    client: JoinClient,
    server: str,
    port: str,
    nonce: str = "",
    *,
    allow_reboot: bool = False,
) -> str:
    """Checks the host, enrols it and starts its agent; returns the message for the user. `nonce`: the proof that the
    machine used; "": a new one is drawn. Raises NotJoined if it failed, and nothing is left of it."""
    try:
        invitation = client.post("/agents/join/check", {"port": 0, "nonce": secrets.token_hex(16)})
    except ControlRefused as refusal:
        raise NotJoined(str(refusal)) from None
    facts = _check_host(paths, client, invitation, _ports(client, port, str(invitation["role"])))
    try:
        machine, cloud = str(invitation.get("machine", "")), str(invitation.get("cloud", ""))
        joined = Joined(server, facts, machine, _variables(cloud) if cloud else {})
        reboot = os.environ.get(COMMAND_VARIABLE) or DEFAULT_COMMAND if allow_reboot else ""
        return _install(paths, release, client, joined, invitation, nonce or secrets.token_hex(32), reboot)
    except EnrolmentRefused as refusal:  # the control plane knows already
        raise NotJoined(str(refusal).rpartition(" answered 403: ")[2]) from None
    except NotJoined as refusal:
        with contextlib.suppress(ControlRefused):
            client.post("/agents/join/refused", {"reason": str(refusal)})
        raise


def ports_of(role: str, stated: str) -> list[int]:
    """All ports that an agent of this role needs, its first one first. `stated`: as for `--port`; 0: the default.
    Raises ValueError if it is not a valid first port; the text says which are."""
    is_node = role == AgentKind.NODE
    possible = first_ports(AgentKind(role))
    first = int(stated) if stated.isascii() and stated.isdecimal() and len(stated) <= MOST_DIGITS else -1
    first = first or (NODE_PORT if is_node else INGRESS_PORT)
    if first not in possible:
        raise ValueError(
            f"--port {stated[:20]!r} cannot be the first port of a {role}: use one from {possible[0]} to {possible[-1]}"
        )
    if is_node:
        return list(range(first, first + PORTS_PER_NODE))
    return list(ingress_ports(first).values())


def _ports(client: JoinClient, stated: str, role: str) -> list[int]:
    try:
        return ports_of(role, stated)
    except ValueError as wrong:
        with contextlib.suppress(ControlRefused):
            client.post("/agents/join/refused", {"reason": str(wrong)})
        raise NotJoined(str(wrong)) from None


def _check_host(
    paths: HostPaths, client: JoinClient, invitation: dict[str, object], ports: Sequence[int]
) -> MachineFacts:
    is_node, first = invitation["role"] == AgentKind.NODE, ports[0]
    address = str(invitation["address"])
    began = time.time()
    local = _is_local(address)
    taken = [one for one in ports if local and not _is_free(address, one)]
    trouble = ""
    try:
        if local and not taken:
            nonce = secrets.token_hex(16)
            with _answering(address, first + (PROXY if is_node else 0), nonce):
                began = time.time()
                answer = client.post("/agents/join/check", {"port": first, "nonce": nonce})
                trouble = str(answer["trouble"])
        else:
            answer = client.post("/agents/join/check", {"port": 0, "nonce": secrets.token_hex(16)})
    except (ControlRefused, OSError) as refusal:
        raise NotJoined(str(refusal)) from None
    ahead_s = (began + time.time()) / 2 - float(str(answer["time"]))
    facts = read_facts(address, first, paths.state, clock_ahead_s=ahead_s)
    named = f"{first} to {ports[-1]}" if is_node else ", ".join(map(str, ports))
    found = failures(facts, read_driverless(), Seen(address, local, trouble), taken, named)
    found += [why] if (why := _why_no_build(invitation, facts)) else []
    if found:
        with contextlib.suppress(ControlRefused):
            client.post("/agents/join/refused", {"reason": "; ".join(found)})
        raise NotJoined(*found)
    return facts


def _why_no_build(invitation: dict[str, object], facts: MachineFacts) -> str:
    try:
        needed = msgspec.convert(invitation.get("builds", ()), tuple[NeededBuild, ...])
    except msgspec.ValidationError as error:
        return f"the control plane states builds that this agent cannot read: {error}"
    return why_no_build_runs(needed, {device.kind for device in facts.devices}, host_facts())


def _variables(cloud: str) -> dict[str, str]:
    """Variables of the machine's user data about its cloud, for agents that systemd starts."""
    stated = {name: os.environ[name] for name in OF_USER_DATA if os.environ.get(name)}
    return {CLOUD_VARIABLE: cloud, **stated}


def _install(
    paths: HostPaths,
    release: Path,
    client: JoinClient,
    joined: Joined,
    invitation: dict[str, object],
    nonce: str,
    reboot_command: str,
) -> str:
    machine = joined.machine or machine_id_of(nonce)
    try:
        paths.home.mkdir(parents=True, mode=0o700, exist_ok=True)
        (paths.home / NONCE_FILE).write_text(f"{nonce}\n", encoding="ascii")
        paths.keep(joined)
        if reboot_command:
            write_durably(paths.reboot_command, f"{reboot_command}\n".encode())
        if invitation["bundle"]:
            Identity(paths.home).store_trust(bundle=str(invitation["bundle"]), revoked="")
        enrolment = Enrolment(joined.server, AgentKind.MACHINE, machine, paths.home, client.token)
        asyncio.run(enrolment.enrol())
        let_all_read(release)
        paths.current.symlink_to(release)
        notice = service.start(paths)
        _await_order(paths)
    except (EnrolmentUnreachable, OSError, ValueError, service.ServiceError) as error:
        _undo(paths)
        raise NotJoined(str(error)) from None
    except (EnrolmentRefused, NotJoined):
        _undo(paths)
        raise
    return "\n".join(filter(None, (f"switchyard: this host is machine {machine} in {invitation['region']}", notice)))


def _undo(paths: HostPaths) -> None:
    """Stops everything. An agent that connected late may have started its node already, whose ports the next try
    needs."""
    service.stop(paths)
    for name in tenant_names(paths):
        Tenant(name, paths, AGENT_ROOT).wipe()
    paths.current.unlink(missing_ok=True)
    for path in (paths.code / "run", *paths.of_releases):
        path.unlink(missing_ok=True)
    shutil.rmtree(paths.state, ignore_errors=True)


def _await_order(paths: HostPaths) -> None:
    """Waits until the machine agent has stored its first order: then it is connected and known. It has as long as a new
    release, because a host that has not connected is removed here and has used its token."""
    deadline = time.monotonic() + service.TRIAL_LIMIT_S
    while not (paths.home / "journal.json").exists():
        if time.monotonic() > deadline:
            last = service.last_line(paths)
            raise NotJoined(f"the machine agent did not connect within {service.TRIAL_LIMIT_S} s: {last}")
        time.sleep(JOIN_POLL_S)


@contextlib.contextmanager
def _answering(address: str, port: int, nonce: str) -> Iterator[None]:
    with socket.create_server((address, port), family=_family(address)) as server:
        server.settimeout(ACCEPT_LIMIT_S)
        threading.Thread(target=_answer, args=(server, nonce), daemon=True).start()
        yield


def _answer(server: socket.socket, nonce: str) -> None:
    with contextlib.suppress(OSError):
        while True:
            connection, _ = server.accept()
            with connection:
                connection.sendall(nonce.encode())


def _is_local(address: str) -> bool:
    with socket.socket(_family(address)) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def _is_free(address: str, port: int) -> bool:
    hosts: Sequence[str] = (address, "127.0.0.1")
    for host in hosts:
        with socket.socket(_family(host)) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError:
                return False
    return True


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


CARRIED_PYTHON = "python"
"""The join script's folder for a Python of the control plane."""
LEFT_WITHIN_S = 900.0
LEAVE_POLL_S = 0.5


def run_leave(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m engine_agent leave", description=__doc__)
    parser.add_argument("--code", required=True, type=Path, help="the folder of the installation")
    parser.add_argument("--now", action="store_true", help="stop and wipe immediately, whatever serves here")
    options = parser.parse_args(argv)
    paths = HostPaths(options.code)
    if options.now:
        left = uninstall(paths)
        if left:
            sys.stderr.write(f"switchyard: {left}\n")
        return 1 if left else 0
    return _request_leave(paths)


def _request_leave(paths: HostPaths) -> int:
    paths.leave_wish.touch()
    sys.stderr.write("switchyard: waiting until the fleet has replaced the agent of this host\n")
    deadline = time.monotonic() + LEFT_WITHIN_S
    while paths.current.is_symlink():
        if time.monotonic() > deadline:
            sys.stderr.write(
                "switchyard: the fleet has not released this host; see its page Nodes, or stop its agent now with"
                f" {paths.python} -m engine_agent leave --now --code {paths.code}\n"
            )
            return 1
        time.sleep(LEAVE_POLL_S)
    sys.stderr.write("switchyard: this host has left\n")
    return 0


def uninstall(paths: HostPaths) -> str:
    """Stops everything and removes all files. Returns what is left, or ""."""
    service.stop(paths)
    left = [trouble for name in tenant_names(paths) if (trouble := Tenant(name, paths, AGENT_ROOT).wipe())]
    if left:
        return "; ".join(left)
    for folder in (paths.state, paths.code / "releases"):
        shutil.rmtree(folder, ignore_errors=True)
    for path in (paths.code / "run", *paths.of_releases):
        path.unlink(missing_ok=True)
    paths.current.unlink(missing_ok=True)
    shutil.rmtree(paths.code / CARRIED_PYTHON, ignore_errors=True)  # last: it may run this
    try:
        paths.code.rmdir()
    except OSError:
        return f"{paths.code} is left: it contains files of other programs" if paths.code.exists() else ""
    return ""
