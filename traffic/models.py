"""Lists all tables of traffic for Django. Import models from their noun."""

from traffic.async_requests.models import AsyncRequest, RefusedMessage, RequestQueue
from traffic.batches.models import Batch, BatchRange, BatchTimeline, StoredFile
from traffic.demand.models import ForecastRecord, Series
from traffic.entry.models import Entry, EntryRevision, EntryTarget
from traffic.keys.models import ApplicationKey, KeyPolicy
from traffic.region_shares.models import TrafficMatrix, TrafficOverride, TrafficRule, TrafficShift, TrafficWindow
from traffic.responses.models import StoredResponse
from traffic.routing.models import Ingress, IngressReport, PoolHold, RoutingTable
from traffic.tenants.models import TenantGrant, TenantWebhook
from traffic.usage.models import (
    Budget,
    KindOfMachines,
    TokenFit,
    TokenWork,
    UsageCounts,
    UsageExport,
    UsageMark,
    UsageMonth,
)

__all__ = [
    "ApplicationKey",
    "AsyncRequest",
    "Batch",
    "BatchRange",
    "BatchTimeline",
    "Budget",
    "Entry",
    "EntryRevision",
    "EntryTarget",
    "ForecastRecord",
    "Ingress",
    "IngressReport",
    "KeyPolicy",
    "KindOfMachines",
    "PoolHold",
    "RefusedMessage",
    "RequestQueue",
    "RoutingTable",
    "Series",
    "StoredFile",
    "StoredResponse",
    "TenantGrant",
    "TenantWebhook",
    "TokenFit",
    "TokenWork",
    "TrafficMatrix",
    "TrafficOverride",
    "TrafficRule",
    "TrafficShift",
    "TrafficWindow",
    "UsageCounts",
    "UsageExport",
    "UsageMark",
    "UsageMonth",
]
