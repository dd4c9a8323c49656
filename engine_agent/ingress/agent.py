"""One ingress: receives routing tables, keeps its HAProxies in the state of the newest valid one, and reports. A table
is checked, then journalled, then put into force. A refused one changes nothing. Losing the control plane, this agent or
one HAProxy stops nothing else."""

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import time

from engine_agent.ingress.access_log import LogPipe, RefusalCounting, open_pipe
from engine_agent.ingress.application_tls import ApplicationTlsState
from engine_agent.ingress.bad_table import BadTable
from engine_agent.ingress.cache_feed import CacheFeed, CellAddress
from engine_agent.ingress.certificates import Applications, LinkFiles
from engine_agent.ingress.command_socket import CommandRefused, Unreachable
from engine_agent.ingress.config import body_parser_structure_of, render, render_body_parser, structure_of
from engine_agent.ingress.desired import EMPTY_DESIRED, DesiredHaproxy, desired_from
from engine_agent.ingress.exit_watch import ExitWatch
from engine_agent.ingress.grpc_process import GrpcProcess, without_taken_ports
from engine_agent.ingress.haproxy import ConfigRejected, HaproxyProcess
from engine_agent.ingress.hold_socket import HoldSocket
from engine_agent.ingress.key_map import KEYS_MAP
from engine_agent.ingress.load_feed import LoadFeed
from engine_agent.ingress.relay_processes import RelayProcesses
from engine_agent.ingress.report import (
    KEY_COUNTS_COMMAND,
    KeyCounting,
    cell_traffic,
    cell_views,
    change_counts,
    holding,
    read_key_counts,
    telemetry,
)
from engine_agent.ingress.request_samples import RefusedSampler
from engine_agent.ingress.routing_maps import CONTINUED_MAP, MODELS_MAP
from engine_agent.ingress.running import LostHosts
from engine_agent.ingress.runtime_api import take_back_requests
from engine_agent.ingress.settings import BodyParserTier, IngressSettings
from engine_agent.ingress.stream_counting import StreamCounting
from engine_agent.ingress.supervisor import HaproxySupervisor
from engine_agent.node.connection import report_interval_s
from engine_agent.node.identity import Identity
from engine_agent.node.journal import CorruptJournal, Journal
from engine_agent.protocol.ingress_messages import ApplicationTls, IngressObserved, IngressReport, RoutingTable
from engine_agent.protocol.messages import Order
from engine_agent.protocol.request_messages import RequestWindow
from engine_agent.relay.meter import RelayCounts

log = logging.getLogger(__name__)

POLL_S = 0.25
"""Maximum age of the view of a cell. Also how often an exit is looked for where the kernel does not report it."""
REST_S = 1.0
"""Between two passes while nothing has to be read more often. A message or an exit ends it."""
READ_IDLE_EVERY_S = 1.0
"""HAProxy is read this often while it is idle: only its health checks can change. The first request after that is seen
so much later."""
READ_PARSERS_EVERY_S = 1.0
"""Body parsers have no cells: only this agent changes them."""
WRITE_AGAIN_S = 2.0
"""Retry of a table that could not be written. The control plane does not send it again, and a full disk must not delay
it further."""
PORT_AGAIN_S = 15.0
"""Retry of a port for gRPC that another process has."""
JOURNAL_FILE = "journal.json"
NAMED_MOST = 3


class IngressAgent:
    """Everything of one ingress except its connection to the control plane. `serving`: the HAProxy that serves.
    `body_parsers`: find the model in large bodies, shortest limit first. `identity`: for mutual TLS with cells and
    other ingresses; None: plain links."""

    def __init__(self, settings: IngressSettings, binary: Path, identity: Identity | None = None) -> None:
        self.serving = HaproxySupervisor(
            "HAProxy",
            HaproxyProcess(settings.state_dir, binary, lambda desired: render(desired, settings), open_pipe),
            settings.times,
            lambda desired: structure_of(desired, settings),
            read_idle_every_s=READ_IDLE_EVERY_S,
        )
        self.body_parsers = tuple(_body_parser(tier, settings, binary) for tier in settings.body_parsers)
        self._refusals = RefusalCounting(settings.state_dir)
        self._samples = RefusedSampler(settings.ingress_id, time)
        self.access_log = LogPipe(settings.state_dir, note=self._note_lines)
        self._settings = settings
        self._journal = Journal(settings.state_dir / JOURNAL_FILE, RoutingTable)
        self._identity = identity
        self._links = LinkFiles(identity) if identity else None
        self._links_problem = ""
        self._applications = ApplicationTlsState(settings, self.serving.process)
        self.grpc = GrpcProcess(settings)
        self._streams = StreamCounting(settings.state_dir)
        self.relays = RelayProcesses(settings, self._note_streams)
        self._pending_table: RoutingTable | None = None
        self._accept_at_s = 0.0
        self._newest_revision = 0
        self._wake = asyncio.Event()
        self._exits = ExitWatch(self._wake.set)
        self._parser_wakes = tuple(asyncio.Event() for _ in self.body_parsers)
        self._key_counting = KeyCounting()
        self._lost_hosts = LostHosts(settings.times.host_gone_s, settings.times.continuing_host_gone_s)
        self._desired: DesiredHaproxy | None = None
        self._revision_in_force = 0
        self._refusal = ""
        self._hold_socket = HoldSocket(settings, self._note_request_on_hold)
        self.caches = CacheFeed(
            settings.state_dir, settings.worker_account, identity.client_context if identity else None
        )
        self.loads = LoadFeed(settings.ingress_id, self.serving, identity.client_context if identity else None)
        self._reported: IngressObserved | None = None
        self._reported_holding: frozenset[str] = frozenset()
        self._report_due_s = 0.0

    def accept_any_revision(self) -> None:
        """A new connection: its first table counts with any revision, because the control plane may have been
        restored."""
        self._newest_revision = 0

    def receive(self, message: Order) -> None:
        if isinstance(message, ApplicationTls):
            self._applications.receive(message)
            self._wake.set()
        elif not isinstance(message, RoutingTable):
            log.error("ignored a message for another kind of agent: this is an ingress")
        elif message.revision >= self._newest_revision:
            self._newest_revision = message.revision
            self._pending_table, self._accept_at_s = message, 0.0
            self._wake.set()

    async def run(self, send: Callable[[IngressReport], None], send_requests: Callable[[RequestWindow], None]) -> None:
        """Loads the journal and supervises the HAProxies until cancelled. `send` takes each report, `send_requests` the
        samples of requests that failed without a cell."""
        self.grpc.make_folder()
        self.relays.make_folder()
        self._resume()
        async with asyncio.TaskGroup() as group:
            group.create_task(self.access_log.carry())
            group.create_task(self._hold_socket.listen())
            group.create_task(self.caches.run())
            group.create_task(self.loads.run())
            group.create_task(self.relays.read())
            for parser, wake in zip(self.body_parsers, self._parser_wakes, strict=True):
                group.create_task(self._supervise_parser(parser, wake))
            group.create_task(self._supervise_serving(send, send_requests))

    async def stop(self, grace_s: float) -> None:
        """Lets streams finish for `grace_s` seconds, then stops all HAProxies, and then the gRPC gateway."""
        await asyncio.gather(*(haproxy.process.stop(grace_s) for haproxy in self._haproxies))
        await self.grpc.stop()
        await self.relays.stop()

    @property
    def _haproxies(self) -> tuple[HaproxySupervisor, ...]:
        return (self.serving, *self.body_parsers)

    def _resume(self) -> None:
        self._applications.resume()
        try:
            table = self._journal.load()
            if table is not None and self._may_accept():
                self._desired = self._desired_from(table)
            else:
                self._pending_table = table
        except (CorruptJournal, BadTable, OSError) as error:
            self._refusal = f"journal: {error}"
            log.error("%s", self._refusal)
        for haproxy in self._haproxies:
            haproxy.adopt()

    def _desired_from(self, table: RoutingTable) -> DesiredHaproxy:
        desired = replace(desired_from(table, self._fleet()), applications=self._applications.in_force)
        served = self._desired is not None and self._desired.features.grpc
        return desired if served else without_taken_ports(desired, self._settings)

    async def _supervise_serving(
        self, send: Callable[[IngressReport], None], send_requests: Callable[[RequestWindow], None]
    ) -> None:
        while True:
            if await self._applications.accept(self._desired or EMPTY_DESIRED) and self._desired is not None:
                self._desired = replace(self._desired, applications=self._applications.in_force)
            if self._pending_table is not None and self._may_accept():
                await self._accept(self._pending_table)
            self.caches.follow(_cells_by_cache(self._desired or EMPTY_DESIRED))
            self.loads.follow(self._desired or EMPTY_DESIRED)
            await self._pass(self._desired)
            self.grpc.follow(self._desired)
            self.relays.follow(self._desired)
            await self._count_keys()
            if (report := self._report()) is not None:
                send(report)
            for window in self._samples.take():
                send_requests(window)
            await _wait(self._wake, self._pause_s())

    def _note_lines(self, lines: bytes) -> None:
        self._samples.note(lines)
        self._refusals.note(lines)

    def _note_streams(self, counts: RelayCounts) -> None:
        self._streams.note(counts)
        self._refusals.note_cut(counts.life, counts.cut)

    async def _pass(self, desired: DesiredHaproxy | None) -> None:
        answers = self.serving.readings_total
        is_in_force = await self.serving.reconcile(desired, EMPTY_DESIRED)
        if is_in_force and desired is not None:
            self._revision_in_force = desired.revision
        if self.serving.readings_total == answers and self.serving.running is not None:
            return
        if is_in_force and desired is not None:
            await self._load_links(desired)
            await self._applications.load(self.serving.running)
        await self._take_back_from_lost_hosts()

    def _pause_s(self) -> float:
        """Until the next pass, if nothing happens before."""
        pids = [self.serving.process.pid, self.grpc.pid, *(relay.pid for relay in self.relays.processes)]
        is_watched = self._exits.follow([pid for pid in pids if pid is not None])
        is_well = pids[0] is not None and not (self.serving.problem or self.grpc.problem or self.relays.problem)
        if not (is_watched and is_well and self.serving.is_idle):
            return POLL_S
        return min(REST_S, max(POLL_S, self._report_due_s - asyncio.get_running_loop().time()))

    async def _supervise_parser(self, parser: HaproxySupervisor, wake: asyncio.Event) -> None:
        whole, desired, exits = self._desired, None, ExitWatch(wake.set)
        while True:
            if desired is None or whole is not self._desired:
                whole = self._desired
                desired = _for_parser(whole) if whole else None
            is_settled = await parser.reconcile(desired, _for_parser(EMPTY_DESIRED))
            pid = parser.process.pid
            is_watched = exits.follow([] if pid is None else [pid])
            await _wait(wake, REST_S if is_settled and is_watched else POLL_S)

    def _note_request_on_hold(self) -> None:
        """A request waits for a first cell: report it immediately."""
        self.serving.read_soon()
        self._wake.set()

    def _may_accept(self) -> bool:
        """A table waits for the certificates of the links to cells."""
        has_links = self._links is None or self._links.exist()
        return has_links and asyncio.get_running_loop().time() >= self._accept_at_s

    def _fleet(self) -> str:
        if self._identity is None:
            return ""
        validity = self._identity.validity()
        if validity is None:
            raise BadTable(f"this ingress has no certificate in {self._identity.folder}")
        return validity.name.fleet

    async def _load_links(self, desired: DesiredHaproxy) -> None:
        """Failures are retried by the next pass. The old files stay in use."""
        running = self.serving.running
        if self._links is None or running is None:
            return
        try:
            if await self._links.load(running.life, self.serving.process.admin):
                log.info("HAProxy uses the certificates that are stored now")
            if self._links.needs_reload(asyncio.get_running_loop().time()):
                log.info("HAProxy is reloaded: a revocation list is too long for a command")
                await self.serving.reload(desired)
                self._links.reloaded()
            self._links_problem = ""
        except (CommandRefused, ConfigRejected, Unreachable, OSError) as error:
            self._links_problem = f"certificates: {error}"

    async def _take_back_from_lost_hosts(self) -> None:
        servers = self.serving.running.servers if self.serving.running else ()
        for key in self._lost_hosts.note(servers, asyncio.get_running_loop().time(), self._continues):
            log.warning("the host of %s is gone: its waiting requests are taken back", "/".join(key))
            with contextlib.suppress(CommandRefused, Unreachable):  # the next pass retries
                await take_back_requests(key, self.serving.process.admin)

    def _continues(self, backend: str) -> bool:
        pools = self._desired.pools if self._desired else ()
        return any(backend in (pool.local, pool.spill) for pool in pools if pool.continues)

    async def _count_keys(self) -> None:
        """Counts are statistics only, so failures are ignored."""
        running, now_s = self.serving.running, asyncio.get_running_loop().time()
        if running is None or not self._key_counting.is_due(running.life, now_s):
            return
        with contextlib.suppress(Unreachable):
            self._key_counting.update(
                running.life, read_key_counts(await self.serving.process.admin.send(KEY_COUNTS_COMMAND)), now_s
            )

    async def _accept(self, table: RoutingTable) -> None:
        """Journals a valid table and puts it into force, or stores why it was refused. A table that could not be
        written stays pending, unless a newer one arrived."""
        self._pending_table = None
        try:
            if table.region != self._settings.region:
                raise BadTable(f"the table is for region {table.region!r}, this is {self._settings.region!r}")
            desired = self._desired_from(table)
            for tier, parser in zip(self._settings.body_parsers, self.body_parsers, strict=True):
                if self._desired is None or self._changes_parser(tier, self._desired, desired):
                    await parser.process.check(_for_parser(desired))
            if self._desired is None or _differ_beyond_keys(self._desired, desired):
                await self.serving.process.check(desired)
            self._journal.save(table)
        except (BadTable, ConfigRejected, OSError) as error:
            if isinstance(error, OSError) and self._pending_table is None:
                self._pending_table = table
                self._accept_at_s = asyncio.get_running_loop().time() + WRITE_AGAIN_S
            self._refusal = f"revision {table.revision} refused: {error}"
            log.error("%s", self._refusal)
            return
        self._desired, self._refusal = desired, ""
        for wake in self._parser_wakes:
            wake.set()
        if table.grpc and not desired.features.grpc and self._pending_table is None:
            self._pending_table = table
            self._accept_at_s = asyncio.get_running_loop().time() + PORT_AGAIN_S

    def _changes_parser(self, tier: BodyParserTier, before: DesiredHaproxy, after: DesiredHaproxy) -> bool:
        current, wanted = (body_parser_structure_of(desired, self._settings, tier) for desired in (before, after))
        return current != wanted

    def _report(self) -> IngressReport | None:
        now_s = asyncio.get_running_loop().time()
        desired = self._desired or EMPTY_DESIRED
        problems = [self._refusal, *(haproxy.problem for haproxy in self._haproxies)]
        problems += [_left_out(desired), self._links_problem, self._applications.problem, self.access_log.problem]
        problems += [self.grpc.problem, self.relays.problem]
        observed = IngressObserved(
            revision=self._revision_in_force,
            haproxy_pid=self.serving.process.pid,
            reason="; ".join(filter(None, problems)),
            cells=cell_views(self.serving.running, desired),
        )
        holds = holding(self.serving.running)
        is_news = observed != self._reported or not holds <= self._reported_holding
        if not is_news and now_s < self._report_due_s:
            return None
        self._reported, self._reported_holding = observed, holds
        self._report_due_s = now_s + report_interval_s(random.random())
        for haproxy in self._haproxies:
            haproxy.process.trim_log()
        return IngressReport(
            seq=0,
            observed=observed,
            cells=cell_traffic(self.serving.running, desired, self.serving.steered),
            changes=change_counts(self.serving),
            telemetry=telemetry(
                self.serving.running,
                desired,
                self._key_counting.report(now_s),
                self._refusals.report(now_s),
                self._streams.report(now_s),
            ),
        )


async def _wait(wake: asyncio.Event, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await wake.wait()
    wake.clear()


def _cells_by_cache(desired: DesiredHaproxy) -> dict[str, CellAddress]:
    backends = {pool.local for pool in desired.pools if pool.is_by_cache}
    return {
        server.name: CellAddress(server.address, server.port, server.tls_name)
        for server in desired.servers
        if server.backend in backends and server.cell and not server.drain
    }


def _differ_beyond_keys(before: DesiredHaproxy, after: DesiredHaproxy) -> bool:
    """Whether HAProxy has to check the new configuration. New keys skip that, because they must apply soon on a busy
    host as well, where a process starts slowly. Their map only contains digests, checked names and numbers."""
    one, other = (
        replace(each, revision=0, maps={name: map_ for name, map_ in each.maps.items() if name != KEYS_MAP})
        for each in (before, after)
    )
    return one != other


def _left_out(desired: DesiredHaproxy) -> str:
    named, more = "; ".join(desired.left_out[:NAMED_MOST]), len(desired.left_out) - NAMED_MOST
    return f"left out: {named}" + (f"; and {more} more" if more > 0 else "") if named else ""


def _body_parser(tier: BodyParserTier, settings: IngressSettings, binary: Path) -> HaproxySupervisor:
    return HaproxySupervisor(
        f"HAProxy {tier.name}",
        HaproxyProcess(
            settings.state_dir / tier.name, binary, lambda desired: render_body_parser(desired, settings, tier)
        ),
        settings.times,
        lambda desired: body_parser_structure_of(desired, settings, tier),
        read_every_s=READ_PARSERS_EVERY_S,
    )


def _for_parser(desired: DesiredHaproxy) -> DesiredHaproxy:
    """The part of the desired state that a body parser needs: limits and the names of models."""
    maps = {name: desired.maps[name] for name in (MODELS_MAP, CONTINUED_MAP) if name in desired.maps}
    return replace(desired, pools=(), servers=(), maps=maps, applications=Applications())
