"""The tables of traffic, one noun a file."""

from traffic.models.async_request import AsyncRequest
from traffic.models.ingress import Ingress, IngressReport
from traffic.models.key import ApplicationKey, KeyPolicy
from traffic.models.routing_table import RoutingTable
from traffic.models.steering import TrafficMatrix, TrafficOverride, TrafficRule, TrafficShift, TrafficWindow
from traffic.models.usage import UsageHour, UsageMark

__all__ = [
    "ApplicationKey",
    "AsyncRequest",
    "Ingress",
    "IngressReport",
    "KeyPolicy",
    "RoutingTable",
    "TrafficMatrix",
    "TrafficOverride",
    "TrafficRule",
    "TrafficShift",
    "TrafficWindow",
    "UsageHour",
    "UsageMark",
]
