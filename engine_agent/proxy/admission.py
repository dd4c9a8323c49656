"""Decides whether this cell takes one more request. Pure: phase, health and requests in flight in, a refusal or None
out. It never queues; the ingress does that, and the proxy is only the backstop behind it."""

from engine_agent.protocol.states import Phase
from engine_agent.proxy.refusal import Refusal

OVERLOAD_FACTOR = 2
"""Several ingresses share a cell and each holds about 1.25 x its share: twice the limit is only passed by a fault."""


def refuse(*, phase: Phase, healthy: bool, reason: str, in_flight: int, max_concurrency: int) -> Refusal | None:
    """Why the cell does not take a request now, or None when it does.

    `reason` says why the engine is unhealthy. `in_flight` counts admitted requests without the new one.
    """
    if unready := refuse_new_work(phase=phase, healthy=healthy, reason=reason):
        return unready
    limit = max_concurrency * OVERLOAD_FACTOR
    if in_flight >= limit:
        return Refusal(503, "cell_saturated", f"the cell has {in_flight} of {limit} requests in flight", retry=True)
    return None


def refuse_new_work(*, phase: Phase, healthy: bool, reason: str) -> Refusal | None:
    """As `refuse`, but whatever the load: what health checks ask."""
    if phase is not Phase.SERVE:
        return Refusal(503, "cell_draining", f"the cell takes no new requests (phase {phase})", retry=True)
    if not healthy:
        return Refusal(503, "engine_unhealthy", f"the cell's engine is not healthy: {reason}", retry=True)
    return None
