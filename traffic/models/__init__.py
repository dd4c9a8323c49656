"""The tables of traffic, one noun a file."""

from traffic.models.async_request import AsyncRequest, CallbackHost
from traffic.models.entry import Entry, EntryRevision, EntryTarget
from traffic.models.key import ApplicationKey, KeyPolicy, UsageHour, UsageMark
from traffic.models.request_queue import RefusedMessage, RequestQueue
from traffic.models.routing import (
    Ingress,
    IngressReport,
    RoutingTable,
    TrafficMatrix,
    TrafficOverride,
    TrafficRule,
    TrafficShift,
    TrafficWindow,
)
from traffic.models.stored_response import StoredResponse

__all__ = [
    "ApplicationKey",
    "AsyncRequest",
    "CallbackHost",
    "Entry",
    "EntryRevision",
    "EntryTarget",
    "Ingress",
    "IngressReport",
    "KeyPolicy",
    "RefusedMessage",
    "RequestQueue",
    "RoutingTable",
    "StoredResponse",
    "TrafficMatrix",
    "TrafficOverride",
    "TrafficRule",
    "TrafficShift",
    "TrafficWindow",
    "UsageHour",
    "UsageMark",
]
