"""Decides whether this cell takes one more request. Pure: phase, health, class and requests in flight in, a refusal or
None out. It never queues; the ingress does that, and the proxy is only the backstop behind it.

Classes share the cell by trunk reservation (F. P. Kelly, "Loss networks", 1991): a class is admitted while the requests
in flight of *all* classes are below its own limit. So the last slots are open to the urgent only, and what is less
urgent is the first to yield when load rises, however much of it there is.
"""

import math

from engine_agent.protocol.states import Phase, ServingClass
from engine_agent.proxy import refusal as refusals
from engine_agent.proxy.refusal import Refusal

OVERLOAD_FACTOR = 2.0
"""Several ingresses share a cell and each holds about 1.25 x its share: twice the limit is only passed by a fault. What
is above the concurrency waits in the engine, so this bounds its queue."""
LESS_URGENT_FACTOR = 1.5
"""The same for the less urgent while nobody more urgent comes: the ingress's own limit binds first, and its queue keeps
what waits. A real-time request always finds room above."""
RESERVED = {ServingClass.NEAR_REALTIME: 0.10, ServingClass.BATCH: 0.25}
"""Share of the concurrency that is closed to a class while there is more urgent traffic."""
URGENT_MEMORY_S = 60.0
"""So long after the last more urgent request the reservation holds. The first one after a pause waits at the head of
the ingress's queue until any of the cell's requests ends, and brings the reservation back."""
MIN_TTFT_SAMPLES = 20
"""Fewer times to first token say nothing about whether a deadline can be met."""


def limit_of(serving_class: ServingClass, *, max_concurrency: int, urgent_lately: bool) -> int:
    """Requests in flight, of all classes, at which this class is full."""
    if serving_class is ServingClass.REALTIME:
        return round(max_concurrency * OVERLOAD_FACTOR)
    if not urgent_lately:
        return math.ceil(max_concurrency * LESS_URGENT_FACTOR)
    return max(1, max_concurrency - math.ceil(RESERVED[serving_class] * max_concurrency))


def refuse(
    serving_class: ServingClass, *, phase: Phase, healthy: bool, reason: str, in_flight: int, limit: int
) -> Refusal | None:
    """Why the cell does not take a request of this class now, or None when it does.

    `reason` says why the engine is unhealthy. `in_flight` counts admitted requests of all classes without the new one,
    `limit` is the class's.
    """
    if unready := refuse_new_work(phase=phase, healthy=healthy, reason=reason):
        return unready
    return refusals.class_full(serving_class, in_flight, limit) if in_flight >= limit else None


def refuse_new_work(*, phase: Phase, healthy: bool, reason: str) -> Refusal | None:
    """As `refuse`, but whatever the load: what health checks ask."""
    if phase is not Phase.SERVE:
        return Refusal(503, "cell_draining", f"the cell takes no new requests (phase {phase})", retry=True)
    if not healthy:
        return Refusal(503, "engine_unhealthy", f"the cell's engine is not healthy: {reason}", retry=True)
    return None


def refuse_deadline(limit_s: float, *, ttft_p50_s: float | None, samples: int) -> Refusal | None:
    """Why a request with `limit_s` left is not begun: it is too late already, or half of its kind waited longer than
    that for their first token in the last 30 s. `samples`: how many those were."""
    if limit_s <= 0:
        return refusals.deadline_passed()
    if ttft_p50_s is not None and samples >= MIN_TTFT_SAMPLES and ttft_p50_s > limit_s:
        return refusals.deadline_unreachable(limit_s, ttft_p50_s)
    return None
