"""The fleet's tables, a noun and what belongs to it a file."""

from fleet.models.agents import AgentMove, AgentRelease, AgentRollout
from fleet.models.authority import ApplicationCertificate, FleetAuthority, IssuedCertificate
from fleet.models.autoscaling import RoleState, ScalingDecision, ScalingState, ScalingSwitch
from fleet.models.capacity_plan import DayPlan, DayPlanPlace
from fleet.models.cell import Cell, CellMember, Disruption
from fleet.models.cloud import (
    CallBucket,
    CapacityPool,
    CloudNotice,
    CloudRegion,
    ImageMove,
    Install,
    LaunchAttempt,
    LaunchUnit,
)
from fleet.models.deployment import Deployment, DeploymentRegion
from fleet.models.fault import CellSighting, FaultRule, Repair, Replacement, Signal, StepRecord
from fleet.models.history import LoadSubject, LoadWindow, RefusedRequests
from fleet.models.incident import Incident
from fleet.models.machine import Invitation, Machine, MachineStatus, ProviderCall
from fleet.models.node import AgentCredential, AgentListener, JoinToken, Node, NodeCheck, NodeLog, NodeReport
from fleet.models.quota import Quota
from fleet.models.region import InstanceType, Rate, Region
from fleet.models.rollout import Rollout, RolloutPoints
from fleet.models.webhook import Webhook, WebhookDelivery

__all__ = [
    "AgentCredential",
    "AgentListener",
    "AgentMove",
    "AgentRelease",
    "AgentRollout",
    "ApplicationCertificate",
    "CallBucket",
    "CapacityPool",
    "Cell",
    "CellMember",
    "CellSighting",
    "CloudNotice",
    "CloudRegion",
    "DayPlan",
    "DayPlanPlace",
    "Deployment",
    "DeploymentRegion",
    "Disruption",
    "FaultRule",
    "FleetAuthority",
    "ImageMove",
    "Incident",
    "Install",
    "InstanceType",
    "Invitation",
    "IssuedCertificate",
    "JoinToken",
    "LaunchAttempt",
    "LaunchUnit",
    "LoadSubject",
    "LoadWindow",
    "Machine",
    "MachineStatus",
    "Node",
    "NodeCheck",
    "NodeLog",
    "NodeReport",
    "ProviderCall",
    "Quota",
    "Rate",
    "RefusedRequests",
    "Region",
    "Repair",
    "Replacement",
    "RoleState",
    "Rollout",
    "RolloutPoints",
    "ScalingDecision",
    "ScalingState",
    "ScalingSwitch",
    "Signal",
    "StepRecord",
    "Webhook",
    "WebhookDelivery",
]
