"""One node: its order in force, its processes and their state. It accepts orders and applies the planner's steps, and
writes the journal before it acts. `planning` decides what to do next, `agent` when."""

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

import msgspec

from engine_agent.engines.base import EngineUnavailable, Launch, MeasuresSteps, follower_count, local_folder
from engine_agent.engines.builds.store import host_facts
from engine_agent.engines.compile_cache import CompilePlace, compile_key, with_compile_cache
from engine_agent.engines.registry import check_plan, check_role, engine_adapter
from engine_agent.node import procfs, watch
from engine_agent.node.accounts import Service, open_way, service_account
from engine_agent.node.builds import BUILDS, NodeBuilds
from engine_agent.node.compile_caches import NodeCaches
from engine_agent.node.devices import DeviceTurn, InstanceCheck, own_devices, with_device_share, with_devices
from engine_agent.node.downloads import Downloads
from engine_agent.node.http import HttpClient, NoResponse
from engine_agent.node.identity import IdentityCopy, with_certificate
from engine_agent.node.journal import CorruptJournal, Journal
from engine_agent.node.launch import NodePlace, proxy_admin_url, proxy_launch, with_fingerprint
from engine_agent.node.logs import bound, last_lines
from engine_agent.node.planning.node import (
    LIMITS,
    Failure,
    MarkFailed,
    Membership,
    NodeSnapshot,
    ProcessKind,
    SetProxyPairs,
    SetProxyPhase,
    StartEngine,
    StartProxy,
    Step,
    StopEngine,
    StopProxy,
    Wait,
    membership_of,
    next_in_a_row,
    refusal,
)
from engine_agent.node.prefetching import Prefetching
from engine_agent.node.processes import ProcessEnd, Processes, end_reason, ended_fault, not_started_fault
from engine_agent.node.record import JOURNAL_FILE, FailureRecord, NodeRecord, ProcessRecord, newest_record, with_order
from engine_agent.node.telemetry.fault_logs import runtime_faults
from engine_agent.node.weights import WEIGHTS, NodeWeights, local_plan
from engine_agent.protocol.fingerprint import Fingerprint, fingerprint_from
from engine_agent.protocol.messages import Assignment, Desired, EnginePlan, Fault, StepTimes
from engine_agent.protocol.request_messages import RequestWindow
from engine_agent.protocol.states import MemberRole
from engine_agent.protocol.telemetry_messages import Accelerator, Prefetched

log = logging.getLogger(__name__)

EVIDENCE_LINES = 20
CONFIGURE_TIMEOUT_S = 1.0


class LocalNode:
    """The state of this node. `on_change` is called when there may be something to plan, `on_fault` with evidence.
    `stack` returns the fingerprint of the machine and `devices` all of its accelerators; they are called at every start
    of an engine. `now_s` is the clock of all limits."""

    def __init__(
        self,
        place: NodePlace,
        *,
        stack: Callable[[], Fingerprint],
        on_change: Callable[[], None],
        on_fault: Callable[[Fault], None],
        downloads: Downloads,
        caches: NodeCaches,
        devices: Callable[[], Sequence[Accelerator]] = tuple,
        now_s: Callable[[], float] = monotonic,
    ) -> None:
        self.place = place
        self._downloads = downloads
        self.builds = NodeBuilds(place.cache.parent / BUILDS, downloads)
        self._weights = NodeWeights(place.cache.parent / WEIGHTS, place.cache, downloads)
        self._prefetching = Prefetching(self.builds, self._weights, downloads, now_s)
        self.caches = caches
        self._devices = devices
        self._now_s = now_s
        self._stack = stack
        self.seen = watch.ProbeResults()
        self._http = HttpClient()
        self._windows_upto = 0
        self._on_change = on_change
        self._on_fault = on_fault
        self._journal = Journal(place.home / JOURNAL_FILE, NodeRecord)
        self._record = NodeRecord(place.node_id)
        accounts = {
            ProcessKind.ENGINE: service_account(Service.ENGINE),
            ProcessKind.PROXY: service_account(Service.PROXY),
        }
        open_way(place.home, any(accounts.values()))
        self._identity_copy = IdentityCopy(place.home, accounts[ProcessKind.PROXY]) if place.has_links else None
        self._processes = Processes(
            place.node_id,
            place.home,
            on_end=self._process_ended,
            on_free=on_change,
            accounts=accounts,
            now_s=now_s,
        )
        self._last_engine_failure: Failure | None = None
        self._failure: Failure | None = None
        self._proxy_failure: Failure | None = None
        self._proxy_change: asyncio.Task[None] | None = None
        self._turn = DeviceTurn(place.cache / "device-turns", place.owns)
        self._waits_for_turn = False
        self._instance = InstanceCheck(place.owns)
        self.refused_order = ""
        self.journal_error = ""

    @property
    def desired(self) -> Assignment | None:
        return self._record.desired.assignment if self._record.desired is not None else None

    @property
    def order(self) -> Desired | None:
        return self._record.desired

    @property
    def is_serving(self) -> bool:
        return self._processes.running(ProcessKind.ENGINE) is not None

    # --- across agent processes ---------------------------------------------------------------------------------

    def resume(self) -> None:
        """Continues where an earlier agent of this node stopped: its order, its processes, its last failure. If the
        journal is lost, damaged or older than the running engine, the engine's environment has its order."""
        try:
            self._record = self._journal.load() or self._record
        except (CorruptJournal, OSError) as error:
            log.error("%s", error)
        rebuilt = newest_record(self._record, self.place.node_id, procfs.boot_id())
        if rebuilt is not self._record and rebuilt.desired is not None:
            log.warning("the journal is out of date: using order %d of the running engine", rebuilt.desired.version)
            self._record = rebuilt
            self._save()
        now_s = self._now_s()
        if self._record.failure is not None:
            self._failure = self._last_engine_failure = self._record.failure.failure(now_s)
        engine, proxy = self._record.engine, self._record.proxy
        if engine is not None:
            if self._processes.adopt(ProcessKind.ENGINE, engine):
                self.seen = watch.ProbeResults(was_ready=engine.was_ready)
                log.info(
                    "adopted the engine of generation %d of %s, pid %d", engine.generation, engine.cell, engine.pid
                )
            elif self._failure is None:
                self._set_failure(engine.membership, "the engine ended while no agent watched it", ran_stably=False)
        if proxy is not None and self._processes.adopt(ProcessKind.PROXY, proxy):
            log.info("adopted the cell proxy, pid %d", proxy.pid)
        killed = self._processes.kill_unknown()
        if killed:
            log.warning("killed %d process(es) of this node that are not in the journal", killed)

    def close(self) -> None:
        """Stops watching; all processes keep running."""
        if self._proxy_change is not None:
            self._proxy_change.cancel()
        self._downloads.close()
        self.caches.close()
        self._turn.leave()
        self._http.close()
        self._processes.close()

    # --- orders ------------------------------------------------------------------------------------------------------

    def take_order(self, received: Desired) -> None:
        """Puts the order in force, on disk first, or rejects it if it is not newer."""
        running = self._processes.running(ProcessKind.ENGINE) or self._processes.running(ProcessKind.PROXY)
        member = running.membership if running is not None else None
        reason = refusal(self._record.desired, received, self.place.node_id, member)
        if reason is not None:
            log.warning("rejected an order: %s", reason)
            self.refused_order = reason
            return
        if received != self._record.desired:
            log.info("order %d: %s", received.version, _in_words(received.assignment))
            self._save(desired=received)
            self._on_change()

    # --- state --------------------------------------------------------------------------------------------------------

    def snapshot(self, no_contact_since_s: float | None) -> NodeSnapshot:
        """The processes and their state, for the planners."""
        return NodeSnapshot(
            engine=self._processes.running(ProcessKind.ENGINE),
            proxy=self._processes.running(ProcessKind.PROXY),
            health=self.seen.health,
            was_ready=self.seen.was_ready,
            proxy_phase=self.seen.proxy_phase,
            proxy_pairs=self.seen.proxy_pairs,
            proxy_silent_since_s=self.seen.proxy_silent_since_s,
            failure=self._failure,
            proxy_failure=self._proxy_failure,
            no_contact_since_s=no_contact_since_s,
            before_start=self._before_start(),
        )

    def _before_start(self) -> str:
        if self._waits_for_turn:
            return "it waits until another engine on its device has started"
        if self.desired is None:
            return ""
        return self._fetching_words(self.desired.plan) or self.caches.words()

    def _fetching_words(self, plan: EnginePlan) -> str:
        digests = [plan.build.digest] if plan.build is not None else []
        digests += [each.digest for each in plan.artifacts]
        return "; ".join(filter(None, map(self._downloads.words, digests)))

    @property
    def prefetched(self) -> Prefetched:
        return self._prefetching.report()

    def prefetch(self) -> None:
        """Continues to fetch what the order wants in advance."""
        wanted = self.order.prefetch if self.order is not None else None
        self._prefetching.advance(wanted, is_spare=self.desired is None)

    async def poll(self) -> None:
        desired, engine = self.desired, self._processes.running(ProcessKind.ENGINE)
        if desired is None or engine is None or engine.membership != membership_of(desired):
            return
        is_judged = self._failure is not None  # it is being stopped
        if self.seen.was_ready and not is_judged and (trouble := self._instance.trouble(self._devices())):
            self._give_up(engine.membership, trouble)
            return
        proxy, before = self._processes.running(ProcessKind.PROXY), self.seen
        if desired.role is MemberRole.FOLLOWER:
            url = engine_adapter(desired.plan.engine).health_url(desired, self.place.context())
            after = watch.after_engine(before, await watch.probe_engine(self._http, url, before.state))
        elif proxy is not None and proxy.membership == engine.membership:
            url = proxy_admin_url(self.place.context(), "/status")
            status = await watch.fetch_proxy_status(self._http, url, before.state)
            after = watch.after_proxy(before, status, self._now_s())
        else:
            return
        if self.seen is before:  # otherwise a process started or ended meanwhile, and the answer is out of date
            self.seen = after
            self._note_ready(before, after)

    async def measure(self) -> StepTimes | None:
        desired, engine = self.desired, self._processes.running(ProcessKind.ENGINE)
        if desired is None or engine is None or engine.membership != membership_of(desired):
            return None
        adapter = engine_adapter(desired.plan.engine)
        if not isinstance(adapter, MeasuresSteps):
            return None
        return await watch.fetch_steps(self._http, adapter.steps_url(desired, self.place.context()))

    async def request_windows(self) -> tuple[RequestWindow, ...]:
        """The samples of requests that the proxy of this leader has closed since the last call."""
        proxy = self._processes.running(ProcessKind.PROXY)
        if self.desired is None or self.desired.role is MemberRole.FOLLOWER or proxy is None:
            return ()
        url = proxy_admin_url(self.place.context(), "/requests")
        closed = await watch.fetch_request_windows(self._http, url, self._windows_upto)
        if closed is None:
            return ()
        self._windows_upto = closed.upto
        return closed.windows

    def bound_logs(self) -> None:
        for name in ("agent", *ProcessKind):
            bound(self.place.home / f"{name}.log")

    def identity_changed(self) -> None:
        """Call when the agent has a new certificate or new authorities: its proxy needs them."""
        if self._identity_copy and self._processes.running(ProcessKind.PROXY):
            try:
                self._identity_copy.update()
            except OSError as error:
                log.error("cannot copy a new certificate for the cell proxy: %s", error)
        self._on_change()

    # --- steps --------------------------------------------------------------------------------------------------------

    def apply(self, step: Step) -> None:
        """Takes one step. An error becomes a failure of this start, never an exception."""
        match step:
            case StartEngine():
                self._start_engine(step)
            case StartProxy():
                self._start_proxy(step)
            case StopEngine(grace_s=grace_s, reason=reason):
                log.info("stopping the engine: %s", reason)
                self._processes.stop(ProcessKind.ENGINE, grace_s)
            case StopProxy(grace_s=grace_s, reason=reason):
                log.info("stopping the cell proxy: %s", reason)
                self._processes.stop(ProcessKind.PROXY, grace_s)
            case SetProxyPhase(phase=phase):
                self._configure_proxy("/phase", msgspec.json.encode({"phase": phase}))
            case SetProxyPairs(pairs=pairs):
                self._configure_proxy("/pairs", msgspec.json.encode(pairs))
            case MarkFailed(membership=member, reason=reason):
                self._give_up(member, reason)
            case Wait():
                pass

    def _start_engine(self, step: StartEngine) -> None:
        given, member = step.assignment, membership_of(step.assignment)
        with contextlib.ExitStack() as locks:
            try:
                check_plan(given.plan)
                check_role(given)
                held = self._obtain(given.plan, locks)
                if held is None:  # something is on its way, and a pass follows when it has arrived
                    self._prefetching.release()
                    return
                self._waits_for_turn = not self._turn.take()
                if self._waits_for_turn:
                    return  # passes follow in any case
                context = self.place.launch_context(held.engine)
                local = msgspec.structs.replace(given, plan=local_plan(given.plan, held.folders))
                launch = engine_adapter(given.plan.engine).launch(local, context)
                launch = with_fingerprint(launch, given.plan, {**self._stack(), **held.stack})
                if launch.compiles is not None:
                    key = self._compile_key(local, launch, context.engine_pythons.get(given.plan.engine))
                    if not self.caches.prepare(key, launch.compiles):
                        self._turn.leave()
                        return  # as for a build
                log.info("starting the engine: %s", step.reason)
                self.seen = watch.without_engine(self.seen)
                self._instance.restart()
                if launch.compiles is not None:
                    with contextlib.suppress(OSError):  # it then compiles into its own home
                        cache = self.caches.obtain()
                        locks.callback(os.close, cache.lock)
                        held.locks.append(cache.lock)
                        launch = with_compile_cache(launch, given.plan.env, cache.folder)
                launch = with_device_share(launch, self.place.owns, given.plan.engine, 1 + follower_count(given))
                launch = with_devices(launch, self.place.owns, self._devices())
                launch = with_certificate(with_order(launch, self.order), given)
                # The engine keeps its build, its weights and its compile cache until it exits.
                record = self._processes.start(ProcessKind.ENGINE, member, launch, tuple(held.locks))
            except (EngineUnavailable, OSError) as error:
                self._give_up(member, str(error))
                return
        self._failure = None
        self._save(engine=record, failure=None)

    def _compile_key(self, given: Assignment, launch: Launch, engine: Path | None) -> str:
        owned = own_devices(self.place.owns, self._devices())
        paths = (self.caches.folder, engine, *(local_folder(each, self.place.cache) for each in given.plan.artifacts))
        place = CompilePlace(
            host=host_facts(),
            cores=len(os.sched_getaffinity(0)),
            devices=tuple(device.name for device in owned),
            paths=tuple(map(str, paths)),
        )
        return compile_key(given, fingerprint_from(launch.env), place)

    def _obtain(self, plan: EnginePlan, locks: contextlib.ExitStack) -> "_Held | None":
        """The build and the weights of a plan, kept until `locks` closes; None while one of them is on its way. Raises
        EngineUnavailable if one cannot be had."""
        build = self.builds.obtain(plan.build) if plan.build is not None else None
        if build is not None:
            locks.callback(os.close, build.lock)
        kept = [build.lock] if build is not None else []
        folders = self._weights.obtain(plan, kept, locks)
        if folders is None or (plan.build is not None and build is None):
            return None
        facts = plan.build.facts if plan.build is not None else None
        engine = {facts.serves: build.program} if build is not None and facts is not None else None
        return _Held(engine, folders, kept, build.stack if build is not None else {})

    def _start_proxy(self, step: StartProxy) -> None:
        member = membership_of(step.assignment)
        if self._identity_copy and not self._identity_copy.can_update():
            return  # its certificate is requested; a pass follows when it arrives
        log.info("starting the cell proxy: %s", step.reason)
        self.seen = watch.without_proxy(self.seen)
        try:
            if self._identity_copy:
                self._identity_copy.update()
            launch = proxy_launch(
                step.assignment, self.place.context(), self._identity_copy.home if self._identity_copy else None
            )
            self._save(proxy=self._processes.start(ProcessKind.PROXY, member, launch))
        except (OSError, EngineUnavailable) as error:
            self._proxy_failed(member, f"the cell proxy did not start: {error}", ran_stably=False)

    def _configure_proxy(self, path: str, body: bytes) -> None:
        """Sends the proxy its phase or its pairs, unless a request is in progress. The next status shows whether it
        accepted them."""
        if self._proxy_change is None or self._proxy_change.done():
            url = proxy_admin_url(self.place.context(), path)
            self._proxy_change = asyncio.get_running_loop().create_task(_post(self._http, url, body))

    # --- ends and failures -------------------------------------------------------------------------------------------

    def _process_ended(self, end: ProcessEnd) -> None:
        """Called immediately when a process has exited, whether it was stopped or not."""
        log.log(logging.INFO if end.was_ordered else logging.WARNING, "%s", end)
        lines = self._last_lines(end.kind)
        ran_stably = end.ran_s >= LIMITS.stable_after_s
        member = end.record.membership
        reason = end_reason(end, lines)
        if end.kind is ProcessKind.ENGINE:
            self._turn.leave()
            if not end.was_ordered:
                self._set_failure(member, reason, ran_stably and self.seen.was_ready)
            elif self._failure is None:
                self.caches.is_good()
            self._save(engine=None)
            self.seen = watch.without_engine(self.seen)
        else:
            self._proxy_failed(member, reason, ran_stably)
            self._save(proxy=None)
            self.seen = watch.without_proxy(self.seen)
        if not end.was_ordered:
            for fault in (ended_fault(end, reason, lines), *runtime_faults(lines)):
                self._on_fault(fault)
        self._on_change()

    def _give_up(self, member: Membership, reason: str) -> None:
        self._turn.leave()
        log.warning("gave up: %s", reason)
        self._set_failure(member, reason, ran_stably=False)
        self._on_fault(not_started_fault(member, reason, self._last_lines(ProcessKind.ENGINE)))
        self._on_change()

    def _set_failure(self, member: Membership, reason: str, ran_stably: bool) -> None:
        previous = self._last_engine_failure
        same = previous if previous is not None and previous.membership == member else None
        self._failure = Failure(member, reason, self._now_s(), next_in_a_row(same, ran_stably))
        self._last_engine_failure = self._failure
        self._save(failure=FailureRecord.of(self._failure))

    def _proxy_failed(self, member: Membership, reason: str, ran_stably: bool) -> None:
        previous = self._proxy_failure
        same = previous if previous is not None and previous.membership == member else None
        self._proxy_failure = Failure(member, reason, self._now_s(), next_in_a_row(same, ran_stably))

    def _last_lines(self, kind: ProcessKind) -> list[str]:
        return last_lines(self._processes.log_path(kind), EVIDENCE_LINES)

    def _note_ready(self, before: watch.ProbeResults, after: watch.ProbeResults) -> None:
        engine = self._record.engine
        if after.was_ready:
            self._turn.leave()
        if after.was_ready and engine is not None and not engine.was_ready:
            self._save(engine=msgspec.structs.replace(engine, was_ready=True))
            self._processes.lower_priority(ProcessKind.ENGINE)
            self.caches.is_good()
            self.caches.offer()
        if watch.is_change(before, after):
            self._on_change()

    def _save(self, **changes: Desired | ProcessRecord | FailureRecord | None) -> None:
        """Writes the journal. A full disk must not stop a node: the error is logged and reported."""
        self._record = msgspec.structs.replace(self._record, **changes)
        try:
            self._journal.save(self._record)
            self.journal_error = ""
        except OSError as error:
            log.error("cannot write the journal: %s", error)
            self.journal_error = str(error)


@dataclass(frozen=True, slots=True)
class _Held:
    """What an engine starts from. `engine`: that of the plan's build, as `engine_pythons` names engines, None without a
    build; `folders`: weights in the agent's folder by digest; `locks`: descriptors that keep all of them; `stack`:
    packages of an external build."""

    engine: Mapping[str, Path] | None
    folders: Mapping[str, Path]
    locks: list[int]
    stack: Mapping[str, str]


async def _post(http: HttpClient, url: str, body: bytes) -> None:
    try:
        answer = await http.request("POST", url, timeout_s=CONFIGURE_TIMEOUT_S, body=body)
    except NoResponse as error:
        log.warning("the cell proxy did not get a change: %s", error)
        return
    if answer.status >= 300:
        log.warning("the cell proxy rejected a change at %s: status %d", url, answer.status)


def _in_words(assignment: Assignment | None) -> str:
    if assignment is None:
        return "run nothing"
    return f"{assignment.phase} as rank {assignment.rank} in generation {assignment.generation} of {assignment.cell}"
