"""What traffic shows under /api/v1/: (path, view set, noun)."""

from traffic.api.ingress import IngressViewSet
from traffic.api.routing_table import RoutingTableViewSet

ROUTES = (
    ("ingresses", IngressViewSet, "ingress"),
    ("routing-tables", RoutingTableViewSet, "routing-table"),
)
