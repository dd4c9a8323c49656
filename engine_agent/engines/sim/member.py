"""The processes of a cell: a leader listens, loads, waits for followers and serves; a follower loads, joins the leader
and exits with it. The first reason to stop wins and determines the exit status."""

import asyncio
import logging
import os
import signal
from dataclasses import dataclass

from engine_agent.engines.openai_http import Endpoint, HealthPage, HttpListeners
from engine_agent.engines.sim.admin_server import AdminServer
from engine_agent.engines.sim.cell_link import FollowerLink, LeaderLink, NoLeader
from engine_agent.engines.sim.engine import Engine, Meters
from engine_agent.engines.sim.faults import Crash, Faults, combine_effects
from engine_agent.engines.sim.kv_transfer import KvServer
from engine_agent.engines.sim.serving import ApiServer, ServedModel
from engine_agent.engines.sim.settings import CLOSING_S, FAILED_EXIT_AFTER_S, LOOPBACK, Settings
from engine_agent.engines.step_meter import StepMeter
from engine_agent.engines.usage_ledger import UsageLedger
from engine_agent.protocol.local_servers import StateWatch, state_name
from engine_agent.protocol.messages import StepTimes

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ShutdownReason:
    """Why the process exits. `failed`: after an error, with a status other than 0."""

    reason: str
    failed: bool

    @property
    def exit_status(self) -> int:
        return 1 if self.failed else 0


class Shutdown:
    """The end of this process: the first request wins."""

    def __init__(self) -> None:
        self._shut_down: asyncio.Future[ShutdownReason] = asyncio.get_running_loop().create_future()

    def request(self, reason: str, failed: bool) -> None:
        """Ends the process, unless its end was requested before."""
        if not self._shut_down.done():
            self._shut_down.set_result(ShutdownReason(reason, failed))

    def on_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.request, f"{number.name} received", False)

    def on_failure_of(self, task: "asyncio.Task[None]") -> None:
        """Makes the failure of a task that should never end the end of the process."""
        task.add_done_callback(self._task_done)

    async def wait(self) -> ShutdownReason:
        return await asyncio.shield(self._shut_down)

    def _task_done(self, task: "asyncio.Task[None]") -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.error("%s broke", task.get_name(), exc_info=error)
            self.request(f"{task.get_name()} broke: {error}", failed=True)


class Leader:
    """A leader process; also the watcher of its followers."""

    def __init__(self, settings: Settings) -> None:
        """Binds the HTTP ports. Raises PortTaken if one of them cannot be bound."""
        self._settings = settings
        self._shutdown = Shutdown()
        self._faults = Faults()
        self._work = StepMeter()
        self._steps = StepMeter()
        self._watch = StateWatch(lambda: state_name(self.health()))
        self._engine = Engine(
            settings.model,
            Meters(),
            on_decode=self._note_decode,
            on_refusal=self._watch.changed,
            handover=settings.handover,
        )
        self._kv = KvServer(settings.kv_endpoint, self._engine.leases) if settings.kv_endpoint else None
        self._engine.postpone("loading weights")
        self._link = LeaderLink(settings, self)
        self._loaded = False
        serving = ApiServer(
            self._engine,
            self._faults,
            HealthPage(self.health, self._watch),
            ServedModel(settings.served_model, settings.max_model_len, settings.adapters, settings.modalities),
            settings.model.seed,
            settings.kv_endpoint,
        )
        admin = AdminServer(self._faults, HealthPage(self.health, self._watch), settings.role, self._steps.times)
        self._listeners = HttpListeners(
            {
                Endpoint(LOOPBACK, settings.port): UsageLedger(serving, self._engine.cache),
                Endpoint(LOOPBACK, settings.admin_port): admin,
            }
        )
        self._faults.subscribe(self.effects_changed)
        self._faults.subscribe(self._watch.changed)
        if settings.fault is not None:
            self._faults.put(settings.fault)

    def health(self) -> str:
        if self._engine.refusal:
            return self._engine.refusal
        return "injected fault: unready" if self._faults.unready else ""

    async def run(self) -> int:
        """Runs until the process must exit, and returns the exit status. Raises PortTaken if the rendezvous port cannot
        be bound."""
        self._shutdown.on_signals()
        if self._settings.certificate is not None:
            await self._link.listen(self._settings.certificate)
        tasks = {
            "http": asyncio.create_task(self._listeners.serve(), name="http"),
            "engine": asyncio.create_task(self._engine.run(), name="engine"),
            "start": asyncio.create_task(self._start(), name="start"),
            **({"kv": asyncio.create_task(self._kv.run(), name="kv")} if self._kv else {}),
        }
        for task in tasks.values():
            self._shutdown.on_failure_of(task)
        end = await self._shutdown.wait()
        log.info("ending: %s", end.reason)
        tasks["start"].cancel()
        await self._shut_down(end)
        await asyncio.wait([tasks["http"]])
        for name in ("engine", "kv"):
            if name in tasks:
                tasks[name].cancel()
        log.info("exit with status %d: %s", end.exit_status, end.reason)
        return end.exit_status

    async def _start(self) -> None:
        await asyncio.sleep(self._settings.load_time_s)
        if isinstance(self._settings.fault, Crash):
            os.kill(os.getpid(), signal.SIGKILL)
        self._loaded = True
        self._open_when_whole()
        await asyncio.sleep(max(0.0, self._settings.rendezvous_timeout_s - self._settings.load_time_s))
        if self._link.missing:
            limit = f"{self._settings.rendezvous_timeout_s:g} s"
            self._fail(f"{self._link.missing} of {self._settings.followers} followers did not join within {limit}")

    async def _shut_down(self, end: ShutdownReason) -> None:
        if end.failed:
            self._engine.fail(end.reason)
            self._link.close(end.reason, failed=True)
            await asyncio.sleep(FAILED_EXIT_AFTER_S)
            self._listeners.stop(grace_s=0)
            return
        self._engine.close(f"stopping: {end.reason}")
        self._listeners.stop(self._settings.grace_s + CLOSING_S)
        try:
            async with asyncio.timeout(self._settings.grace_s):
                await self._engine.idle()
        except TimeoutError:
            log.warning("%d requests are not finished after %g s", self._engine.in_flight, self._settings.grace_s)
        self._engine.fail(f"stopped: {end.reason}")
        self._link.close(end.reason, failed=False)

    def _open_when_whole(self) -> None:
        if not self._loaded:
            self._engine.postpone("loading weights")
        elif self._link.missing:
            here = self._settings.followers - self._link.missing
            self._engine.postpone(f"waiting for followers: {here} of {self._settings.followers} connected")
        else:
            self._engine.open()
            many = "1 follower" if self._settings.followers == 1 else f"{self._settings.followers} followers"
            log.info("ready: leader with %s", many)

    def _fail(self, reason: str) -> None:
        # Before `run` wakes up: the next request must be answered with 503.
        self._engine.fail(reason)
        self._shutdown.request(reason, failed=True)

    def _note_decode(self, sequences: int, compute_ms: float) -> None:
        self._work.note(sequences, compute_ms)
        self._steps.note(sequences, compute_ms * self._faults.effects().slow_factor)

    # `CellWatcher`

    def work(self) -> StepTimes:
        return self._work.times()

    def follower_joined(self) -> None:
        self._open_when_whole()

    def follower_lost(self, reason: str) -> None:
        self._fail(reason)

    def follower_unfit(self, reason: str) -> None:
        """See `CellWatcher`; waiting cannot help, so the cell fails with the reason."""
        self._fail(reason)

    def follower_leaving(self, reason: str) -> None:
        """See `CellWatcher`; a planned stop of one member is a planned stop of its cell."""
        self._shutdown.request(reason, failed=False)

    def effects_changed(self) -> None:
        self._engine.set_effects(combine_effects([self._faults.effects(), *self._link.effects()]))


class Follower:
    def __init__(self, settings: Settings) -> None:
        """Binds the administration port. Raises PortTaken if it cannot be bound."""
        self._settings = settings
        self._shutdown = Shutdown()
        self._faults = Faults()
        self._watch = StateWatch(lambda: state_name(self.health()))
        self._waiting_for = "loading weights"
        self._steps = StepMeter()
        self._link = FollowerLink(settings, self._faults, self._retried, self._follow)
        self._faults.subscribe(self._watch.changed)
        admin = AdminServer(self._faults, HealthPage(self.health, self._watch), settings.role, self._steps.times)
        self._listeners = HttpListeners({Endpoint(LOOPBACK, settings.admin_port): admin})

    def health(self) -> str:
        if self._waiting_for:
            return self._waiting_for
        return "injected fault: unready" if self._faults.unready else ""

    async def run(self) -> int:
        self._shutdown.on_signals()
        http = asyncio.create_task(self._listeners.serve(), name="http")
        membership = asyncio.create_task(self._be_member(), name="membership")
        for task in (http, membership):
            self._shutdown.on_failure_of(task)
        end = await self._shutdown.wait()
        log.info("ending: %s", end.reason)
        self._wait_for(end.reason)
        if not end.failed and self._link.announce_leaving(end.reason):
            # The leader finishes what is in flight, which takes all members, and then sends a farewell.
            await asyncio.wait([membership], timeout=self._settings.grace_s)
        membership.cancel()
        self._listeners.stop(grace_s=0)
        await asyncio.wait([http])
        log.info("exit with status %d: %s", end.exit_status, end.reason)
        return end.exit_status

    async def _be_member(self) -> None:
        await asyncio.sleep(self._settings.load_time_s)
        self._wait_for(f"looking for the leader at {self._settings.leader}")
        try:
            await self._link.connect()
            self._wait_for("")
            log.info("ready: follower rank %d of the leader at %s", self._settings.rank, self._settings.leader)
            farewell = await self._link.stay()
        except NoLeader as error:
            self._shutdown.request(str(error), failed=True)
            return
        self._shutdown.request(f"the leader ends the cell: {farewell.reason}", farewell.failed)

    def _follow(self, work: StepTimes) -> None:
        self._steps.follow(work, self._faults.effects().slow_factor)

    def _retried(self, reason: str) -> None:
        reason = f"looking for the leader at {self._settings.leader}: {reason}"
        if reason != self._waiting_for:
            log.info("%s", reason)
        self._wait_for(reason)

    def _wait_for(self, what: str) -> None:
        self._waiting_for = what
        self._watch.changed()
