"""The tables of traffic, one noun a file."""

from traffic.models.async_request import AsyncRequest, RefusedMessage, RequestQueue
from traffic.models.batch import Batch, BatchRange, BatchTimeline, StoredFile
from traffic.models.budget import Budget
from traffic.models.cost import CellHour, CostShare
from traffic.models.demand import DemandDay, DemandForecast, ForecastRecord
from traffic.models.entry import Entry, EntryRevision, EntryTarget
from traffic.models.key import ApplicationKey, KeyPolicy
from traffic.models.routing import (
    Ingress,
    IngressReport,
    PoolHold,
    RoutingTable,
    TrafficMatrix,
    TrafficOverride,
    TrafficRule,
    TrafficShift,
    TrafficWindow,
)
from traffic.models.stored_response import StoredResponse
from traffic.models.tenant_access import TenantGrant, TenantWebhook
from traffic.models.token_fit import TokenFit, TokenWork
from traffic.models.usage import (
    UsageDay,
    UsageExport,
    UsageHour,
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
    "CellHour",
    "CostShare",
    "DemandDay",
    "DemandForecast",
    "Entry",
    "EntryRevision",
    "EntryTarget",
    "ForecastRecord",
    "Ingress",
    "IngressReport",
    "KeyPolicy",
    "PoolHold",
    "RefusedMessage",
    "RequestQueue",
    "RoutingTable",
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
    "UsageDay",
    "UsageExport",
    "UsageHour",
    "UsageMark",
    "UsageMonth",
]
