"""The life of a follower: load, find the leader, stay with it, and end with it. It answers no requests of its own."""

import asyncio
import logging

from engine_agent.engines.sim.admin import AdminServer
from engine_agent.engines.sim.asgi import HealthPage
from engine_agent.engines.sim.faults import Faults
from engine_agent.engines.sim.follower_link import FollowerLink, NoLeader
from engine_agent.engines.sim.listening import HttpListeners
from engine_agent.engines.sim.settings import LOOPBACK, Endpoint, Settings
from engine_agent.engines.sim.shutdown import Shutdown
from engine_agent.engines.step_meter import StepMeter
from engine_agent.protocol.local_servers import StateWatch, state_name
from engine_agent.protocol.messages import StepTimes

log = logging.getLogger(__name__)


class Follower:
    def __init__(self, settings: Settings) -> None:
        """Bind the administration port.

        Raises:
            PortTaken: it cannot be bound.
        """
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
        """Why this member is unhealthy; empty when it is healthy."""
        if self._waiting_for:
            return self._waiting_for
        return "injected fault: unready" if self._faults.unready else ""

    async def run(self) -> int:
        """Live until the end comes, and return the exit status."""
        self._shutdown.on_signals()
        http = asyncio.create_task(self._listeners.serve(), name="http")
        membership = asyncio.create_task(self._be_member(), name="membership")
        for task in (http, membership):
            self._shutdown.on_failure_of(task)
        end = await self._shutdown.wait()
        log.info("ending: %s", end.reason)
        self._wait_for(end.reason)
        if not end.failed and self._link.announce_leaving(end.reason):
            # The leader finishes what is in flight and says farewell; computing it takes all members.
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
