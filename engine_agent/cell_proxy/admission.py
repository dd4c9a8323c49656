"""Decides whether this cell takes one more request. Pure: class, tenant and deadline come from headers that the ingress
sets or passes on. It never queues: the ingress does, and the proxy is only the backstop.

Classes share the cell by trunk reservation (F. P. Kelly, "Loss networks", 1991): a class is admitted while the requests
in flight of *all* classes are below its own limit. So only urgent requests get the last slots, and less urgent classes
yield first when load rises."""

import math
import re
from dataclasses import dataclass
from urllib.parse import unquote

from engine_agent.cell_proxy import refusal as refusals
from engine_agent.cell_proxy.prefix_index import MATCHED_HEADER, PREFIXES_HEADER, RequestPrefixes, read_prefixes
from engine_agent.cell_proxy.refusal import Refusal
from engine_agent.cell_proxy.wire import Headers
from engine_agent.protocol.load_messages import OTHER_TENANTS
from engine_agent.protocol.request_limits import RequestLimits, limits_from_text
from engine_agent.protocol.states import Phase, ServingClass

CLASS_HEADER = b"x-switchyard-class"
TENANT_HEADER = b"x-switchyard-tenant"
KEY_HEADER = b"x-switchyard-key"
DEADLINE_HEADER = b"x-switchyard-deadline-ms"
DEPLOYMENT_HEADER = b"x-switchyard-deployment"
ARRIVED_HEADER = b"x-switchyard-arrived-ms"
MODEL_HEADER = b"x-switchyard-model"
ADAPTER_HEADER = b"x-switchyard-adapter"
SERVER_HEADER = b"x-switchyard-server"
LIMITS_HEADER = b"x-switchyard-limits"
_TENANT = re.compile(rb"[A-Za-z0-9._:@-]{1,64}")
_KEY = re.compile(rb"[0-9a-f]{4,16}")
"""As in `engine_agent.ingress.key_map`."""
_MILLISECONDS = re.compile(rb"-?\d{1,10}")
"""Up to 115 days. A longer limit counts as none."""
_BYTES = re.compile(rb"[0-9]{1,9}")
_UNIX_MS = re.compile(rb"\d{13}")
OVERLOAD_FACTOR = 2.0
"""Several ingresses share a cell, and each admits about 1.25 times its share: only a fault exceeds twice the limit.
Requests above the concurrency wait in the engine, so this limits its queue."""
LESS_URGENT_FACTOR = 1.5
"""The same for less urgent classes while no more urgent request arrives: the ingress's own limit applies first, and its
queue keeps the rest. A real-time request always finds room above."""
RESERVED = {ServingClass.NEAR_REALTIME: 0.10, ServingClass.BATCH: 0.25}
"""Share of the concurrency that a class may not use while there is more urgent traffic."""
URGENT_MEMORY_S = 60.0
"""How long the reservation lasts after the last more urgent request. The first one after a pause waits at the head of
the ingress's queue until a request of the cell ends, and restores the reservation."""
MIN_TTFT_SAMPLES = 20
"""With fewer samples of time to first token, no deadline counts as unreachable."""


@dataclass(frozen=True, slots=True)
class RequestMetadata:
    """The headers of a request. Empty if absent: `tenant`, `key`, `server` (the start of a cell that the ingress chose)
    and `adapter` (the name is this adapter's). `time_left_s`: seconds until its deadline, None without one.

    `is_routed`: an ingress chose this deployment by the model's name, which the engine need not know. `routed_by`: the
    name that the ingress read in the body, None if unknown. `prefixes`: hashes of the beginnings of its text, None if
    unknown. `matched_bytes`: how much of it the ingress expects in this cell's cache, None if it chose without caches.
    """

    serving_class: ServingClass = ServingClass.REALTIME
    tenant: str = ""
    time_left_s: float | None = None
    is_routed: bool = False
    routed_by: str | None = None
    server: str = ""
    key: str = ""
    adapter: str = ""
    prefixes: RequestPrefixes | None = None
    matched_bytes: int | None = None


class BadHeader(ValueError):
    """An invalid header; `refusal` is the response."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


def read_metadata(headers: Headers, now: float) -> RequestMetadata:
    """The metadata of one request, at `now` in seconds since 1970. Of a repeated header, the last counts. The wait at
    the ingress is subtracted from its time, by the clocks of both machines. Raises BadHeader for a class that does not
    exist, or a deadline that is no number."""
    serving_class, tenant, time_left_s, is_routed = ServingClass.REALTIME, "", None, False
    waited_s, routed_by, server, key, adapter = 0.0, None, "", "", ""
    prefixes, matched_bytes = None, None
    for name, value in headers:
        if name == CLASS_HEADER:
            serving_class = _serving_class(value)
        elif name == TENANT_HEADER:
            tenant = value.decode() if _TENANT.fullmatch(value) else OTHER_TENANTS
        elif name == KEY_HEADER:
            key = value.decode() if _KEY.fullmatch(value) else ""
        elif name == DEADLINE_HEADER:
            time_left_s = _limit_s(value)
        elif name == DEPLOYMENT_HEADER:
            is_routed = True
        elif name == MODEL_HEADER:
            routed_by = unquote(value.decode("latin-1"))
        elif name == ADAPTER_HEADER:
            adapter = unquote(value.decode("latin-1"))
        elif name == SERVER_HEADER:
            server = value.decode("latin-1")
        elif name == PREFIXES_HEADER:
            prefixes = read_prefixes(value)
        elif name == MATCHED_HEADER and _BYTES.fullmatch(value):
            matched_bytes = int(value)
        elif name == ARRIVED_HEADER:
            waited_s = waited_at_ingress_s([(name, value)], now) or 0.0
    left_s = None if time_left_s is None else time_left_s - waited_s
    return RequestMetadata(
        serving_class, tenant, left_s, is_routed, routed_by, server, key, adapter, prefixes, matched_bytes
    )


def waited_at_ingress_s(headers: Headers, now: float) -> float | None:
    """Seconds from the arrival at the ingress to `now`, by the clocks of both machines; None if it is not stated."""
    stated = [value for name, value in headers if name == ARRIVED_HEADER and _UNIX_MS.fullmatch(value)]
    return max(0.0, now - int(stated[-1]) / 1000) if stated else None


def _serving_class(value: bytes) -> ServingClass:
    try:
        return ServingClass(value.decode("latin-1"))
    except ValueError:
        raise BadHeader(_bad_header("X-Switchyard-Class", value, f"one of {', '.join(ServingClass)}")) from None


def _limit_s(value: bytes) -> float:
    if not _MILLISECONDS.fullmatch(value):
        raise BadHeader(_bad_header("X-Switchyard-Deadline-Ms", value, "the milliseconds left, a whole number"))
    return int(value) / 1000


def read_limits(headers: Headers) -> RequestLimits:
    """The limits of the request's deployment. The ingress sends those that differ from the defaults. Raises BadHeader
    if there are no such limits."""
    stated = next((value for name, value in headers if name == LIMITS_HEADER), b"")
    try:
        return limits_from_text(stated.decode("latin-1"))
    except ValueError as error:
        raise BadHeader(_bad_header("X-Switchyard-Limits", stated, f"limits and their values: {error}")) from None


def _bad_header(name: str, value: bytes, right: str) -> Refusal:
    given = value[:80].decode("latin-1")
    return Refusal(400, "bad_header", f"the header {name} is {given!r}; it must be {right}")


def limit_of(serving_class: ServingClass, *, max_concurrency: int, urgent_recently: bool) -> int:
    """Requests in flight, of all classes, at which this class is full."""
    if serving_class is ServingClass.REALTIME:
        return round(max_concurrency * OVERLOAD_FACTOR)
    if not urgent_recently:
        return math.ceil(max_concurrency * LESS_URGENT_FACTOR)
    return max(1, max_concurrency - math.ceil(RESERVED[serving_class] * max_concurrency))


def weight_of(sequences: int, limit: int) -> int:
    """The weight of a request with so many sequences: at most half of its class's limit, so that it can run next to
    others."""
    return max(1, min(sequences, limit // 2))


def refuse(
    serving_class: ServingClass, *, phase: Phase, healthy: bool, reason: str, in_flight: int, limit: int
) -> Refusal | None:
    """Returns why the cell does not take a request of this class now, or None. `reason`: why the engine is unhealthy.
    `in_flight`: sequences of admitted requests of all classes, without the new one. `limit`: that of the class."""
    if phase is not Phase.SERVE:
        return refusals.draining(phase)
    if not healthy:
        return refusals.engine_unhealthy(reason)
    return refusals.class_full(serving_class, in_flight, limit) if in_flight >= limit else None


def refuse_deadline(time_left_s: float, *, ttft_p50_s: float | None, samples: int) -> Refusal | None:
    """Returns why a request is not begun: its deadline has passed, or half of the `samples` of its class in the last 30
    s waited longer than `time_left_s` for their first token."""
    if time_left_s <= 0:
        return refusals.deadline_passed()
    if ttft_p50_s is not None and samples >= MIN_TTFT_SAMPLES and ttft_p50_s > time_left_s:
        return refusals.deadline_unreachable(time_left_s, ttft_p50_s)
    return None
