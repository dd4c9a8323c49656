"""The tables of traffic, one noun a file."""

from traffic.models.ingress import Ingress, IngressReport
from traffic.models.routing_table import RoutingTable

__all__ = ["Ingress", "IngressReport", "RoutingTable"]
