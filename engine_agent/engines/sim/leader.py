"""The life of a leader: listen, load, wait for the followers, serve, and end for one reason.

It wires the parts together and turns what they see into the cell's health and the process's exit status.
"""

import asyncio
import logging
import os
import signal

from engine_agent.engines.sim.admin import AdminServer
from engine_agent.engines.sim.asgi import HealthPage
from engine_agent.engines.sim.engine import Engine
from engine_agent.engines.sim.faults import Crash, Faults, combine_effects
from engine_agent.engines.sim.kv_link import KvServer
from engine_agent.engines.sim.leader_link import LeaderLink
from engine_agent.engines.sim.listening import HttpListeners
from engine_agent.engines.sim.meters import Meters
from engine_agent.engines.sim.serving import ApiServer
from engine_agent.engines.sim.settings import CLOSING_S, FAILED_EXIT_AFTER_S, LOOPBACK, Endpoint, Settings
from engine_agent.engines.sim.shutdown import Shutdown, ShutdownReason
from engine_agent.engines.step_meter import StepMeter
from engine_agent.engines.usage_ledger import UsageLedger
from engine_agent.protocol.local_servers import StateWatch, state_name
from engine_agent.protocol.messages import StepTimes

log = logging.getLogger(__name__)


class Leader:
    """One leader process; also the watcher of its followers."""

    def __init__(self, settings: Settings) -> None:
        """Bind the HTTP ports.

        Raises:
            PortTaken: one of them cannot be bound.
        """
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
            settings.served_model,
            settings.max_model_len,
            settings.model.seed,
            settings.adapters,
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
        """Why the cell is unhealthy; empty when it is healthy."""
        if self._engine.refusal:
            return self._engine.refusal
        return "injected fault: unready" if self._faults.unready else ""

    async def run(self) -> int:
        """Live until the end comes, and return the exit status.

        Raises:
            PortTaken: the rendezvous port cannot be bound.
        """
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
        await self._end(end)
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
            self._fail(f"{self._link.missing} of {self._settings.followers} followers did not come within {limit}")

    async def _end(self, end: ShutdownReason) -> None:
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
        # At once and not when `run` wakes up: whoever asks next must hear 503.
        self._engine.fail(reason)
        self._shutdown.request(reason, failed=True)

    def _note_decode(self, sequences: int, compute_ms: float) -> None:
        self._work.note(sequences, compute_ms)
        self._steps.note(sequences, compute_ms * self._faults.effects().slow_factor)

    # What the link asks for and tells of the followers.

    def work(self) -> StepTimes:
        return self._work.times()

    def follower_joined(self) -> None:
        self._open_when_whole()

    def follower_lost(self, reason: str) -> None:
        self._fail(reason)

    def follower_unfit(self, reason: str) -> None:
        """See `CellWatcher`; waiting cannot help, so the cell ends with the reason, and its nodes say it."""
        self._fail(reason)

    def follower_leaving(self, reason: str) -> None:
        """See `CellWatcher`; a planned stop of one member is a planned stop of its cell."""
        self._shutdown.request(reason, failed=False)

    def effects_changed(self) -> None:
        self._engine.set_effects(combine_effects([self._faults.effects(), *self._link.effects()]))
