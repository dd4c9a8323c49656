"""`make up`: brings everything up in order, keeps it running, and on a signal takes it down in order.

It stops processes in reverse order with one exception: controller and worker stop before the fleet, which they would
heal."""

import asyncio
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, TypeVar

import psutil

from controlplane.embedded.configuration import CannotStart, Configuration, Engine
from controlplane.embedded.console import Console
from controlplane.embedded.control_plane import Gate, Management, services
from controlplane.embedded.layout import Found, Layout
from controlplane.embedded.postgres import APPLICATION
from controlplane.embedded.preflight import (
    Weights,
    install_engine,
    require_disk_space,
    require_distinct_ports,
    require_free_port,
    wanted_ports,
)
from controlplane.embedded.privileges import remove_socket_folder, socket_folder
from controlplane.embedded.process_ownership import describe_all, end_all, in_sessions, processes_of
from controlplane.embedded.processes import OneshotResult, control_plane_environment, run_together
from controlplane.embedded.servers import Servers, choose_servers
from controlplane.embedded.state_directory import LauncherPhase, LauncherState, StateDirectory
from controlplane.embedded.status import print_final_block
from controlplane.embedded.supervisor import Supervisor
from controlplane.processes import PROCESSES

T = TypeVar("T")

_LEFTOVERS_END_WITHIN_S = 10.0
_SHORTEST_WAIT_S = 1.0
_KEEP_WATCHING_S = 3600.0


class Launcher:
    """One run of `make up`, from its checks to its end. The caller holds the home's lock."""

    def __init__(
        self, configuration: Configuration, home: StateDirectory, console: Console, *, foreground: bool
    ) -> None:
        self._configuration = configuration
        self._home = home
        self._console = console
        self._foreground = foreground
        self._inherited = dict(os.environ)
        self._stop_requested = asyncio.Event()
        self._fleet_may_run = False
        self._adopts_fleet = False
        self._gate: Gate | None = None
        self._environment: dict[str, str] = {}
        """Of the processes that it starts."""
        self._state = LauncherState(
            pid=os.getpid(),
            started_s=psutil.Process().create_time(),
            port=configuration.port,
            ingress_port=configuration.ingress_port,
            ingresses=configuration.ingresses,
            engine=configuration.engine,
        )
        self._supervisor = Supervisor(home, console, on_change=lambda sessions: self._publish(sessions=sessions))

    async def run(self) -> int:
        """Bring up, stay until stopped, take down; the exit status for the shell."""
        self._listen_for_signals()
        bringing_up = asyncio.create_task(self._bring_up())
        stopping = asyncio.create_task(self._stop_requested.wait())
        failure = ""
        try:
            await asyncio.wait({bringing_up, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if bringing_up.done():
                await bringing_up  # raises what went wrong
                await stopping
        except CannotStart as error:
            failure = str(error)
            self._publish(phase=LauncherPhase.FAILED, reason=failure)
        finally:
            for task in (bringing_up, stopping):
                task.cancel()
            await asyncio.gather(bringing_up, stopping, return_exceptions=True)
            await self._take_down()
        if failure:
            self._console.own(failure)
        return int(bool(failure))

    # --- up -----------------------------------------------------------------------------------------------------------

    async def _bring_up(self) -> None:
        servers = await self._check()
        management = Management(self._environment, self._home, self._console)
        weights: list[Weights] = []
        self._gate = Gate(self._home.path / "start.gate")
        for service in services(self._configuration, {**self._environment, **self._gate.environment}):
            await self._supervisor.start(service)
        await run_together(self._prepare_database(servers, management), self._prepare_engine(weights))
        with self._console.step("demo fleet"):
            password = self._home.secrets().operator_password
            built = weights[0] if weights else None
            self._fleet_may_run = True
            await self._despite_database(servers, lambda: management.seed(self._configuration, built, password))
        self._gate.open()
        await self._wait_for_cells(management)

    async def _check(self) -> Servers:
        previous = self._home.read_state()
        self._publish()
        if previous:
            await asyncio.to_thread(self._end_leftovers, previous)
        self._adopts_fleet = bool(await asyncio.to_thread(processes_of, self._home.path))
        shutil.rmtree(self._home.path / "metrics", ignore_errors=True)  # counts of processes that are gone
        require_distinct_ports(self._configuration)
        wanted = wanted_ports(self._configuration)
        for port in wanted:
            await asyncio.to_thread(require_free_port, port, self._home.path)
        room_gib = require_disk_space(self._configuration)
        servers = choose_servers(self._configuration, self._home)
        self._publish(database_url=servers.database_url, owner_url=servers.owner_url, redis_url=servers.redis_url)
        self._environment = control_plane_environment(
            self._inherited,
            self._configuration,
            self._home.secrets(),
            database_url=servers.database_url,
            redis_url=servers.redis_url,
        )
        ports = ", ".join(str(each.port) for each in wanted)
        self._console.own(f"ports {ports} are ours, {room_gib:.0f} GiB free, home {self._home.path}")
        return servers

    def _end_leftovers(self, previous: LauncherState) -> None:
        """Stop the processes that a killed launcher left. Agents, engines and ingresses keep running."""

        def leftovers() -> list[psutil.Process]:
            return in_sessions(processes_of(self._home.path), previous.sessions.values())

        if processes := leftovers():
            self._console.own(f"ending what an earlier launcher left: {describe_all(processes)}")
            end_all(leftovers, patience_s=_LEFTOVERS_END_WITHIN_S)

    async def _prepare_database(self, servers: Servers, management: Management) -> None:
        with self._console.step("PostgreSQL and Valkey"):
            await servers.initialise(self._inherited, self._console)
            for service in servers.services(self._inherited):
                await self._supervisor.start(service)
            await self._unless_crash_looping(servers.wait_until_ready())
        with self._console.step("migrations"):
            await self._despite_database(servers, lambda: self._migrate(servers, management))

    async def _migrate(self, servers: Servers, management: Management) -> None:
        """Create or change the tables. Those of an embedded database come from a dump if there is one."""
        if servers.postgres is None:
            await management.migrate(servers.owner_url)
            return
        layout = Layout(self._configuration.cache / "layouts")
        found = await asyncio.to_thread(layout.look, servers.owner_url)
        if found is Found.COMPLETE:
            return
        await management.migrate(servers.owner_url, APPLICATION)
        if found is Found.EMPTY:
            try:
                await asyncio.to_thread(layout.keep, servers.owner_url)
            except (OSError, subprocess.SubprocessError) as error:
                self._console.own(f"no dump of the empty tables is kept for the next new home: {error}")
        await asyncio.to_thread(layout.complete, servers.owner_url)

    async def _despite_database(self, servers: Servers, step: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Take a step, and once more if it failed, as soon as the servers answer: one may have died meanwhile."""
        try:
            await step()
        except CannotStart as error:
            self._console.own(f"{error} Once more, as soon as PostgreSQL and Valkey answer.")
            await self._unless_crash_looping(servers.wait_until_ready())
            await step()

    async def _prepare_engine(self, weights: list[Weights]) -> None:
        engine, cache = self._configuration.engine, self._configuration.cache
        if engine is Engine.SIM:
            self._console.own("ENGINE=sim: smollm2 runs on the simulator, not on an engine")
        else:
            weights.append(await install_engine(engine, cache, self._inherited, self._home, self._console))

    async def _wait_for_cells(self, management: Management) -> None:
        """Report when every cell is ready. After the promised time report the reason, and keep polling; slow processes
        keep running."""
        wait_s = max(_SHORTEST_WAIT_S, self._configuration.wait_s - self._console.elapsed_s)
        outcome = await self._unless_crash_looping(_cells_ready(management, wait_s))
        while outcome.status != 0:
            reason = f"not every cell is ready after {self._console.elapsed_s:.0f} s ({outcome.last_line})"
            self._publish(phase=LauncherPhase.NOT_READY, reason=reason)
            self._console.own(f"{reason}; still trying")
            outcome = await _cells_ready(management, _KEEP_WATCHING_S)
        self._console.own(f"every cell is ready after {self._console.elapsed_s:.1f} s")
        self._publish(phase=LauncherPhase.READY, reason="")
        if self._foreground:
            await asyncio.to_thread(
                print_final_block,
                self._configuration,
                self._home,
                self._console,
                took_s=self._console.elapsed_s,
                foreground=True,
            )

    async def _unless_crash_looping(self, waiting: Coroutine[Any, Any, T]) -> T:
        """Wait, but stop waiting when a required process keeps dying."""
        waited = asyncio.create_task(waiting)
        watching = asyncio.create_task(self._supervisor.fail_when_crash_looping())
        try:
            await asyncio.wait({waited, watching}, return_when=asyncio.FIRST_COMPLETED)
            return waited.result() if waited.done() else watching.result()
        finally:
            for task in (waited, watching):
                task.cancel()
            await asyncio.gather(waited, watching, return_exceptions=True)

    # --- down ---------------------------------------------------------------------------------------------------------

    async def _take_down(self) -> None:
        began_s = self._console.elapsed_s
        if self._state.phase is not LauncherPhase.FAILED:
            self._publish(phase=LauncherPhase.STOPPING)
        if self._supervisor.runs_anything:
            self._console.own("stopping")
        await self._supervisor.stop("worker", "controller")
        # A start that fails takes down what it began; a fleet that an earlier launcher left keeps serving.
        takes_fleet = self._stop_requested.is_set() or (self._fleet_may_run and not self._adopts_fleet)
        if takes_fleet and self._fleet_may_run:
            await Management(self._environment, self._home, self._console).stop_fleet()
        await self._supervisor.stop(*(kind.role for kind in reversed(PROCESSES)))
        await self._supervisor.stop_all()
        remove_socket_folder(socket_folder(self._home.path))
        if takes_fleet:
            left = await asyncio.to_thread(self._end_leftover_processes)
            proof = f"{left} processes cannot be ended" if left else "nothing is left"
            self._console.own(f"stopped in {self._console.elapsed_s - began_s:.1f} s; {proof}")

    def _end_leftover_processes(self) -> int:
        """End what should be gone by now, and count what stays."""
        if processes := processes_of(self._home.path):
            self._console.own(f"still there: {describe_all(processes)}")
        return end_all(lambda: processes_of(self._home.path), patience_s=_LEFTOVERS_END_WITHIN_S)

    # --- signals and state --------------------------------------------------------------------------------------------

    def _listen_for_signals(self) -> None:
        loop = asyncio.get_running_loop()
        wanted = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup
            wanted.append(signal.SIGHUP)
        for number in wanted:
            loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: signal.Signals) -> None:
        if not self._stop_requested.is_set():
            self._console.own(f"{number.name}: stopping everything (once more kills)")
            self._stop_requested.set()
            return
        self._console.own("killing everything")
        self._supervisor.kill_all()
        end_all(lambda: processes_of(self._home.path), patience_s=1.0)
        os._exit(130)

    def _publish(self, **changes: object) -> None:
        """Keep the state for others to read. A disk that refuses it must not stop what runs, nor start it twice."""
        self._state = replace(self._state, **changes)  # type: ignore[arg-type]
        try:
            self._home.write_state(self._state)
        except OSError as error:
            self._console.own(f"cannot write {self._home.state}: {error}; `make status` shows an older state")


async def _cells_ready(management: Management, wait_s: float) -> OneshotResult:
    """As `Management.wait_for_cells`; a look that did not end in time is one that saw no ready fleet."""
    try:
        return await management.wait_for_cells(wait_s)
    except (CannotStart, OSError) as error:
        return OneshotResult(1, (str(error),))
