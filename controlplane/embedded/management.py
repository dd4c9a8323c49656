"""Django's and our own management commands, as the launcher runs them: each with its log and its deadline."""

from collections.abc import Mapping

from controlplane.embedded.configuration import Engine
from controlplane.embedded.console import Console
from controlplane.embedded.control_plane import management_command
from controlplane.embedded.engine_environment import Weights
from controlplane.embedded.errand import Outcome, require_errand, run_errand
from controlplane.embedded.errors import CannotStart
from controlplane.embedded.home import Home

_COMMAND_WITHIN_S = 120.0
_FLEET_STOP_WITHIN_S = 60.0
_STATUS_MARGIN_S = 30.0
"""For `fleet_status` to start and to say what it found, beyond the time that it waits."""


class Management:
    """The commands of one control plane."""

    def __init__(self, environment: Mapping[str, str], home: Home, console: Console) -> None:
        self._environment = environment
        self._home = home
        self._console = console

    async def migrate(self) -> None:
        """Bring the database to the code's schema.

        Raises:
            CannotStart: it failed.
        """
        await self._require("migrate", "migrate", "--no-input")

    async def seed(self, engine: Engine, weights: Weights | None, password: str) -> None:
        """Record the demo fleet and the operator; what is recorded already stays.

        Raises:
            CannotStart: it failed.
        """
        arguments = ["--engine", str(engine)]
        if weights:
            arguments += ["--artifact-uri", weights.uri, "--artifact-digest", weights.digest]
        await self._require("seed", "seed_demo", *arguments, SWITCHYARD_OPERATOR_PASSWORD=password)

    async def resume(self) -> None:
        """Boot the machines that an orderly stop ended.

        Raises:
            CannotStart: it failed.
        """
        await self._require("resume", "fleet_resume")

    async def wait_for_cells(self, wait_s: float) -> Outcome:
        """Wait up to `wait_s` until every cell is ready; status 0 when so, else the last line says why not."""
        program = management_command(["fleet_status", "--wait-s", f"{wait_s:.0f}"], self._environment)
        return await run_errand("fleet", program, self._home, self._console, deadline_s=wait_s + _STATUS_MARGIN_S)

    async def stop_fleet(self) -> None:
        """End every machine of the fleet; says so where it cannot, because whoever called looks again itself."""
        program = management_command(["fleet_stop"], self._environment)
        try:
            await run_errand("fleet", program, self._home, self._console, deadline_s=_FLEET_STOP_WITHIN_S)
        except CannotStart as error:
            self._console.own(f"{error} Ending the fleet's processes directly.")

    async def _require(self, name: str, *command: str, **environment: str) -> None:
        program = management_command(list(command), {**self._environment, **environment})
        await require_errand(name, program, self._home, self._console, deadline_s=_COMMAND_WITHIN_S)
