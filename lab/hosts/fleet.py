"""A fleet on the laboratory's hosts: c1 and c2 run the control plane as `make up` does, on a shared database.
Every node and ingress joins by the command that `switchyard machine add` prints, as any host would. Installed programs
start when the host boots."""

import contextlib
import os
import shlex
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx

from controlplane.embedded.state_directory import OPERATOR, StateDirectory
from lab.hosts import client
from lab.hosts.file_tree import START_AT_BOOT, write
from lab.hosts.places import CHECKOUT, Places
from lab.hosts.topology import DATABASE, Host, NoLaboratory, Role, Topology, database_url

FIRST_CONTROL, SECOND_CONTROL = "c1", "c2"
WEB_PORT, AGENT_PORT, INGRESS_PORT = 8000, 8443, 8080
CONTROL_HOME = "/var/lib/switchyard"
TOKEN, SETTINGS = "operator-token", "settings.json"
"""Files of that home which every control host needs."""
START_SCRIPT = f"{START_AT_BOOT}/switchyard.start"
INSTANCE_TYPE = "local.cpu"
DEPLOYMENT, NODES_PER_CELL = "sim-70b", 2
INVITED_FOR_S = 3600
UP_WITHIN_S = 600.0
READY_WITHIN_S = 600.0
JOINS_AT_ONCE = 2
"""Each installs and imports an agent: on the few cores that all hosts share, more would make all of them late."""
JOIN_TRIES = 3
ANSWERS_WITHIN_S = 60.0
POLL_S = 0.25
Row = dict[str, Any]


@cache
def _client() -> httpx.Client:
    """Each new one reads all certificates that there are, which takes longer than most answers. It keeps no connection:
    who answers may lose its power."""
    return httpx.Client(limits=httpx.Limits(max_keepalive_connections=0))


@dataclass(frozen=True, slots=True)
class Ports:
    """On the real host's loopback: of the dashboard, and of the first ingress; the others follow upwards."""

    web: int
    ingress: int

    def forwards(self, topology: Topology) -> list[client.Forward]:
        ingresses = [host for host in topology.hosts.values() if host.role is Role.INGRESS]
        return [
            client.Forward(self.web, FIRST_CONTROL, WEB_PORT, by_loopback=True),
            *(client.Forward(self.ingress + number, host.name, INGRESS_PORT) for number, host in enumerate(ingresses)),
        ]

    def second_dashboard(self, topology: Topology) -> list[client.Forward]:
        """That of the second host of the control plane, one port above the first one's; none without that host."""
        has_one = SECOND_CONTROL in topology.hosts
        return [client.Forward(self.web + 1, SECOND_CONTROL, WEB_PORT, by_loopback=True)] if has_one else []


def read_ports(environ: Mapping[str, str]) -> Ports:
    found = []
    for name, default in (("SWITCHYARD_PORT", "8000"), ("SWITCHYARD_INGRESS_PORT", "8080")):
        text = environ.get(name) or default
        if not (text.isascii() and text.isdecimal() and 1024 <= int(text) <= 65000):
            raise NoLaboratory(f"{name} is {text!r}: give a port from 1024 to 65000.")
        found.append(int(text))
    return Ports(*found)


def exports(topology: Topology, host: Host, more: Mapping[str, str] = MappingProxyType({})) -> str:
    """Returns the environment of a control host's launcher as lines of a shell. `more` precedes the defaults."""
    controls = [each for each in topology.hosts.values() if each.role is Role.CONTROL]
    shared = {"DATABASE_URL": database_url(topology.host(DATABASE).address)} if DATABASE in topology.hosts else {}
    environment = {
        "SWITCHYARD_HOME": CONTROL_HOME,
        "SWITCHYARD_CACHE": "/var/cache/switchyard",
        "SWITCHYARD_AGENT_LISTEN": "0.0.0.0",  # noqa: S104 - in the laboratory's network
        "SWITCHYARD_AGENT_URL": ",".join(f"https://{each.address}:{AGENT_PORT}" for each in controls),
        "SWITCHYARD_ALLOWED_HOSTS": f"{host.name},{host.address},127.0.0.1,localhost",
        "SWITCHYARD_DEMO_PROVIDER": "machines",
        "ENGINE": "sim",
        **shared,
        **more,
    }
    return "\n".join(f"export {name}={shlex.quote(value)}" for name, value in environment.items())


def start_script(topology: Topology, host: Host, python: Path, more: Mapping[str, str] = MappingProxyType({})) -> str:
    """What a host of the control plane starts when it boots: the launcher, once what that needs is there."""
    lines = ["#!/bin/sh", f"cd '{CHECKOUT}'", exports(topology, host, more)]
    if host.name != FIRST_CONTROL:
        lines.append(_wait_line(f"[ -e {CONTROL_HOME}/{SETTINGS} ]"))
    if DATABASE in topology.hosts:
        asked = "import os, psycopg; psycopg.connect(os.environ['DATABASE_URL'], connect_timeout=2)"
        lines.append(_wait_line(f"'{python}' -c \"{asked}\" 2>/dev/null"))
    return "\n".join([*lines, f"exec '{python}' -m controlplane.embedded up", ""])


def _wait_line(command: str) -> str:
    return f"until {command}; do sleep 0.5; done"


def database_script(host: Host, python: Path) -> str:
    lines = ["#!/bin/sh", f"cd '{CHECKOUT}'", f"export SWITCHYARD_HOME={CONTROL_HOME}"]
    return "\n".join([*lines, f"exec '{python}' -m lab.hosts.database {host.address}", ""])


def install_control_plane(
    places: Places, topology: Topology, python: Path, more: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Make its hosts start the control plane at their next boot, with this additional environment."""
    for host in topology.hosts.values():
        if host.role is Role.CONTROL:
            write(places.files_of(host.name), START_SCRIPT, start_script(topology, host, python, more))
        elif host.role is Role.DATABASE:
            write(places.files_of(host.name), START_SCRIPT, database_script(host, python))


class Fleet:
    """The fleet of a laboratory that runs. `say`: where progress goes, a line each."""

    def __init__(self, places: Places, topology: Topology, ports: Ports, say: Callable[[str], None]) -> None:
        self._places, self._topology, self._say = places, topology, say
        self.url = f"http://127.0.0.1:{ports.web}"
        self.control_urls = {FIRST_CONTROL: self.url}
        """Host of the control plane -> where its dashboard answers."""
        self.control_urls |= {each.host: f"http://127.0.0.1:{each.here}" for each in ports.second_dashboard(topology)}
        self.token = places.files_of(FIRST_CONTROL) / CONTROL_HOME.strip("/") / TOKEN

    def login(self) -> str:
        home = StateDirectory(self.token.parent)
        password = f", password {home.secrets().operator_password}" if home.settings.exists() else ""
        return (
            f"  Dashboard  {self.url}/\n"
            f"  Login      user {OPERATOR}{password}\n"
            f"  API        {self.url}/api/v1/  (bearer token in {self.token})"
        )

    def ask(self, method: str, path: str, body: Row | None = None) -> Any:
        """Sends one request to the REST API as the operator. Reads go to the second control host if the first one does
        not answer. Raises NoLaboratory if it refuses, or does not answer."""
        if not (token := self._token()):
            raise NoLaboratory(f"{method} {path}: {FIRST_CONTROL} has made no token yet; see its /var/log/boot.log")
        headers = {"Authorization": f"Bearer {token}"}
        try:
            return self._ask(method, f"{self.url}/api/v1/{path}", body, headers)
        except NoLaboratory:
            for url in [*self.control_urls.values()][1:] if method == "GET" else ():
                with contextlib.suppress(NoLaboratory):
                    return self._ask(method, f"{url}/api/v1/{path}", body, headers)
            raise

    @staticmethod
    def _ask(method: str, path: str, body: Row | None, headers: dict[str, str]) -> Any:
        try:
            answer = _client().request(method, path, json=body, headers=headers, timeout=ANSWERS_WITHIN_S)
            found = answer.json()
        except (httpx.HTTPError, ValueError) as error:
            raise NoLaboratory(f"{method} {path}: {error!r}") from None
        if answer.is_error:
            raise NoLaboratory(f"{method} {path}: {answer.status_code} {answer.text[:300]}")
        return found

    def _token(self) -> str:
        return self.token.read_text().strip() if self.token.exists() else ""

    def bring_up(self) -> None:
        """Wait for the control plane, have every host join that has not yet, and wait until every cell is ready. Raises
        NoLaboratory if one of these did not happen; the text says what was last seen of it."""
        self.until(self._regions, UP_WITHIN_S, "the control plane does not answer")
        self._say("the control plane answers")
        self._give_secrets()
        self._want_cells()
        self._join_all()
        self.until(self._every_cell_is_ready, READY_WITHIN_S, "not every cell is ready")
        self._say("every cell is ready")

    def _give_secrets(self) -> None:
        """Copy the files that make further hosts part of this control plane; they wait for the last one."""
        for host in self._topology.hosts.values():
            home = self._places.files_of(host.name) / CONTROL_HOME.strip("/")
            if host.role is not Role.CONTROL or (home / SETTINGS).exists():
                continue
            home.mkdir(exist_ok=True)
            home.chmod(0o711)
            for name in (TOKEN, SETTINGS):
                content = (self.token.parent / name).read_bytes()
                with os.fdopen(os.open(home / f"{name}.new", os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
                    file.write(content)
                (home / f"{name}.new").rename(home / name)

    def _want_cells(self) -> None:
        """Creates a cell in each region with enough hosts for one. Numbers that were changed in the meantime stay."""
        deployment = f"deployments/{DEPLOYMENT}/"
        wanted = {place["region"]: place["cells"] for place in self.ask("GET", deployment)["regions"]}
        served = self._topology.regions if self._topology.nodes >= NODES_PER_CELL else ()
        changes = {region: int(region in served) for region in wanted if (region in served) != bool(wanted[region])}
        if changes:
            places = [{"region": region, "cells": cells} for region, cells in changes.items()]
            self.ask("PATCH", deployment, {"regions": places})

    def _regions(self) -> str:
        found = {region["name"] for region in self.ask("GET", "regions/")["results"]}
        return "" if found >= set(self._topology.regions) else f"its regions are {sorted(found)}"

    def _every_cell_is_ready(self) -> str:
        cells = self.rows("cells")
        waiting = [f"{cell['id']} is {cell['state']}" for cell in cells if cell["state"] not in {"ready", "stopped"}]
        is_there = cells or self._topology.nodes < NODES_PER_CELL
        return "; ".join(waiting[:3]) if is_there else "there is none"

    def rows(self, kind: str) -> list[Row]:
        rows: list[Row] = self.ask("GET", f"{kind}/?page_size=500")["results"]
        return rows

    def until(self, missing: Callable[[], str], within_s: float, otherwise: str) -> None:
        deadline = time.monotonic() + within_s
        while True:
            try:
                if not (problem := missing()):
                    return
            except NoLaboratory as error:
                problem = str(error)
            if time.monotonic() > deadline:
                raise NoLaboratory(f"After {within_s:.0f} s {otherwise}: {problem}.")
            time.sleep(POLL_S)

    def _join_all(self) -> None:
        hosts = [host for host in self._topology.hosts.values() if host.role in {Role.NODE, Role.INGRESS}]
        waiting = [host for host in hosts if not self._has_joined(host)]
        groups: dict[tuple[str, Role], list[Host]] = {}
        for host in waiting:
            groups.setdefault((host.site, host.role), []).append(host)
        lines = {group: self._line(*group, len(members)) for group, members in groups.items()}
        with ThreadPoolExecutor(JOINS_AT_ONCE) as pool:
            for line in pool.map(lambda host: self._join(host, lines[host.site, host.role]), waiting):
                self._say(line)

    def _has_joined(self, host: Host) -> bool:
        files, home = self._places.files_of(host.name), self._places.user()[1].strip("/")
        return any(
            (files / path / "current").is_symlink() for path in ("opt/switchyard", f"{home}/.local/share/switchyard")
        )

    def _line(self, region: str, role: Role, count: int) -> str:
        body = {"region": region, "role": role.value, "count": count, "expires_in_s": INVITED_FOR_S}
        if role is Role.NODE:
            body["instance_type"] = INSTANCE_TYPE
        line: str = self.ask("POST", "machines/invitations/", body)["line"]
        return f"{line} --allow-reboot" if role is Role.NODE else line

    def _join(self, host: Host, line: str) -> str:
        output = ""
        for _ in range(JOIN_TRIES):
            began = time.monotonic()
            done = client.captured(self._places, host.name, ["sh", "-c", line])
            if self._has_joined(host):  # what `curl` says is not the status of `curl … | sh`
                return f"{host.name} joined in {time.monotonic() - began:.1f} s"
            output = (done.stderr or done.stdout).strip()[-500:]
            self._say(f"{host.name} did not join yet: {output}")
        raise NoLaboratory(f"{host.name} did not join in {JOIN_TRIES} tries: {output}")
