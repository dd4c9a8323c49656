"""The fleet's tables, one noun a file."""

from fleet.models.cell import Cell, CellMember
from fleet.models.credential import AgentCredential, JoinToken
from fleet.models.deployment import Deployment, DeploymentRegion
from fleet.models.disruption import Disruption
from fleet.models.fault import CellSighting, FaultRule, Repair, Replacement, Signal, StepRecord
from fleet.models.history import LoadSubject, LoadWindow
from fleet.models.incident import Incident
from fleet.models.node import Node, NodeReport
from fleet.models.node_log import NodeLog
from fleet.models.region import InstanceType, Region
from fleet.models.rollout import Rollout
from fleet.models.webhook import Webhook, WebhookDelivery

__all__ = [
    "AgentCredential",
    "Cell",
    "CellMember",
    "CellSighting",
    "Deployment",
    "DeploymentRegion",
    "Disruption",
    "FaultRule",
    "Incident",
    "InstanceType",
    "JoinToken",
    "LoadSubject",
    "LoadWindow",
    "Node",
    "NodeLog",
    "NodeReport",
    "Region",
    "Repair",
    "Replacement",
    "Rollout",
    "Signal",
    "StepRecord",
    "Webhook",
    "WebhookDelivery",
]
