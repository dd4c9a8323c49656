"""What traffic shows under /api/v1/: (path, view set, noun)."""

from traffic.api.ingress import IngressViewSet
from traffic.api.key import KeyViewSet
from traffic.api.key_ring import KeyRingViewSet
from traffic.api.matrix import MatrixViewSet, ShiftViewSet
from traffic.api.override import EvacuationViewSet, OverrideViewSet
from traffic.api.routing_table import RoutingTableViewSet
from traffic.api.traffic_policy import TrafficPolicyViewSet
from traffic.api.usage import UsageViewSet

ROUTES = (
    ("ingresses", IngressViewSet, "ingress"),
    ("routing-tables", RoutingTableViewSet, "routing-table"),
    ("keys", KeyViewSet, "key"),
    ("key-rings", KeyRingViewSet, "key-ring"),
    ("usage", UsageViewSet, "usage"),
    ("traffic/matrices", MatrixViewSet, "matrix"),
    ("traffic/history", ShiftViewSet, "shift"),
    ("traffic/policies", TrafficPolicyViewSet, "traffic-policy"),
    ("traffic/overrides", OverrideViewSet, "override"),
    ("traffic/evacuations", EvacuationViewSet, "evacuation"),
)
