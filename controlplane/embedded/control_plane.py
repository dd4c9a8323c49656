"""The control plane's own processes and management commands: their command lines, and each command run with its log
and its deadline."""

import signal
import sys
from collections.abc import Mapping
from dataclasses import replace

from controlplane.embedded.configuration import CHECKOUT, CannotStart, Configuration
from controlplane.embedded.console import Console
from controlplane.embedded.engine_environment import Weights
from controlplane.embedded.preflight import HOST
from controlplane.embedded.processes import CONTROL_NICE, OneshotResult, Program, require_oneshot, run_oneshot
from controlplane.embedded.state_directory import StateDirectory
from controlplane.embedded.supervisor import Service

WORKER_CONCURRENCY = 2
HOUSEKEEPING_NICE = 5
_WEB_STOPS_WITHIN_S = 8.0
"""Requests under way have 3 s (controlplane.web)."""
UNCHECKED = {"CELERY_SKIP_CHECKS": "1"}
"""Django's checks load the whole API, over a second of a processor in each process. The tests run them."""


def web(configuration: Configuration, environment: Mapping[str, str]) -> Service:
    """The ASGI server: dashboard, API, agents' and browsers' WebSockets."""
    arguments = ["controlplane.web", "--host", HOST, "--port", str(configuration.port)]
    arguments += ["--agent-host", configuration.agent_listen, "--agent-port", str(configuration.agent_port)]
    program = _python(arguments, environment, nice=CONTROL_NICE)
    return Service(name="web", program=program, stop_within_s=_WEB_STOPS_WITHIN_S)


def controller(environment: Mapping[str, str]) -> Service:
    """The Celery worker of the control loops: reconciling, provisioning, publishing, the autopilot."""
    program = _celery_worker("controller", ["--queues", "control", "--task-events"], environment, nice=CONTROL_NICE)
    return Service(name="controller", program=program, stop_within_s=10.0)


def worker(environment: Mapping[str, str]) -> Service:
    """Celery's worker, for housekeeping. On the launcher's death it stops cold: its tasks are acknowledged late and
    come again."""
    options = ["--pool", "prefork", "--concurrency", str(WORKER_CONCURRENCY)]
    program = _celery_worker("worker", options, environment, nice=HOUSEKEEPING_NICE)
    program = replace(program, death_signal=signal.SIGQUIT)
    return Service(name="worker", program=program, stop_within_s=10.0)


def beat(home: StateDirectory, environment: Mapping[str, str]) -> Service:
    arguments = ["celery", "--quiet", "-A", "controlplane.celery:app", "beat", "--schedule", str(home.beat_schedule)]
    arguments += ["--pidfile=", "--loglevel", "warning"]
    return Service(name="beat", program=_python(arguments, {**environment, **UNCHECKED}), stop_within_s=5.0)


def sender(environment: Mapping[str, str]) -> Service:
    """Sends near-real-time requests. What it has not finished at its end, it gives back."""
    return Service(name="sender", program=management_command(["sender"], environment), stop_within_s=5.0)


def batch(environment: Mapping[str, str]) -> Service:
    """Works on batches. What it has not finished at its end, it gives back."""
    program = replace(management_command(["batch"], environment), nice=HOUSEKEEPING_NICE)
    return Service(name="batch", program=program, stop_within_s=5.0)


def planner(environment: Mapping[str, str]) -> Service:
    """The Celery worker that measures demand and forecasts it. A child of lower priority plans the day."""
    program = _celery_worker("planner", ["--queues", "planner", "--task-events"], environment, nice=HOUSEKEEPING_NICE)
    return Service(name="planner", program=program, stop_within_s=5.0)


def _celery_worker(name: str, options: list[str], environment: Mapping[str, str], *, nice: int) -> Program:
    arguments = ["celery", "--quiet", "-A", "controlplane.celery:app", "worker", "--hostname", f"{name}@%h"]
    arguments += ["--without-gossip", "--without-mingle", *options, "--loglevel", "info"]
    return _python(arguments, {**environment, **UNCHECKED}, nice=nice)


def management_command(arguments: list[str], environment: Mapping[str, str]) -> Program:
    """One of Django's or our own commands."""
    return Program(arguments=(sys.executable, "manage.py", *arguments), environment=environment, folder=CHECKOUT)


def _python(
    arguments: list[str],
    environment: Mapping[str, str],
    *,
    nice: int = 0,
) -> Program:
    return Program(
        # Celery's advice not to run as root is for workers that unpickle untrusted messages; ours reads JSON of ours.
        arguments=(sys.executable, "-W", "ignore:You're running the worker", "-m", *arguments),
        environment=environment,
        folder=CHECKOUT,
        nice=nice,
    )


_COMMAND_WITHIN_S = 120.0
_FLEET_STOP_WITHIN_S = 60.0
_STATUS_MARGIN_S = 30.0
"""For `fleet_status` to start and to say what it found, beyond the time that it waits."""


class Management:
    """The commands of one control plane."""

    def __init__(self, environment: Mapping[str, str], home: StateDirectory, console: Console) -> None:
        self._environment = environment
        self._home = home
        self._console = console

    async def migrate(self, owner_url: str, role: str = "") -> None:
        """Migrate the database as its owner, then grant the application's role, if given, access to the tables.

        Raises:
            CannotStart: it failed.
        """
        grant = ("grant_application", role) if role else ()
        await self._require("migrate", ("migrate", "--no-input", "--skip-checks"), grant, DATABASE_URL=owner_url)

    async def seed(self, configuration: Configuration, weights: Weights | None, password: str) -> None:
        """Record the demo fleet and the operator, and keep the rows that exist; then boot the machines that an orderly
        stop ended.

        Raises:
            CannotStart: it failed.
        """
        arguments = ["--engine", str(configuration.engine), "--provider", str(configuration.provider)]
        if weights:
            arguments += ["--artifact-uri", weights.uri, "--artifact-digest", weights.digest]
        await self._require("seed", ("seed_demo", *arguments), ("fleet_resume",), SWITCHYARD_OPERATOR_PASSWORD=password)

    async def wait_for_cells(self, wait_s: float) -> OneshotResult:
        """Wait up to `wait_s` until every cell is ready; status 0 when so, else the last line says why not."""
        program = management_command(["fleet_status", "--wait-s", f"{wait_s:.0f}"], self._environment)
        return await run_oneshot("fleet", program, self._home, self._console, deadline_s=wait_s + _STATUS_MARGIN_S)

    async def stop_fleet(self) -> None:
        """End every machine of the fleet; says so where it cannot, because whoever called looks again itself."""
        program = management_command(["fleet_stop"], self._environment)
        try:
            await run_oneshot("fleet", program, self._home, self._console, deadline_s=_FLEET_STOP_WITHIN_S)
        except CannotStart as error:
            self._console.own(f"{error} Ending the fleet's processes directly.")

    async def _require(self, name: str, *commands: tuple[str, ...], **environment: str) -> None:
        """Run commands in one process, in this order; empty ones are left out."""
        arguments = ["controlplane.management.in_order"]
        for command in commands:
            arguments += [",", *command]
        program = _python(arguments, {**self._environment, **environment})
        await require_oneshot(name, program, self._home, self._console, deadline_s=_COMMAND_WITHIN_S)
