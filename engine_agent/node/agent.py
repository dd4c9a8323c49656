"""The node agent: loops around one node that converge (plan and apply steps), watch (poll the processes) and report
(every two seconds). Planners decide, and an error in a pass does not end a loop. The node's processes survive the
agent; the next agent adopts them. The cause of an order (the id of a request) is logged, and recorded as a span if
tracing is on."""

import asyncio
import logging
import os
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import structs

from engine_agent.engines.vllm.kv_transfer import STORE_FOLDER, delete_unused_blocks
from engine_agent.node.accounts import Service, service_account
from engine_agent.node.checks.reset import reset_devices
from engine_agent.node.checks.result import Result
from engine_agent.node.compile_caches import COMPILED, NodeCaches
from engine_agent.node.connection import AgentConnection, report_interval_s
from engine_agent.node.devices import visible_devices
from engine_agent.node.downloads import Downloads
from engine_agent.node.enrolment import Enrolment
from engine_agent.node.identity import Identity
from engine_agent.node.launch import NodePlace
from engine_agent.node.logs import LogTailSender
from engine_agent.node.node import LocalNode
from engine_agent.node.node_checks import NodeChecks
from engine_agent.node.peers import serve_peers
from engine_agent.node.planning.converge import observe, plan_convergence
from engine_agent.node.planning.node import LIMITS, ConvergeLimits, Wait
from engine_agent.node.telemetry.accelerators import AcceleratorMonitor, OnFault
from engine_agent.node.telemetry.energy import energy_here
from engine_agent.node.telemetry.exposition import serve_metrics
from engine_agent.node.telemetry.fault_logs import EngineLog
from engine_agent.node.telemetry.host import READ_EFA_EVERY_S, EfaDevices, accelerators_here, read_usage
from engine_agent.node.watch import POLL_INTERVAL_S
from engine_agent.protocol.fingerprint import Fingerprint, differing_fields
from engine_agent.protocol.messages import Desired, Health, Hello, Observed, Order, Report, StepTimes
from engine_agent.protocol.ports import AGENT_METRICS, ARTIFACTS
from engine_agent.protocol.request_messages import WINDOW_S
from engine_agent.protocol.states import EngineState
from engine_agent.protocol.ticks import seconds_to_tick
from engine_agent.protocol.tracing import TRACEPARENT, TraceSettings, TracingOff, begin_span, span_json, trace_settings
from engine_agent.protocol.watchdog import AwakeClock

if TYPE_CHECKING:
    from engine_agent.cell_proxy.span_export import SpanExporter

SERVICE = "switchyard-node-agent"

log = logging.getLogger(__name__)


def order_trace(node: str, environment: Mapping[str, str] = os.environ) -> "OrderTrace":
    try:
        settings = trace_settings(environment, SERVICE)
    except TracingOff as error:
        log.error("no traces: %s", error)
        settings = None
    return OrderTrace(node, settings)


class OrderTrace:
    def __init__(self, node: str, settings: TraceSettings | None) -> None:
        self._node = node
        self._settings = settings
        self.exporter: SpanExporter | None = None

    @contextmanager
    def taking(self, message: Desired) -> Iterator[None]:
        began_ns, cause = time.time_ns(), message.cause
        yield
        if cause is None:
            return
        place = begin_span([(TRACEPARENT, cause.traceparent.encode("latin-1", "replace"))], 0.0, random.getrandbits)
        carried = {"request_id": cause.request_id, "trace_id": place.trace_id if place else ""}
        log.info("order %d was caused by request %s", message.version, cause.request_id, extra=carried)
        if self.exporter is not None and place is not None:
            about = {"switchyard.request_id": cause.request_id, "switchyard.version": message.version}
            span = span_json(place, "take order", began_ns, time.time_ns(), False, kind="consumer", **about)
            self.exporter.add(span)

    async def run(self) -> None:
        if self._settings is None:
            await asyncio.Event().wait()
            return
        from engine_agent.cell_proxy.span_export import SpanExporter  # a tenth of an agent's start

        self.exporter = SpanExporter(self._settings, {"switchyard.node": self._node})
        try:
            await self.exporter.run()
        finally:
            self.exporter.close()


log = logging.getLogger(__name__)

# `TICK_S` is the longest delay in noticing limits that depend only on time (a silent proxy, a late start).
PAUSE_AFTER_ERROR_S = 1.0
BOUND_LOGS_EVERY_S = 60.0
DELETE_BLOCKS_EVERY_S = 3600.0
NEURON = "neuron"
READ_STACK_EVERY_S = 30.0
"""Longest delay in reporting software that was installed under a running agent."""


class NodeAgent:
    """Runs one node until cancelled."""

    def __init__(
        self,
        *,
        place: NodePlace,
        enrolment: Enrolment,
        hello: Callable[[], Hello],
        stack: Callable[[], Fingerprint],
        accelerators: Callable[[OnFault], AcceleratorMonitor] | None = None,
        limits: ConvergeLimits = LIMITS,
    ) -> None:
        self._limits = limits
        self._awake = AwakeClock()
        """The clock of every limit. A stopped agent polled nothing, so its own pause must not count as silence."""
        self._wake = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._hello = hello
        self._stack = stack
        self._sent_fingerprint: Fingerprint = {}
        self._connection = AgentConnection(
            enrolment=enrolment,
            hello=self._make_hello,
            on_message=self._on_message,
            on_identity=lambda: self._node.identity_changed(),  # noqa: PLW0108 - there is none yet
        )
        downloads = Downloads(enrolment, self._wake_from_thread)
        self._node = LocalNode(
            place,
            stack=stack,
            on_change=self._wake.set,
            on_fault=self._connection.send_fault,
            downloads=downloads,
            caches=NodeCaches(
                place.cache.parent / COMPILED,
                place.node_id,
                downloads,
                self._wake_from_thread,
                service_account(Service.ENGINE),
            ),
            devices=lambda: self._accelerators.machine_devices(),  # noqa: PLW0108 - there are none yet
            now_s=self._awake.now_s,
        )
        self._accelerators = (accelerators or partial(accelerators_here, owns=place.owns))(self._connection.send_fault)
        self._energy = energy_here(self._accelerators)
        self._efa = EfaDevices(self._connection.send_fault)
        self._engine_log = EngineLog(place.home / "engine.log", self._connection.send_fault)
        self._no_contact_since_s: float | None = self._awake.now_s()
        self._last_observed: Observed | None = None
        self._steps: StepTimes | None = None
        self._logs = LogTailSender(place.home)
        self._home = place.home
        self._checks = NodeChecks(
            place.home,
            lambda: _pythons_of(place),
            self._connection.send_fault,
            lambda: self._send_report() if self._last_observed is not None else None,
            lambda: visible_devices(place.owns, self._accelerators.machine_devices()),
            self._reset_devices,
        )
        self._trace = order_trace(place.node_id)
        self._metrics_port = place.port_base + AGENT_METRICS
        identity, port = Identity(enrolment.home), place.port_base + ARTIFACTS
        self._serve_peers = partial(serve_peers, place.host, port, identity, place.cache.parent)
        self._has_links = place.has_links

    def _wake_from_thread(self) -> None:
        if self._loop is not None:
            with suppress(RuntimeError):  # it was closed meanwhile
                self._loop.call_soon_threadsafe(self._wake.set)

    async def run(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._node.resume()
        try:
            # Adopted processes are polled before the first report, so that a restarted agent never reports a serving
            # cell as starting.
            await self._node.poll()
            self._converge()
            metrics = partial(serve_metrics, self._metrics_port, self._connection.exposition)
            async with asyncio.TaskGroup() as loops:
                loops.create_task(self._connect(loops))
                loops.create_task(self._repeat("converge", self._converge_once))
                loops.create_task(self._repeat("watch", self._watch_once))
                loops.create_task(self._repeat("report", self._report_once))
                loops.create_task(self._repeat("requests", self._send_requests_once))
                loops.create_task(self._repeat("logs", self._bound_logs_once))
                loops.create_task(self._repeat("KV blocks", self._delete_blocks_once))
                loops.create_task(self._repeat("log lines", self._read_logs_once))
                loops.create_task(self._repeat("checks", self._check_once))
                if self._efa.is_any:
                    loops.create_task(self._repeat("efa", self._read_efa_once))
                loops.create_task(self._repeat("stack", self._read_stack_once))
                loops.create_task(self._repeat("traces", self._trace.run))
                loops.create_task(self._repeat("metrics", metrics))
                loops.create_task(self._repeat("energy", self._energy.run_once))
                if self._has_links:
                    loops.create_task(self._repeat("artifacts", self._serve_peers))
        finally:
            self._node.close()

    async def _connect(self, loops: asyncio.TaskGroup) -> None:
        """Detects accelerators, which the first message to the control plane lists; then connects."""
        try:
            await self._accelerators.prepare()
        except Exception:
            log.exception("error while detecting accelerators")
        loops.create_task(self._repeat("accelerators", self._accelerators.run))
        if not self._node.is_serving:  # an adopted engine serves in any case
            await self._checks.run_before_joining(len(self._accelerators.devices()))
        await self._repeat("connection", self._connection.run)

    async def _repeat(self, name: str, once: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await once()
            except Exception:
                # A node must survive any error in one pass; the next one starts from the complete state.
                log.exception("error in the %s loop", name)
                await asyncio.sleep(PAUSE_AFTER_ERROR_S)

    async def _converge_once(self) -> None:
        until_s = self._converge()
        pause_s = _seconds_to_tick()
        if until_s is not None:
            pause_s = min(pause_s, max(0.01, until_s - self._awake.now_s()))
        try:
            async with asyncio.timeout(pause_s):
                await self._wake.wait()
        except TimeoutError:
            return

    def _converge(self) -> float | None:
        self._wake.clear()
        self._note_contact()
        until_s = None
        node = self._node.snapshot(self._no_contact_since_s)
        for step in plan_convergence(self._node.desired, node, self._awake.now_s(), self._limits):
            self._node.apply(step)
            if isinstance(step, Wait):
                until_s = step.until_s
        self._node.prefetch()
        if self._observed() != self._last_observed:
            self._send_report()
        return until_s

    async def _watch_once(self) -> None:
        clock = asyncio.get_running_loop().time
        began_s = clock()
        await self._node.poll()
        await asyncio.sleep(max(0.0, POLL_INTERVAL_S - (clock() - began_s)))

    async def _report_once(self) -> None:
        await asyncio.sleep(report_interval_s(random.random()))
        self._send_report(await self._node.measure())

    async def _send_requests_once(self) -> None:
        await asyncio.sleep(WINDOW_S / 2)
        for window in await self._node.request_windows():
            self._connection.send_requests(window)

    async def _bound_logs_once(self) -> None:
        await asyncio.sleep(BOUND_LOGS_EVERY_S)
        self._node.bound_logs()

    async def _delete_blocks_once(self) -> None:
        await asyncio.to_thread(delete_unused_blocks, self._node.place.cache.parent / STORE_FOLDER, time.time())
        await asyncio.sleep(DELETE_BLOCKS_EVERY_S)

    async def _read_logs_once(self) -> None:
        """Lines are sent only while a user reads them."""
        await asyncio.sleep(_seconds_to_tick())
        tail = self._logs.due(self._node.order)
        if tail is not None:
            self._connection.send_logs(tail)
        if self._node.desired is not None and self._node.desired.plan.engine == NEURON:
            self._engine_log.read()  # it searches for messages of Neuron's runtime

    async def _check_once(self) -> None:
        await asyncio.sleep(_seconds_to_tick())
        order = self._node.order
        await self._checks.run_requested(order.check if order else None, is_serving=self._node.is_serving)

    async def _reset_devices(self, named: Sequence[str]) -> Result:
        """Without the agent's own sessions with drivers, which would keep them from resetting devices."""
        own, machine = self._accelerators.devices(), self._accelerators.machine_devices()
        async with self._accelerators.released():
            return await reset_devices(named, own, machine)

    async def _read_efa_once(self) -> None:
        self._efa.read()
        await asyncio.sleep(READ_EFA_EVERY_S)

    async def _read_stack_once(self) -> None:
        await asyncio.sleep(READ_STACK_EVERY_S)
        stack = self._stack()
        if self._sent_fingerprint and stack != self._sent_fingerprint:
            changed = ", ".join(difference.field for difference in differing_fields((self._sent_fingerprint, stack)))
            log.info("the stack changed: %s", changed)
            self._connection.resend_hello()

    def _make_hello(self) -> Hello:
        hello = self._hello()
        self._sent_fingerprint = hello.fingerprint
        if hello.inventory is None:
            return hello
        inventory = structs.replace(hello.inventory, accelerators=self._accelerators.inventory())
        return structs.replace(hello, inventory=inventory)

    def _on_message(self, message: Order) -> None:
        if isinstance(message, Desired):
            with self._trace.taking(message):
                self._node.take_order(structs.replace(message, cause=None))
        else:
            log.warning("ignored an order for another kind of agent: this is a node")

    def _note_contact(self) -> None:
        if self._connection.status.connected:
            self._no_contact_since_s = None
        elif self._no_contact_since_s is None:
            self._no_contact_since_s = self._awake.now_s()

    def _observed(self) -> Observed:
        node = self._node.snapshot(self._no_contact_since_s)
        return observe(self._node.desired, node, self._awake.now_s(), self._limits)

    def _send_report(self, steps: StepTimes | None = None) -> None:
        observed = self._observed()
        if self._last_observed is None or (observed.state, observed.reason) != (
            self._last_observed.state,
            self._last_observed.reason,
        ):
            log.info("%s %s", observed.state, observed.reason)
        self._last_observed = observed
        seen = self._node.seen
        telemetry = structs.replace(
            read_usage(observed.engine_pid, self._home),
            accelerators=self._accelerators.devices(),
            accelerator_trouble=self._accelerators.trouble(),
            refused_order=self._node.refused_order,
            journal_error=self._node.journal_error,
            energy=self._energy.meters(),
            checks=self._checks.report,
            network=self._efa.devices,
            builds=self._node.builds.report(),
            compile_caches=self._node.caches.report(),
            offered_caches=self._node.caches.offered(),
            prefetched=self._node.prefetched,
        )
        health = _health(observed, seen.health)
        report = Report(
            seq=0, observed=observed, health=health, load=seen.load, telemetry=telemetry, steps=steps or self._steps
        )
        self._steps = report.steps if observed.state is EngineState.READY else None
        self._connection.send(report)


def _seconds_to_tick() -> float:
    return seconds_to_tick(asyncio.get_running_loop().time())


def _pythons_of(place: NodePlace) -> tuple[Path, ...]:
    """Interpreters of installed engines; programs of engine `generic` are not interpreters."""
    installed = place.launch_context().engine_pythons
    return tuple(path for engine, path in installed.items() if "/" not in engine)


def _health(observed: Observed, health: Health | None) -> Health | None:
    """The engine's health for reports: while it starts or has failed, a missing or good health is reported as bad."""
    if observed.state in (EngineState.STARTING, EngineState.FAILED) and (health is None or health.ok):
        return Health(ok=False, reason=observed.reason)
    return health
