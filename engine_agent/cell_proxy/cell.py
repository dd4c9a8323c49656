"""The shared state of one proxy: phase, health, load, engine connections and the requests in flight. Decisions are in
`admission` and `health`, and I/O is in its users."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine
from itertools import count
from random import getrandbits
from time import monotonic, time
from typing import Protocol

from msgspec import structs

from engine_agent.cell_proxy import admission
from engine_agent.cell_proxy import refusal as refusals
from engine_agent.cell_proxy.admission import RequestMetadata
from engine_agent.cell_proxy.batch_window import STEER_EVERY_S, BatchQueue
from engine_agent.cell_proxy.cell_cache import CellCache
from engine_agent.cell_proxy.departures import Departures
from engine_agent.cell_proxy.handovers import Handovers
from engine_agent.cell_proxy.health import EngineHealth, ProxyStatus
from engine_agent.cell_proxy.log import LineLog
from engine_agent.cell_proxy.meter import Meter
from engine_agent.cell_proxy.refusal import Refusal
from engine_agent.cell_proxy.request_samples import RequestSampler
from engine_agent.cell_proxy.settings import ProxySettings
from engine_agent.cell_proxy.span_export import SpanExporter
from engine_agent.cell_proxy.upstream import EnginePool
from engine_agent.protocol.ingress_messages import cell_server_name
from engine_agent.protocol.load_messages import CellWork, EngineLoad, SpeculationLoad, TokenCheck
from engine_agent.protocol.local_servers import StateWatch, state_name
from engine_agent.protocol.proxy_messages import LOAD_VERSION, MAX_INGRESSES, CellLoad, Pairs
from engine_agent.protocol.states import CellRole, Phase, ServingClass

UNCOUNTED = "~"
"""The ingress of requests that are only in the total. No ingress can have this name."""


_BATCH = ServingClass.BATCH


class InFlight(Protocol):
    def check(self, now: float) -> None:
        """Gives up when a time limit has passed."""

    def cut(self, refusal: Refusal) -> None: ...

    @property
    def is_leaving(self) -> bool: ...

    def leave(self) -> None:
        """The cell drains: a stream that can continue elsewhere does."""


class Cell:
    def __init__(self, settings: ProxySettings, log: LineLog) -> None:
        limits = settings.limits
        self.settings = settings
        self._is_prefill = settings.cell_role is CellRole.PREFILL
        self.log = log
        self.phase = Phase.SERVE
        self.health = EngineHealth(settings.probes, settings.max_concurrency, has_golden=bool(settings.golden))
        self.meter = Meter(monotonic())
        self.samples = RequestSampler(settings.cell, settings.generation, time())
        self.handovers = Handovers(
            settings.cell_role,
            settings.kv_layout,
            self.meter,
            settings.identity,
            transfers_max=settings.max_concurrency,
            limit_s=settings.prefill_timeout_s,
        )
        self.spans = SpanExporter(settings.traces, {"switchyard.cell": settings.cell}) if settings.traces else None
        self.in_flight: set[InFlight] = set()
        self.departures = Departures()
        self._of_ingresses: dict[str, int] = {}
        """Requests in flight by the ingress that sent them, without those at 0."""
        self.sequences = 0
        """Sequences in flight: at `max_concurrency` the engine has no free slot."""
        self.weight = 0
        """Their weight in admission (`admission.weight_of`)."""
        self._counted: dict[InFlight, tuple[int, int, str]] = {}
        self.settlements: set[asyncio.Task[None]] = set()
        """Requests that have ended, and whose tokens are being queried."""
        self.token_check: TokenCheck | None = None
        self.work: CellWork | None = None
        self.speculation: SpeculationLoad | None = None
        self.engine: EngineLoad | None = None
        self._busy_s, self._busy_since = 0.0, 0.0
        self._exchange_prefix = b"%016x-" % getrandbits(64)
        self._exchanges = count(1)
        self._seen_at = dict.fromkeys(ServingClass, float("-inf"))
        most = settings.max_concurrency - math.ceil(admission.RESERVED[ServingClass.BATCH] * settings.max_concurrency)
        self.batch = BatchQueue(
            max(1, most),
            lambda: not self._urgent_recently(ServingClass.BATCH, monotonic()),
            reads_one=not settings.orders_classes,
        )
        self._steered_at = monotonic()
        self.watch = StateWatch(self._state_name)
        self.health.on_change = self.watch.changed
        self.idle = asyncio.Event()
        self.idle.set()
        self.begins = asyncio.Event()
        """Set with the first request after an idle time."""
        self.cell_header = settings.cell.encode()
        self.server_name = cell_server_name(settings.cell, settings.generation)
        self.request_probe: Callable[[], None] = _no_prober
        """Makes the prober check /health immediately."""
        self.check_health: Callable[[], Awaitable[bool]] = self._last_known_health
        self.pool = EnginePool(
            settings.engine_host,
            settings.engine_port,
            connect_timeout_s=limits.connect_timeout_s,
            idle_s=limits.engine_idle_s,
            on_lost=self._connection_lost,
        )
        self.cache = CellCache(self.pool)

    def refusal(self, metadata: RequestMetadata) -> Refusal | None:
        if metadata.server and metadata.server != self.server_name:
            return refusals.other_start(metadata.server, self.server_name)
        if metadata.adapter and metadata.adapter not in self.settings.adapters:
            return refusals.adapter_not_here(metadata.adapter)
        if self._is_prefill:
            return refusals.prefill_cell()
        now, serving_class = monotonic(), metadata.serving_class
        self._seen_at[serving_class] = now
        limit = self._limit_of(serving_class, now)
        refusal = admission.refuse(
            serving_class,
            phase=self.phase,
            healthy=self.health.ok,
            reason=self.health.reason,
            in_flight=self.weight,
            limit=limit,
        )
        if refusal is None and serving_class is _BATCH and not self.batch.admits():
            return refusals.batch_waits()
        if refusal is not None or metadata.time_left_s is None:
            return refusal
        ttft = self.meter.of(serving_class).ttft
        return admission.refuse_deadline(
            metadata.time_left_s, ttft_p50_s=ttft.quantile(now, 0.5), samples=ttft.recent_count(now)
        )

    def _limit_of(self, serving_class: ServingClass, now: float) -> int:
        return admission.limit_of(
            serving_class,
            max_concurrency=self.settings.max_concurrency,
            urgent_recently=self._urgent_recently(serving_class, now),
        )

    def weigh(self, request: InFlight, serving_class: ServingClass, sequences: int) -> Refusal | None:
        """Counts the sequences of an admitted request. Returns why there is no room for them, or None."""
        if sequences == 1:  # as counted when it was admitted
            self.batch.weigh(request, 1)
            return None
        limit = self._limit_of(serving_class, monotonic())
        weight, others = admission.weight_of(sequences, limit), self.weight - 1
        if weight > 1 and others + weight > limit:
            return refusals.class_full(serving_class, others, limit)
        self._counted[request] = (weight, sequences, self._counted[request][2])
        self.weight += weight - 1
        self.sequences += sequences - 1
        self.batch.weigh(request, sequences)
        return None

    def _urgent_recently(self, serving_class: ServingClass, now: float) -> bool:
        for each, seen_at in self._seen_at.items():  # the most urgent first
            if each is serving_class:
                break
            if now - seen_at < admission.URGENT_MEMORY_S:
                return True
        return False

    def steer(self, now: float) -> None:
        """Adapts the window of batch work to the latency of real-time requests."""
        if now - self._steered_at >= STEER_EVERY_S:
            self._steered_at = now
            self.batch.steer(self.meter.realtime_latency(now))

    def status(self) -> ProxyStatus:
        now = monotonic()
        in_flight, most = len(self.in_flight), self.settings.max_concurrency
        load = self.meter.load(
            now,
            in_flight=in_flight,
            max_concurrency=most,
            token_check=self.token_check,
            work=self.work,
            batch=self.batch.load(),
            handovers=self.handovers.load(now),
            cache=self.cache.load(),
        )
        load = structs.replace(load, speculation=self.speculation, engine=self.engine_load())
        health, state = self.health.report(now), self._state_name()
        return ProxyStatus(health, load, self.phase, in_flight, state, self.handovers.pairs.name)

    def load_for(self, ingress: str) -> CellLoad:
        """The load for the ingresses, which share this cell (`engine_agent.ingress.steering`)."""
        engine = self.engine_load()
        return CellLoad(
            version=LOAD_VERSION,
            server=self.server_name,
            own=self._of_ingresses.get(ingress, 0),
            in_flight=len(self.in_flight),
            waiting=max(0, self.sequences - self.settings.max_concurrency),
            running=engine.running if engine else 0,
            kv_percent=engine.kv_percent if engine else None,
        )

    def engine_load(self) -> EngineLoad | None:
        """The engine's last reading. Without requests in flight its batch is empty."""
        if self.engine is None or self.in_flight:
            return self.engine
        kv_percent = None if self.engine.kv_percent is None else 0.0
        return structs.replace(self.engine, running=0, waiting=0, kv_percent=kv_percent)

    def _state_name(self) -> str:
        """Empty unless the cell is healthy and idle: otherwise the agent polls often."""
        steady = self.health.ok and self.phase is Phase.SERVE and not self.in_flight and not self.settlements
        return state_name(steady, self.handovers.pairs.name) if steady else ""

    def pair(self, pairs: Pairs) -> None:
        self.handovers.pair(pairs)
        self.watch.changed()
        prefill, decode = len(pairs.prefill_cells), len(pairs.decode_nodes)
        self.log.event(event="pairs", cell=self.settings.cell, prefill_cells=prefill, decode_nodes=decode)

    def enter_phase(self, phase: Phase) -> None:
        if phase is not self.phase:
            self.phase = phase
            self.watch.changed()
            self.log.event(event="phase", cell=self.settings.cell, phase=phase, in_flight=len(self.in_flight))
            if phase is Phase.SERVE:
                self.departures.stop()
            else:
                self.departures.add(*self.in_flight)

    async def is_engine_well(self) -> bool:
        """Checks /health until it has answered or the engine counts as unhealthy, because a request saw the engine
        fail. Only probes change the health: no request can."""
        for _ in range(self.settings.probes.slow_strikes):
            if not await self.check_health() or not self.health.is_late:
                break
        return self.health.ok

    def enter(self, request: InFlight, ingress: str = "") -> None:
        if not self.in_flight:
            self._busy_since = monotonic()
            self.begins.set()
        self.in_flight.add(request)
        if (of_ingress := self._of_ingresses.get(ingress)) is not None or len(self._of_ingresses) < MAX_INGRESSES:
            self._of_ingresses[ingress] = (of_ingress or 0) + 1
        else:
            ingress = UNCOUNTED
        self._counted[request] = (1, 1, ingress)
        self.weight += 1
        self.sequences += 1
        self.idle.clear()
        self.watch.changed()

    def leave(self, request: InFlight) -> None:
        if request in self.in_flight and len(self.in_flight) == 1:
            self._busy_s += monotonic() - self._busy_since
        self.in_flight.discard(request)
        weight, sequences, ingress = self._counted.pop(request, (0, 0, UNCOUNTED))
        if ingress in self._of_ingresses:
            self._of_ingresses[ingress] -= 1
            if not self._of_ingresses[ingress]:
                del self._of_ingresses[ingress]
        self.weight -= weight
        self.sequences -= sequences
        self.batch.leave(request)
        self.departures.ended(request)
        if not self.in_flight:
            self.idle.set()

    def busy_s(self) -> float:
        return self._busy_s + (monotonic() - self._busy_since if self.in_flight else 0.0)

    def next_exchange(self) -> bytes:
        """An unguessable name for one request to the engine."""
        return self._exchange_prefix + b"%d" % next(self._exchanges)

    def settle_later(self, settling: Coroutine[None, None, None]) -> None:
        """Queries the tokens of a request that has ended otherwise."""
        task = asyncio.get_running_loop().create_task(settling)
        self.settlements.add(task)
        task.add_done_callback(self._settled)

    def _settled(self, task: "asyncio.Task[None]") -> None:
        self.settlements.discard(task)
        self.watch.changed()

    def _connection_lost(self) -> None:
        self.request_probe()

    async def _last_known_health(self) -> bool:
        return self.health.ok


def _no_prober() -> None: ...
