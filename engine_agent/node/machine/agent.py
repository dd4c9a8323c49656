"""The machine agent, `python -m engine_agent machine --code DIR`: runs what its order names on its host, and reports
every 30 seconds and after each change. It follows its journal until the control plane answers, so a host that boots
without contact runs the same agent. The agent that it runs survives it. It exits on a signal, to start
another release, or when it has left; then the host is uninstalled."""

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import msgspec

from engine_agent.node.connection import AgentConnection
from engine_agent.node.enrolment import NONCE_FILE, Enrolment, EnrolmentRefused, EnrolmentUnreachable
from engine_agent.node.identity import Identity
from engine_agent.node.journal import CorruptJournal, Journal
from engine_agent.node.lock import AgentLock, HomeInUse
from engine_agent.node.logs import bound
from engine_agent.node.machine.facts import read_facts
from engine_agent.node.machine.paths import HostPaths, Joined
from engine_agent.node.machine.release_change import ReleaseChange
from engine_agent.node.machine.service import CHANGES_RELEASE, LEFT
from engine_agent.node.machine.tenant import Tenant
from engine_agent.node.telemetry.fingerprint import AGENT_ROOT, agent_version
from engine_agent.protocol.log_lines import configure_logging
from engine_agent.protocol.machine_messages import (
    MachineFacts,
    MachineOrder,
    MachineReport,
    RunAgent,
    machine_id_of,
    release_in,
)
from engine_agent.protocol.messages import PROTOCOL_VERSION, Hello, Order
from engine_agent.protocol.states import AgentKind, MachinePhase

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
STABLE_AFTER_S = 60.0


class Step(StrEnum):
    NOTHING = "nothing"
    WIPE = "wipe"
    START = "start"
    LEAVE = "leave"


@dataclass(frozen=True, slots=True)
class HostState:
    """The state of the host: `runs`, the id of the agent with a folder here; `alive`, whether that agent runs; the
    earliest time of its next start."""

    runs: str
    alive: bool
    start_after_s: float = 0.0


def next_step(order: MachineOrder | None, here: HostState, now_s: float) -> Step:
    """The next step. Without an order nothing changes."""
    if order is None:
        return Step.NOTHING
    wanted = order.run.id if order.run is not None and not order.leave else ""
    if here.runs and here.runs != wanted:
        return Step.WIPE
    if order.leave:
        return Step.LEAVE
    if wanted and not here.alive and now_s >= here.start_after_s:
        return Step.START
    return Step.NOTHING


def phase_of(order: MachineOrder | None, here: HostState, *, left: bool = False) -> MachinePhase:
    """The reported phase, except while wiping."""
    if left:
        return MachinePhase.LEFT
    if here.runs:
        return MachinePhase.RUNNING if here.alive else MachinePhase.AGENT_DEAD
    return MachinePhase.STARTING if order is not None and order.run is not None else MachinePhase.IDLE


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


class MachineAgent:
    """Runs one host until cancelled, until it has left, or until it has switched to another release."""

    def __init__(
        self,
        *,
        paths: HostPaths,
        tenant: Tenant,
        enrolment: Enrolment,
        hello: Callable[[], Hello],
        release: ReleaseChange,
    ) -> None:
        self._paths, self._tenant, self._enrolment, self._release = paths, tenant, enrolment, release
        self._journal = Journal(paths.home / JOURNAL_FILE, MachineOrder)
        self._connection = AgentConnection(enrolment=enrolment, hello=hello, on_message=self._on_message)
        self._order: MachineOrder | None = None
        self._waiting: MachineOrder | None = None
        self._order_problem = ""
        self._wake = asyncio.Event()
        self._was_ordered = False
        self._failures = 0
        self._started_s = 0.0
        self._start_after_s = 0.0
        self._restarts = 0
        self._reason = ""
        self._reported: MachineReport | None = None
        self._report_due_s = 0.0

    async def run(self) -> int:
        """Resumes and follows orders. Returns the exit status when the host has left or changes its release."""
        try:
            self._order = self._journal.load()
        except CorruptJournal as error:
            log.error("%s", error)
        connection = asyncio.create_task(self._connection.run())
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
            connection.cancel()
            await asyncio.gather(connection, return_exceptions=True)

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
        self._failures, self._start_after_s = 0, 0.0

    async def _pass(self) -> int:
        """Runs one pass; returns 0 to continue, or the exit status."""
        self._take_order()
        now_s = asyncio.get_running_loop().time()
        here = self._host_state()
        step = next_step(self._order, here, now_s)
        if step is Step.WIPE:
            self._report(MachinePhase.WIPING)
            self._reason = await asyncio.to_thread(self._tenant.wipe)
            if not self._reason:
                log.info("wiped %s", here.runs)
        elif step is Step.START and self._order is not None and self._order.run is not None:
            await self._start(self._order.run, here, now_s)
        elif here.alive and self._tenant.is_of_other_release and not self._release.on_trial:
            await self._renew(here)
        elif here.alive and self._failures and now_s - self._started_s > STABLE_AFTER_S:
            self._failures, self._reason = 0, ""
        left = step is Step.LEAVE
        self._report(phase_of(self._order, self._host_state(), left=left))
        bound(self._paths.log)
        return LEFT if left else CHANGES_RELEASE if await self._changes_release() else 0

    async def _changes_release(self) -> bool:
        """Starts or continues the ordered change of the release. True: this process must exit for it."""
        if self._was_ordered:
            self._was_ordered = False
            await asyncio.to_thread(self._release.confirm)
        order = self._order.release if self._order is not None and not self._order.leave else None
        return await self._release.follow(order, self._enrolment.servers.all, self._enrolment.stored_credential())

    async def _renew(self, here: HostState) -> None:
        """Restarts the agent from this release; its processes keep running."""
        if self._order is None or self._order.run is None:
            return
        try:
            await asyncio.to_thread(self._tenant.kill_agent)
            self._tenant.start(self._order.run, self._servers)
        except (OSError, ValueError) as error:
            log.error("%s cannot be started: %s", here.runs, error)  # the next pass starts it, as after every exit

    def _host_state(self) -> HostState:
        runs = self._tenant.id
        return HostState(runs, alive=bool(runs) and self._tenant.pid() is not None, start_after_s=self._start_after_s)

    async def _start(self, run: RunAgent, here: HostState, now_s: float) -> None:
        if here.runs and self._tenant.started() is not None:
            self._restarts += 1
            self._reason = self._tenant.end_reason()
            log.warning("%s: %s", run.id, self._reason)
            self._report(MachinePhase.AGENT_DEAD)
        self._start_after_s, self._failures = now_s + pause_s(self._failures), self._failures + 1
        try:
            await self._enrol(run)
            self._tenant.start(run, self._servers)
        except (EnrolmentRefused, EnrolmentUnreachable, OSError, ValueError) as error:
            self._reason = f"{run.id} cannot be started: {error}"
            self._start_after_s = now_s + ENROL_PAUSE_S
            log.error("%s", self._reason)
            return
        self._started_s = now_s
        self._reason = "" if self._failures == 1 else self._reason
        log.info("started %s %s", run.kind, run.id)

    async def _enrol(self, run: RunAgent) -> None:
        folder = self._tenant.folder(run.id)
        own = Enrolment(self._servers, run.kind, run.id, folder, join_token=self._enrolment.stored_credential())
        if own.stored_credential() is None:
            folder.mkdir(parents=True, mode=0o700, exist_ok=True)
            if self._connection.identity.has_bundle:
                bundle = self._connection.identity.bundle_file.read_text(encoding="ascii")
                Identity(folder).store_trust(bundle=bundle, revoked="")
            await self._enrol_anywhere(own)

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

    def _report(self, phase: MachinePhase) -> None:
        now_s, tried = asyncio.get_running_loop().time(), self._release.tried
        report = MachineReport(
            seq=0,
            version=self._order.version if self._order is not None else 0,
            phase=phase,
            runs=self._tenant.id,
            reason="; ".join(filter(None, (self._order_problem, self._reason))),
            agent_pid=self._tenant.pid(),
            restarts=self._restarts,
            wants_to_leave=self._paths.leave_wish.exists(),
            release_trouble=tried.trouble if tried is not None else "",
            attempt=tried.attempt if tried is not None else 0,
        )
        if report != self._reported or now_s >= self._report_due_s:
            self._reported, self._report_due_s = report, now_s + REPORT_EVERY_S
            self._connection.send(report)


log = logging.getLogger(__name__)

FACTS_LIMIT_S = 60.0


def run(argv: list[str]) -> int:
    """Runs the agent. Exit status 3: the host has left; 4: start the agent again, from another release."""
    os.umask(0o077)
    parser = argparse.ArgumentParser(prog="python -m engine_agent machine", description=__doc__)
    parser.add_argument("--code", required=True, type=Path, help="the folder of the installation")
    paths = HostPaths(parser.parse_args(argv).code)
    try:
        joined = paths.joined()
        machine = joined.machine or machine_id_of((paths.home / NONCE_FILE).read_text(encoding="ascii").strip())
        configure_logging(os.environ, "switchyard-machine")
        with AgentLock(paths.home, machine):
            status = asyncio.run(_run_until_signalled(paths, joined, machine))
    except (HomeInUse, OSError, ValueError, msgspec.DecodeError) as error:
        sys.stderr.write(f"the machine agent does not start: {error}\n")
        return 1
    if status == LEFT:
        uninstall_in_background(paths)
    return status


async def _run_until_signalled(paths: HostPaths, joined: Joined, machine: str) -> int:
    boot_id, version = uuid.uuid4().hex, agent_version()
    facts = await asyncio.to_thread(_facts, paths, joined)

    def hello() -> Hello:
        return Hello(
            protocol=PROTOCOL_VERSION,
            kind=AgentKind.MACHINE,
            id=machine,
            boot_id=boot_id,
            agent_version=version,
            machine=facts,
        )

    enrolment = Enrolment(joined.server, AgentKind.MACHINE, machine, paths.home)
    agent = MachineAgent(
        paths=paths,
        tenant=Tenant(paths, AGENT_ROOT, joined.variables),
        enrolment=enrolment,
        hello=hello,
        release=ReleaseChange(paths, release_in(AGENT_ROOT)),
    )
    running = asyncio.ensure_future(agent.run())
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, running.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        return await running
    return 0


def _facts(paths: HostPaths, joined: Joined) -> MachineFacts:
    """The current facts, read by a child process, so that memory used by drivers is released."""
    command = [sys.executable, "-m", "engine_agent", "facts", "--code", str(paths.code)]
    try:
        done = subprocess.run(command, capture_output=True, timeout=FACTS_LIMIT_S, check=True)
        return msgspec.json.decode(done.stdout, type=MachineFacts)
    except (OSError, subprocess.SubprocessError, msgspec.DecodeError) as error:
        log.warning("the facts of the host cannot be read; those of when it joined are used: %s", error)
        return joined.facts


def print_facts(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m engine_agent facts")
    parser.add_argument("--code", required=True, type=Path)
    paths = HostPaths(parser.parse_args(argv).code)
    then = paths.joined().facts
    now = read_facts(then.address, then.port_base, paths.state, clock_ahead_s=then.clock_ahead_s)
    sys.stdout.write(msgspec.json.encode(now).decode())
    return 0


def uninstall_in_background(paths: HostPaths) -> None:
    """Uninstalls in a separate session, which survives this process and its unit."""
    subprocess.Popen(
        [sys.executable, "-m", "engine_agent", "leave", "--now", "--code", str(paths.code)],
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
