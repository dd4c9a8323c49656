"""How many of a backend's connections to the control plane one tenant, or one address without a key, holds. Pure text.

The control plane ends bodies that arrive too slowly. Until then each keeps a connection, so a caller with many slow
bodies would otherwise hold all of them.
"""

from engine_agent.ingress import headers
from engine_agent.ingress.responses import ErrorResponse, refuse_rule

CALLERS = 16_384
"""At a time; beyond that those idle for longest are forgotten."""
RETRY_AFTER_S = 10
TOO_MANY = ErrorResponse(
    429,
    "rate_limit_exceeded",
    "your requests under way hold your share of the connections to the control plane; try again when one has ended",
    None,
    RETRY_AFTER_S,
    variant="_of_places",
)


def share_rules(most: int) -> list[str]:
    """In a backend, after the rules that identify the caller: `most` requests of one caller are under way at a time."""
    has_tenant = f"{{ req.hdr({headers.TENANT}) -m found }}"
    return [
        f"stick-table type string len 96 size {CALLERS} expire 1h store conn_cur",
        f"http-request set-var(txn.caller) req.hdr({headers.TENANT}) if {has_tenant}",
        f"http-request set-var(txn.caller) src if !{has_tenant}",
        "http-request track-sc2 var(txn.caller)",
        refuse_rule(TOO_MANY, f"{{ sc2_conn_cur gt {most} }}"),
    ]
