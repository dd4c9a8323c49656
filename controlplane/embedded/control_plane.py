"""The control plane's own processes and management commands: their command lines, and each command run with its log
and its deadline."""

import fcntl
import sys
from collections.abc import Mapping
from pathlib import Path

from controlplane.embedded.configuration import CHECKOUT, CannotStart, Configuration
from controlplane.embedded.console import Console
from controlplane.embedded.preflight import HOST, Weights
from controlplane.embedded.processes import OneshotResult, Program, require_oneshot, run_oneshot
from controlplane.embedded.state_directory import StateDirectory
from controlplane.embedded.supervisor import Service
from controlplane.processes import BY_NAME, GATE, PROCESSES


def services(configuration: Configuration, environment: Mapping[str, str]) -> tuple[Service, ...]:
    return tuple(service(kind.role, configuration, environment) for kind in PROCESSES)


def service(name: str, configuration: Configuration, environment: Mapping[str, str]) -> Service:
    kind, options = BY_NAME[name], tuple[str, ...]()
    if kind.role == "web":
        options = ("--host", HOST, "--port", str(configuration.port))
        options += ("--agent-host", configuration.agent_listen, "--agent-port", str(configuration.agent_port))
    program = Program(
        arguments=(sys.executable, *kind.arguments, *options),
        environment={**environment, **kind.environment},
        folder=CHECKOUT,
        nice=kind.nice,
        death_signal=kind.death_signal,
    )
    return Service(name=kind.role, program=program, stop_within_s=kind.stop_within_s)


class Gate:
    """Holds back the processes of a start until `open`: they load their code while the database is prepared. They exit
    if the launcher ends first."""

    def __init__(self, path: Path) -> None:
        self.environment = {GATE: str(path)}
        self._file = path.open("w")
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def open(self) -> None:
        self._file.write("open")
        self._file.close()


def management_command(arguments: list[str], environment: Mapping[str, str]) -> Program:
    """One of Django's or our own commands."""
    return Program(arguments=(sys.executable, "manage.py", *arguments), environment=environment, folder=CHECKOUT)


_COMMAND_WITHIN_S = 120.0
_FLEET_STOP_WITHIN_S = 60.0
_STATUS_MARGIN_S = 30.0
"""For `fleet_status` to start and to say what it found, beyond the time that it waits."""


class Management:
    def __init__(self, environment: Mapping[str, str], home: StateDirectory, console: Console) -> None:
        self._environment = environment
        self._home = home
        self._console = console

    async def migrate(self, owner_url: str, role: str = "") -> None:
        """Migrate the database as its owner, then grant the application's role, if given, access to the tables. Raises
        CannotStart if it failed."""
        grant = ("grant_application", role) if role else ()
        await self._require("migrate", ("migrate", "--no-input", "--skip-checks"), grant, DATABASE_URL=owner_url)

    async def seed(self, configuration: Configuration, weights: Weights | None, password: str) -> None:
        """Record the demo fleet and the operator, and keep the rows that exist; then boot the machines that an orderly
        stop ended. Raises CannotStart if it failed."""
        arguments = ["--engine", str(configuration.engine), "--provider", str(configuration.provider)]
        if weights:
            arguments += ["--artifact-uri", weights.uri, "--artifact-digest", weights.digest]
        await self._require("seed", ("seed_demo", *arguments), ("fleet_resume",), SWITCHYARD_OPERATOR_PASSWORD=password)

    async def wait_for_cells(self, wait_s: float) -> OneshotResult:
        """Wait up to `wait_s` until every cell is ready; status 0 when so, else the last line says why not."""
        program = management_command(["fleet_status", "--wait-s", f"{wait_s:.0f}"], self._environment)
        return await run_oneshot("fleet", program, self._home, self._console, deadline_s=wait_s + _STATUS_MARGIN_S)

    async def stop_fleet(self) -> None:
        """Stop every machine of the fleet. Prints failures; the caller stops remaining processes."""
        program = management_command(["fleet_stop"], self._environment)
        try:
            await run_oneshot("fleet", program, self._home, self._console, deadline_s=_FLEET_STOP_WITHIN_S)
        except CannotStart as error:
            self._console.own(f"{error} Ending the fleet's processes directly.")

    async def _require(self, name: str, *commands: tuple[str, ...], **environment: str) -> None:
        """Run commands in one process, in this order; empty ones are left out."""
        arguments = [sys.executable, "-m", "controlplane.management.in_order"]
        for command in commands:
            arguments += [",", *command]
        variables = {**self._environment, **environment}
        program = Program(arguments=tuple(arguments), environment=variables, folder=CHECKOUT)
        await require_oneshot(name, program, self._home, self._console, deadline_s=_COMMAND_WITHIN_S)
