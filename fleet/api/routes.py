"""What the fleet shows under /api/v1/: (path, view set, noun)."""

from fleet.api.agents import AgentReleaseViewSet, AgentRolloutViewSet
from fleet.api.application_certificate import CertificateViewSet
from fleet.api.autoscaling import AutoscalingViewSet, ScalingDecisionViewSet, ScalingPlaceViewSet
from fleet.api.capacity_plan import CapacityPlanViewSet
from fleet.api.capacity_pool import CapacityPoolViewSet
from fleet.api.cell import CellViewSet
from fleet.api.deployment import DeploymentViewSet
from fleet.api.fault_rule import FaultRuleViewSet
from fleet.api.image_move import ImageMoveViewSet
from fleet.api.incident import IncidentViewSet
from fleet.api.machine import InvitationViewSet, MachineViewSet
from fleet.api.node import NodeViewSet
from fleet.api.quota import QuotaViewSet
from fleet.api.rate import RateViewSet
from fleet.api.region import InstanceTypeViewSet, RegionViewSet
from fleet.api.rollout import RolloutViewSet
from fleet.api.webhook import WebhookDeliveryViewSet, WebhookViewSet

ROUTES = (
    ("regions", RegionViewSet, "region"),
    ("capacity-plan", CapacityPlanViewSet, "capacity-plan"),
    ("capacity-pools", CapacityPoolViewSet, "capacity-pool"),
    ("image-moves", ImageMoveViewSet, "image-move"),
    ("instance-types", InstanceTypeViewSet, "instance-type"),
    ("rates", RateViewSet, "rate"),
    ("quotas", QuotaViewSet, "quota"),
    ("machines/invitations", InvitationViewSet, "invitation"),
    ("machines", MachineViewSet, "machine"),
    ("agents/releases", AgentReleaseViewSet, "agent-release"),
    ("agents/rollouts", AgentRolloutViewSet, "agent-rollout"),
    ("nodes", NodeViewSet, "node"),
    ("cells", CellViewSet, "cell"),
    ("deployments", DeploymentViewSet, "deployment"),
    ("autoscaling/places", ScalingPlaceViewSet, "scaling-place"),
    ("autoscaling/decisions", ScalingDecisionViewSet, "scaling-decision"),
    ("autoscaling", AutoscalingViewSet, "autoscaling"),
    ("rollouts", RolloutViewSet, "rollout"),
    ("incidents", IncidentViewSet, "incident"),
    ("certificates", CertificateViewSet, "certificate"),
    ("fault-rules", FaultRuleViewSet, "fault-rule"),
    ("webhooks", WebhookViewSet, "webhook"),
    ("webhook-deliveries", WebhookDeliveryViewSet, "webhook-delivery"),
)
