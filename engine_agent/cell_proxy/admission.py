"""Decides whether this cell takes one more request. Pure: class, tenant and deadline come from headers that the ingress
sets or passes on. It never queues: the ingress does, and the proxy is only the backstop.

Classes share the cell by trunk reservation (F. P. Kelly, "Loss networks", 1991): a class is admitted while the requests
in flight of *all* classes are below its own limit. So only urgent requests get the last slots, and less urgent classes
yield first when load rises."""

import math
import re
from collections.abc import Mapping
from urllib.parse import unquote

import msgspec

from engine_agent.cell_proxy import refusal as refusals
from engine_agent.cell_proxy.prefix_index import MATCHED_HEADER, PREFIXES_HEADER, RequestPrefixes, read_prefixes
from engine_agent.cell_proxy.refusal import Refusal
from engine_agent.protocol.continuation import CONTINUATION_HEADER, COUNTED_HEADER, REPLAYED_HEADER
from engine_agent.protocol.load_messages import OTHER_TENANTS
from engine_agent.protocol.request_limits import DEFAULT_LIMITS, RequestLimits, limits_from_text
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
_TOKENS = re.compile(rb"[0-9]{1,6}")
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
_REALTIME, _SERVE = ServingClass.REALTIME, Phase.SERVE
"""Python 3.11 takes 0.3 µs for each access to a member through its class."""
MIN_TTFT_SAMPLES = 20
"""With fewer samples of time to first token, no deadline counts as unreachable."""


class RequestMetadata(msgspec.Struct, frozen=True):
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
    is_marked: bool = False
    """A relay requested marks, to continue the stream elsewhere."""
    replayed: int | None = None
    """Tokens of a stream that this request continues."""
    counted: int | None = None
    """Of these tokens, those that other cells have counted, with the prompt. None if no cell has counted anything."""


class BadHeader(ValueError):
    """An invalid header; `refusal` is the response."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


def read_metadata(named: Mapping[bytes, bytes], now: float) -> RequestMetadata:
    """The metadata of one request by its headers, at `now` in seconds since 1970. The wait at the ingress is subtracted
    from its time, by the clocks of both machines. Raises BadHeader for a class that does not exist, or a deadline that
    is no number."""
    given = named.get
    serving_class, tenant, time_left_s, key = _REALTIME, "", None, b""
    if (stated := given(CLASS_HEADER)) is not None:
        serving_class = _serving_class(stated)
    if (stated := given(TENANT_HEADER)) is not None:
        tenant = stated.decode() if _TENANT.fullmatch(stated) else OTHER_TENANTS
    if (stated := given(DEADLINE_HEADER)) is not None:
        time_left_s = _limit_s(stated) - (waited_at_ingress_s(named, now) or 0.0)
    if (stated := given(KEY_HEADER)) is not None and _KEY.fullmatch(stated):
        key = stated
    prefixes, matched = given(PREFIXES_HEADER), given(MATCHED_HEADER)
    routed_by = given(MODEL_HEADER)
    return RequestMetadata(
        serving_class,
        tenant,
        time_left_s,
        DEPLOYMENT_HEADER in named,
        None if routed_by is None else _unquoted(routed_by),
        given(SERVER_HEADER, b"").decode("latin-1"),
        key.decode(),
        _unquoted(given(ADAPTER_HEADER, b"")),
        None if prefixes is None else read_prefixes(prefixes),
        int(matched) if matched is not None and _BYTES.fullmatch(matched) else None,
        *_continuation(named),
    )


def _continuation(named: Mapping[bytes, bytes]) -> tuple[bool, int | None, int | None]:
    """Whether a relay requested marks, how many tokens it repeats, and how many of them are counted."""
    if named.get(CONTINUATION_HEADER) != b"on":
        return False, None, None
    return True, _tokens(named, REPLAYED_HEADER), _tokens(named, COUNTED_HEADER)


def _tokens(named: Mapping[bytes, bytes], name: bytes) -> int | None:
    stated = named.get(name, b"")
    return int(stated) if _TOKENS.fullmatch(stated) else None


def _unquoted(value: bytes) -> str:
    text = value.decode("latin-1")
    return unquote(text) if "%" in text else text


def waited_at_ingress_s(named: Mapping[bytes, bytes], now: float) -> float | None:
    """Seconds from the arrival at the ingress to `now`, by the clocks of both machines; None if it is not stated."""
    stated = named.get(ARRIVED_HEADER, b"")
    return max(0.0, now - int(stated) / 1000) if _UNIX_MS.fullmatch(stated) else None


_CLASSES = {each.value.encode(): each for each in ServingClass}


def _serving_class(value: bytes) -> ServingClass:
    try:
        return _CLASSES[value]
    except KeyError:
        raise BadHeader(_bad_header("X-Switchyard-Class", value, f"one of {', '.join(ServingClass)}")) from None


def _limit_s(value: bytes) -> float:
    if not _MILLISECONDS.fullmatch(value):
        raise BadHeader(_bad_header("X-Switchyard-Deadline-Ms", value, "the milliseconds left, a whole number"))
    return int(value) / 1000


def read_limits(named: Mapping[bytes, bytes]) -> RequestLimits:
    """The limits of the request's deployment. The ingress sends those that differ from the defaults. Raises BadHeader
    if there are no such limits."""
    stated = named.get(LIMITS_HEADER)
    if stated is None:
        return DEFAULT_LIMITS
    try:
        return limits_from_text(stated.decode("latin-1"))
    except ValueError as error:
        raise BadHeader(_bad_header("X-Switchyard-Limits", stated, f"limits and their values: {error}")) from None


def _bad_header(name: str, value: bytes, right: str) -> Refusal:
    given = value[:80].decode("latin-1")
    return Refusal(400, "bad_header", f"the header {name} is {given!r}; it must be {right}")


def limit_of(serving_class: ServingClass, *, max_concurrency: int, urgent_recently: bool) -> int:
    """Requests in flight, of all classes, at which this class is full."""
    if serving_class is _REALTIME:
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
    if phase is not _SERVE:
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
