"""Routes of traffic under /api/v1/ (path, view set, noun), and `urlpatterns` under /v1/async/."""

from django.urls import path, re_path

from traffic.async_requests.api import ENDPOINTS, RequestQueueViewSet, accept, detail, no_such_path
from traffic.batches.api import BatchViewSet
from traffic.demand.api import ForecastViewSet
from traffic.entry.api import EntryRevisionViewSet, EntryViewSet
from traffic.keys.api import KeyRingViewSet, KeyViewSet
from traffic.region_shares.api.overrides import EvacuationViewSet, OverrideViewSet
from traffic.region_shares.api.shares import MatrixViewSet, ShiftViewSet, TrafficPolicyViewSet
from traffic.routing.api import IngressViewSet, RoutingTableViewSet
from traffic.tenants.api import TenantGrantViewSet, TenantWebhookViewSet
from traffic.usage.api.costs import BudgetViewSet, CostViewSet
from traffic.usage.api.usage import UsageViewSet

ROUTES = (
    ("ingresses", IngressViewSet, "ingress"),
    ("routing-tables", RoutingTableViewSet, "routing-table"),
    ("keys", KeyViewSet, "key"),
    ("key-rings", KeyRingViewSet, "key-ring"),
    ("tenant-grants", TenantGrantViewSet, "tenant-grant"),
    ("tenant-webhooks", TenantWebhookViewSet, "tenant-webhook"),
    ("request-queues", RequestQueueViewSet, "request-queue"),
    ("batches", BatchViewSet, "batch"),
    ("usage", UsageViewSet, "usage"),
    ("costs", CostViewSet, "cost"),
    ("forecasts", ForecastViewSet, "forecast"),
    ("budgets", BudgetViewSet, "budget"),
    ("traffic/matrices", MatrixViewSet, "matrix"),
    ("traffic/history", ShiftViewSet, "shift"),
    ("traffic/policies", TrafficPolicyViewSet, "traffic-policy"),
    ("traffic/overrides", OverrideViewSet, "override"),
    ("traffic/evacuations", EvacuationViewSet, "evacuation"),
    ("entry", EntryViewSet, "entry"),
    ("entry-revisions", EntryRevisionViewSet, "entry-revision"),
)


urlpatterns = [
    *(path(kind, accept, {"kind": kind}, name=f"async-{kind}") for kind in ENDPOINTS),
    path("<str:request_id>", detail, name="async-request"),
    re_path(r"^", no_such_path),
]
