"""What traffic shows under /api/v1/ (path, view set, noun), and to applications under /v1/async/ (`urlpatterns`)."""

from django.urls import path, re_path

from traffic.api.async_request import ENDPOINTS, accept, detail, unknown_path
from traffic.api.budget import BudgetViewSet
from traffic.api.cost import CostViewSet
from traffic.api.entry import EntryRevisionViewSet, EntryViewSet
from traffic.api.forecast import ForecastViewSet
from traffic.api.ingress import IngressViewSet, RoutingTableViewSet
from traffic.api.key import KeyRingViewSet, KeyViewSet
from traffic.api.matrix import MatrixViewSet, ShiftViewSet
from traffic.api.operator_batch import BatchViewSet
from traffic.api.override import EvacuationViewSet, OverrideViewSet
from traffic.api.request_queue import RequestQueueViewSet
from traffic.api.tenant_grant import TenantGrantViewSet
from traffic.api.tenant_webhook import TenantWebhookViewSet
from traffic.api.traffic_policy import TrafficPolicyViewSet
from traffic.api.usage import UsageViewSet

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
    re_path(r"^", unknown_path),
]
