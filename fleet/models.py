"""Every table of the fleet, where Django looks for them; each noun declares its own."""

from fleet.agents.models import ApplicationCertificate, FleetAuthority, IssuedCertificate
from fleet.autoscaling.models import RoleState, ScalingDecision, ScalingState, ScalingSwitch
from fleet.capacity.models import DayPlan, DayPlanPlace
from fleet.cells.models import Cell, CellMember, Disruption
from fleet.clouds.models import (
    CallBucket,
    CapacityPool,
    CloudNotice,
    CloudRegion,
    ImageMove,
    Install,
    LaunchAttempt,
    LaunchUnit,
)
from fleet.deployments.models import Deployment, DeploymentRegion
from fleet.faults.models import CellSighting, FaultRule, Incident, Repair, Replacement, Signal, StepRecord
from fleet.load.models import LoadSubject, LoadWindow, RefusedRequests
from fleet.machines.models import Invitation, Machine, MachineStatus, ProviderCall
from fleet.nodes.models import AgentCredential, AgentListener, JoinToken, Node, NodeCheck, NodeLog, NodeReport
from fleet.quotas.models import Quota
from fleet.regions.models import InstanceType, Rate, Region
from fleet.releases.models import AgentMove, AgentRelease, AgentRollout
from fleet.rollouts.models import Rollout, RolloutPoints
from fleet.webhooks.models import Webhook, WebhookDelivery

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
