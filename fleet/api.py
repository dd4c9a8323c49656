"""What the fleet shows under /api/v1/: (path, view set, noun)."""

from fleet.autoscaling.api import AutoscalingViewSet, ScalingDecisionViewSet, ScalingPlaceViewSet
from fleet.capacity.api import CapacityPlanViewSet, CapacityPoolViewSet, RateViewSet
from fleet.cells.api import CellViewSet
from fleet.clouds.api import ImageMoveViewSet
from fleet.deployments.api import DeploymentViewSet
from fleet.faults.api import FaultRuleViewSet, IncidentViewSet
from fleet.machines.api import InvitationViewSet, MachineViewSet
from fleet.nodes.api import NodeViewSet
from fleet.quotas.api import QuotaViewSet
from fleet.regions.api import CertificateViewSet, InstanceTypeViewSet, RegionViewSet
from fleet.releases.api import AgentReleaseViewSet, AgentRolloutViewSet
from fleet.rollouts.api import RolloutViewSet
from fleet.webhooks.api import WebhookDeliveryViewSet, WebhookViewSet

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
