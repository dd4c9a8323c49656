"""The tables of traffic, one noun a file."""

from traffic.models.ingress import Ingress, IngressReport
from traffic.models.routing_table import RoutingTable
from traffic.models.steering import TrafficMatrix, TrafficOverride, TrafficRule, TrafficShift, TrafficWindow

__all__ = [
    "Ingress",
    "IngressReport",
    "RoutingTable",
    "TrafficMatrix",
    "TrafficOverride",
    "TrafficRule",
    "TrafficShift",
    "TrafficWindow",
]
