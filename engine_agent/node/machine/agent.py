"""The machine agent: runs the agents that its order names on its host, an ingress or one or more nodes, and reports
every 30 seconds and after each change. It follows its journal until the control plane answers, so a host that boots
without contact runs the same agents. The agents that it runs survive it. On an EC2 instance it also reports the notices
of its cloud."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from engine_agent.node.connection import AgentConnection
from engine_agent.node.enrolment import Enrolment, EnrolmentRefused, EnrolmentUnreachable
from engine_agent.node.identity import Identity
from engine_agent.node.imds import Metadata, NoticeWatch
from engine_agent.node.journal import CorruptJournal, Journal
from engine_agent.node.logs import bound
from engine_agent.node.machine.paths import HostPaths
from engine_agent.node.machine.reboots import Reboots
from engine_agent.node.machine.release_change import ReleaseChange
from engine_agent.node.machine.service import CHANGES_RELEASE, LEFT
from engine_agent.node.machine.tenant import Tenant, tenant_names
from engine_agent.protocol.machine_messages import (
    MachineOrder,
    MachineReport,
    NodeRun,
    RunAgent,
)
from engine_agent.protocol.messages import Hello, Order
from engine_agent.protocol.states import MachinePhase

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
STABLE_AFTER_S = 60.0


class Step(StrEnum):
    NOTHING = "nothing"
    WIPE = "wipe"
    START = "start"


@dataclass(frozen=True, slots=True)
class AgentState:
    """An agent of the host: whether it has a folder here and runs, its first port (None: it was never started), and the
    earliest time of its next start."""

    name: str
    here: bool = True
    alive: bool = False
    port: int | None = None
    start_after_s: float = 0.0


def next_step(order: MachineOrder | None, one: AgentState, others: Sequence[AgentState], now_s: float) -> Step:
    """The next step for an agent. Without an order nothing changes. An agent starts after the others that must be wiped
    and may have its ports."""
    if order is None:
        return Step.NOTHING
    wanted = {run.id: run for run in order.all_runs}
    if one.name not in wanted:
        return Step.WIPE if one.here else Step.NOTHING
    port = wanted[one.name].port
    waits = any(other.here and other.name not in wanted and other.port in (None, port) for other in others)
    return Step.NOTHING if one.alive or waits or now_s < one.start_after_s else Step.START


def may_leave(order: MachineOrder | None, agents: Sequence[AgentState]) -> bool:
    return order is not None and order.leave and not any(one.here for one in agents)


def phase_of(order: MachineOrder | None, agents: Sequence[AgentState], *, left: bool = False) -> MachinePhase:
    """The reported phase of the host, except while it wipes."""
    here = [one for one in agents if one.here]
    if left:
        return MachinePhase.LEFT
    if any(one.port is not None and not one.alive for one in here):
        return MachinePhase.AGENT_DEAD
    if here:
        return MachinePhase.RUNNING if all(one.alive for one in here) else MachinePhase.STARTING
    return MachinePhase.STARTING if order is not None and order.all_runs else MachinePhase.IDLE


def pause_s(failures: int) -> float:
    """Seconds before an agent that exited this often in a row is restarted."""
    return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(failures, 16))


log = logging.getLogger(__name__)

POLL_EVERY_S = 0.5
REPORT_EVERY_S = 30.0
ENROL_PAUSE_S = 5.0
FAREWELL_S = 2.0
"""Time for the last report to be sent. If it is lost, the machine stays listed until an operator removes it."""
JOURNAL_FILE = "journal.json"


@dataclass(slots=True)
class _Hosted:
    """An agent of this host, and its step in progress."""

    tenant: Tenant
    failures: int = 0
    started_s: float = 0.0
    start_after_s: float = 0.0
    restarts: int = 0
    reason: str = ""
    is_wiping: bool = False
    is_renewing: bool = False
    """It changes its release, so that its absence is no fault."""
    step: asyncio.Task[None] | None = None

    @property
    def is_busy(self) -> bool:
        return self.step is not None and not self.step.done()

    def state(self) -> AgentState:
        here = self.tenant.is_here
        known = self.tenant.started() if here else None
        return AgentState(
            name=self.tenant.name,
            here=here,
            alive=here and (self.is_renewing or self.tenant.pid() is not None),
            port=known.run.port if known is not None else None,
            start_after_s=self.start_after_s,
        )


class MachineAgent:
    """Runs one host until cancelled, until it has left, or until it has switched to another release. `tenant` returns
    the agent of a name; `metadata` is None outside of a cloud."""

    def __init__(
        self,
        *,
        paths: HostPaths,
        tenant: Callable[[str], Tenant],
        enrolment: Enrolment,
        hello: Callable[[], Hello],
        release: ReleaseChange,
        reboots: Reboots,
        metadata: Metadata | None = None,
    ) -> None:
        self._paths, self._tenant, self._enrolment, self._release = paths, tenant, enrolment, release
        self._reboots, self._reboot_order = reboots, ""
        self._journal = Journal(paths.home / JOURNAL_FILE, MachineOrder)
        self._connection = AgentConnection(enrolment=enrolment, hello=hello, on_message=self._on_message)
        self._order: MachineOrder | None = None
        self._waiting: MachineOrder | None = None
        self._order_problem = ""
        self._wake = asyncio.Event()
        self._cloud = NoticeWatch(self._wake.set, metadata) if metadata is not None else None
        self._was_ordered = False
        self._hosted: dict[str, _Hosted] = {}
        self._reported: MachineReport | None = None
        self._report_due_s = 0.0

    async def run(self) -> int:
        """Resumes and follows orders. Returns the exit status when the host has left or changes its release."""
        try:
            self._order = self._journal.load()
        except CorruptJournal as error:
            log.error("%s", error)
        loops = [asyncio.create_task(self._connection.run())]
        if self._cloud is not None:
            loops.append(asyncio.create_task(self._cloud.run()))
        try:
            while not (status := await self._pass()):
                try:
                    async with asyncio.timeout(POLL_EVERY_S):
                        await self._wake.wait()
                except TimeoutError:
                    pass
                self._wake.clear()
            if status == LEFT:
                await asyncio.sleep(FAREWELL_S)
            return status
        finally:
            self._release.give_up()
            tasks = [*loops, *(one.step for one in self._hosted.values() if one.step is not None)]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def _servers(self) -> str:
        return ",".join(self._enrolment.servers.all)

    def _on_message(self, message: Order) -> None:
        if not isinstance(message, MachineOrder):
            log.warning("ignored an order for another kind of agent: this is a machine")
            return
        known = self._waiting or self._order
        if known is not None and message.version < known.version:
            log.info("ignored order %d: order %d is newer", message.version, known.version)
            return
        if message != known:
            self._waiting = message
        self._reboot_order = "" if message.leave else message.reboot  # never from the journal, which may be old
        self._was_ordered = True
        self._wake.set()

    def _take_order(self) -> None:
        """Puts the last order in force when it is in the journal. The control plane does not send it again, so an order
        that cannot be written waits, and the previous one stays in force."""
        if self._waiting is None:
            return
        try:
            self._journal.save(self._waiting)
        except OSError as error:
            problem = f"order {self._waiting.version} waits because it cannot be written: {error}"
            if problem != self._order_problem:
                log.error("%s", problem)
            self._order_problem = problem
            return
        self._order, self._waiting, self._order_problem = self._waiting, None, ""
        for one in self._hosted.values():
            one.failures, one.start_after_s = 0, 0.0

    async def _pass(self) -> int:
        """Runs one pass; returns 0 to continue, or the exit status. Steps of several agents run concurrently, and slow
        ones continue during later passes."""
        self._take_order()
        await self._reboot()
        self._find_agents()
        agents = [one.state() for one in self._hosted.values()]
        now_s = asyncio.get_running_loop().time()
        for one, state in zip(self._hosted.values(), agents, strict=True):
            if not one.is_busy:
                self._begin_step(one, state, [other for other in agents if other is not state], now_s)
        self._report()
        if busy := [one.step for one in self._hosted.values() if one.step is not None and not one.step.done()]:
            await asyncio.wait(busy, timeout=POLL_EVERY_S)
        is_busy = any(one.is_busy for one in self._hosted.values())
        left = not is_busy and may_leave(self._order, [one.state() for one in self._hosted.values()])
        self._report(left=left)
        bound(self._paths.log)
        if left:
            return LEFT
        return CHANGES_RELEASE if await self._changes_release(is_busy) else 0

    async def _reboot(self) -> None:
        if self._reboot_order and self._waiting is None:
            order, self._reboot_order = self._reboot_order, ""
            try:
                await asyncio.to_thread(self._reboots.follow, order)
            except OSError as error:
                log.error("the result of reboot %s cannot be recorded: %s", order, error)

    def _find_agents(self) -> None:
        """Adds the agents with a folder and the ordered ones; forgets those that are wiped."""
        wanted = [run.id for run in self._order.all_runs] if self._order is not None else []
        names = {*tenant_names(self._paths), *wanted}
        for name in sorted(names - self._hosted.keys()):
            self._hosted[name] = _Hosted(self._tenant(name))
        for name in [name for name, one in self._hosted.items() if name not in names and not one.is_busy]:
            del self._hosted[name]

    def _begin_step(self, one: _Hosted, state: AgentState, others: Sequence[AgentState], now_s: float) -> None:
        step = next_step(self._order, state, others, now_s)
        if step is Step.WIPE:
            one.is_wiping = True
            self._run_step(one, self._wipe(one))
        elif step is Step.START:
            self._run_step(one, self._start(one, now_s))
        elif state.alive and one.tenant.is_of_other_release and not self._release.on_trial:
            one.is_renewing = True
            self._run_step(one, self._renew(one))
        elif state.alive and one.failures and now_s - one.started_s > STABLE_AFTER_S:
            one.failures, one.reason = 0, ""

    def _run_step(self, one: _Hosted, work: Coroutine[None, None, None]) -> None:
        one.step = asyncio.get_running_loop().create_task(work)
        one.step.add_done_callback(self._end_step)

    def _end_step(self, step: asyncio.Task[None]) -> None:
        self._wake.set()
        if not step.cancelled() and (error := step.exception()) is not None:
            log.error("error in a step; the next pass repeats it", exc_info=error)

    async def _changes_release(self, is_busy: bool) -> bool:
        """Starts or continues the ordered change of the release. True: this process must exit for it."""
        if self._was_ordered:
            self._was_ordered = False
            await asyncio.to_thread(self._release.confirm)
        if is_busy:
            return False
        order = self._order.release if self._order is not None and not self._order.leave else None
        return await self._release.follow(order, self._enrolment.servers.all, self._enrolment.stored_credential())

    def _ordered_run(self, name: str) -> RunAgent | None:
        runs = self._order.all_runs if self._order is not None else ()
        return next((run for run in runs if run.id == name), None)

    async def _wipe(self, one: _Hosted) -> None:
        try:
            one.reason = await asyncio.to_thread(one.tenant.wipe)
        finally:
            one.is_wiping = False
        if not one.reason:
            log.info("wiped %s", one.tenant.name)

    async def _renew(self, one: _Hosted) -> None:
        """Restarts the agent from this release; its processes keep running."""
        try:
            if (run := self._ordered_run(one.tenant.name)) is not None:
                await asyncio.to_thread(one.tenant.kill_agent)
                one.tenant.start(run, self._servers)
        except (OSError, ValueError) as error:
            log.error("%s cannot be started: %s", one.tenant.name, error)  # the next pass starts it
        finally:
            one.is_renewing = False

    async def _start(self, one: _Hosted, now_s: float) -> None:
        run = self._ordered_run(one.tenant.name)
        if run is None:
            return
        if one.tenant.is_here and one.tenant.started() is not None:
            one.restarts += 1
            one.reason = one.tenant.end_reason()
            log.warning("%s: %s", run.id, one.reason)
            self._report()
        one.start_after_s, one.failures = now_s + pause_s(one.failures), one.failures + 1
        try:
            await self._enrol(run, one.tenant.folder)
            one.tenant.start(run, self._servers)
        except (EnrolmentRefused, EnrolmentUnreachable, OSError, ValueError) as error:
            one.reason = f"{run.id} cannot be started: {error}"
            one.start_after_s = now_s + ENROL_PAUSE_S
            log.error("%s", one.reason)
            return
        one.started_s = now_s
        one.reason = "" if one.failures == 1 else one.reason
        log.info("started %s %s", run.kind, run.id)

    async def _enrol(self, run: RunAgent, folder: Path) -> None:
        own = Enrolment(self._servers, run.kind, run.id, folder, join_token=self._enrolment.stored_credential())
        if own.stored_credential() is None:
            self._prepare_home(folder)
            await self._enrol_anywhere(own)

    def _prepare_home(self, folder: Path) -> None:
        folder.mkdir(parents=True, mode=0o700, exist_ok=True)
        if self._connection.identity.has_bundle:
            bundle = self._connection.identity.bundle_file.read_text(encoding="ascii")
            Identity(folder).store_trust(bundle=bundle, revoked="")

    async def _enrol_anywhere(self, own: Enrolment) -> None:
        """Tries each host of the control plane once: the first one may be off."""
        while True:
            try:
                await own.enrol(shown_by=self._connection.identity)
            except EnrolmentUnreachable:
                own.servers.failed()
                if not own.servers.has_untried:
                    raise
            else:
                return

    def _report(self, *, left: bool = False) -> None:
        now_s, tried = asyncio.get_running_loop().time(), self._release.tried
        rebooted, reboot_trouble = self._reboots.result()
        states = {name: one.state() for name, one in self._hosted.items()}
        nodes = tuple(self._run_of(one, states[name]) for name, one in self._hosted.items() if states[name].here)
        is_wiping = any(one.is_wiping for one in self._hosted.values())
        report = MachineReport(
            seq=0,
            version=self._order.version if self._order is not None else 0,
            phase=MachinePhase.WIPING if is_wiping else phase_of(self._order, list(states.values()), left=left),
            runs=nodes[0].id if nodes else "",
            reason="; ".join(filter(None, (self._order_problem, *(one.reason for one in self._hosted.values())))),
            agent_pid=nodes[0].agent_pid if nodes else None,
            restarts=sum(one.restarts for one in self._hosted.values()),
            wants_to_leave=self._paths.leave_wish.exists(),
            release_trouble=tried.trouble if tried is not None else "",
            attempt=tried.attempt if tried is not None else 0,
            nodes=nodes,
            may_reboot=self._reboots.is_allowed,
            rebooted=rebooted,
            reboot_trouble=reboot_trouble,
            notices=self._cloud.notices if self._cloud is not None else None,
        )
        if report != self._reported or now_s >= self._report_due_s:
            self._reported, self._report_due_s = report, now_s + REPORT_EVERY_S
            self._connection.send(report)

    def _run_of(self, one: _Hosted, state: AgentState) -> NodeRun:
        phase = MachinePhase.WIPING if one.is_wiping else phase_of(self._order, [state])
        return NodeRun(state.name, phase, one.reason, one.tenant.pid(), one.restarts)
