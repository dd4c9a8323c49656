"""What a request asks of the cell besides its answer: how urgent it is, whose it is, and until when it is of use. Pure;
read from headers that the ingress sets or lets pass."""

import re
from dataclasses import dataclass

from engine_agent.protocol.messages import OTHER_TENANTS
from engine_agent.protocol.states import ServingClass
from engine_agent.proxy.refusal import Refusal
from engine_agent.proxy.wire import Headers

CLASS_HEADER = b"x-switchyard-class"
TENANT_HEADER = b"x-switchyard-tenant"
DEADLINE_HEADER = b"x-switchyard-deadline-ms"
DEPLOYMENT_HEADER = b"x-switchyard-deployment"
ARRIVED_HEADER = b"x-switchyard-arrived-ms"
_TENANT = re.compile(rb"[A-Za-z0-9._:@-]{1,64}")
_MILLISECONDS = re.compile(rb"-?\d{1,10}")
"""Up to 115 days; a longer bound is none."""
_UNIX_MS = re.compile(rb"\d{13}")


@dataclass(frozen=True, slots=True)
class Terms:
    """`tenant` is empty where nobody is named; `limit_s` None: no deadline, else seconds that are left.

    `is_routed`: an ingress chose this deployment for the model's name, which the engine need not know.
    """

    serving_class: ServingClass = ServingClass.REALTIME
    tenant: str = ""
    limit_s: float | None = None
    is_routed: bool = False


class BadTerms(ValueError):
    """A header that says nothing sensible. `refusal` is the answer to it."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


def read_terms(headers: Headers, now: float) -> Terms:
    """The terms of one request, at `now` in seconds since 1970. Of a header that is there twice the last counts.

    What the request waited at its ingress is taken off its time, by the clocks of both machines.

    Raises:
        BadTerms: a class that does not exist, or a deadline that is no number.
    """
    serving_class, tenant, limit_s, is_routed = ServingClass.REALTIME, "", None, False
    waited_s = 0.0
    for name, value in headers:
        if name == CLASS_HEADER:
            serving_class = _serving_class(value)
        elif name == TENANT_HEADER:
            tenant = value.decode() if _TENANT.fullmatch(value) else OTHER_TENANTS
        elif name == DEADLINE_HEADER:
            limit_s = _limit_s(value)
        elif name == DEPLOYMENT_HEADER:
            is_routed = True
        elif name == ARRIVED_HEADER and _UNIX_MS.fullmatch(value):
            waited_s = max(0.0, now - int(value) / 1000)
    return Terms(serving_class, tenant, None if limit_s is None else limit_s - waited_s, is_routed)


def _serving_class(value: bytes) -> ServingClass:
    try:
        return ServingClass(value.decode("latin-1"))
    except ValueError:
        raise BadTerms(_bad_header("X-Switchyard-Class", value, f"one of {', '.join(ServingClass)}")) from None


def _limit_s(value: bytes) -> float:
    if not _MILLISECONDS.fullmatch(value):
        raise BadTerms(_bad_header("X-Switchyard-Deadline-Ms", value, "the milliseconds left, a whole number"))
    return int(value) / 1000


def _bad_header(name: str, value: bytes, right: str) -> Refusal:
    said = value[:80].decode("latin-1")
    return Refusal(400, "bad_header", f"the header {name} is {said!r}; it must be {right}")
