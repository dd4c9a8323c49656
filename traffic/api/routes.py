"""What traffic shows under /api/v1/: (path, view set, noun)."""

from traffic.api.ingress import IngressViewSet
from traffic.api.key import KeyViewSet
from traffic.api.key_ring import KeyRingViewSet
from traffic.api.routing_table import RoutingTableViewSet
from traffic.api.usage import UsageViewSet

ROUTES = (
    ("ingresses", IngressViewSet, "ingress"),
    ("routing-tables", RoutingTableViewSet, "routing-table"),
    ("keys", KeyViewSet, "key"),
    ("key-rings", KeyRingViewSet, "key-ring"),
    ("usage", UsageViewSet, "usage"),
)
