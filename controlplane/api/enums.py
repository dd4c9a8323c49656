"""Names the OpenAPI document's enumerations (settings.SPECTACULAR_SETTINGS), so that generated clients keep theirs."""

from accounts.models import APPROVAL_STATES
from accounts.models import ROLES as ACCESS_ROLES
from accounts.models import SCOPES as ACCESS_SCOPES
from audit.models import Outcome, Proof
from controlplane.api.apply.planning import Action, Kind
from engine_agent.protocol.states import EngineState, MemberRole, ServingClass
from fleet.autoscaling.planning.needs import ScalingRule
from fleet.autoscaling.planning.policy import ScalingMode
from fleet.capacity.api import KINDS as KINDS_OF_RATES
from fleet.capacity.api import MARKETS, ORIGINS, POOL_STATES
from fleet.clouds.api import IMAGE_STATES
from fleet.deployments.planner import Preempts
from fleet.drafts.api import STATES as STATES_OF_DRAFTS
from fleet.faults.planning.views import RuleMode
from fleet.machines.api import INVITATION_STATES
from fleet.nodes.api import ROLES
from fleet.reconcile.planning.snapshot import Finding
from fleet.reconcile.planning.states import (
    CellState,
    IncidentState,
    MachineRole,
    MachineState,
    NodeState,
    RolloutState,
    choices,
)
from fleet.webhooks.api import EVENTS
from fleet.webhooks.planner import WebhookFormat
from kernel.tones import Tone
from models_registry.benchmarks.planning.workload import BenchmarkState
from models_registry.versions.planning.diff import Change
from models_registry.versions.planning.lifecycle import ValidationState, VersionState
from traffic.batch_sinks.planner import SinkKind
from traffic.keys.planner import KeyState
from traffic.region_shares.planning.autopilot import ShiftKind
from traffic.region_shares.planning.policy import EvacuationMode, OverrideKind
from traffic.tenants.planner import BatchEvent
from traffic.usage.api.costs import SOURCES

ROLES_OF_PEOPLE = ACCESS_ROLES
TOKEN_SCOPES = ACCESS_SCOPES
APPROVALS = APPROVAL_STATES
DOCUMENT_KINDS = choices(Kind)
DOCUMENT_ACTIONS = choices(Action)
PREEMPTS = choices(Preempts)
SCALING_MODES = choices(ScalingMode)
SCALING_RULES = choices(ScalingRule)
CELL_STATES = choices(CellState)
NODE_STATES = choices(NodeState)
NODE_ROLES = ROLES
CAPACITY_MARKETS = MARKETS
CAPACITY_POOL_STATES = POOL_STATES
CAPACITY_POOL_ORIGINS = ORIGINS
IMAGE_MOVE_STATES = IMAGE_STATES
DRAFT_STATES = STATES_OF_DRAFTS
MACHINE_STATES = choices(MachineState)
MACHINE_ROLES = choices(MachineRole)
INVITATIONS = INVITATION_STATES
ROLLOUT_STATES = choices(RolloutState)
GATE_FINDINGS = choices(Finding)
INCIDENT_STATES = choices(IncidentState)
SERVING_CLASSES = choices(ServingClass)
ENGINE_STATES = choices(EngineState)
MEMBER_ROLES = choices(MemberRole)
VERSION_STATES = choices(VersionState)
TONES = choices(Tone)
AUDIT_OUTCOMES = choices(Outcome)
AUDIT_PROOFS = choices(Proof)
WEBHOOK_FORMATS = choices(WebhookFormat)
KEY_STATES = choices(KeyState)
BATCH_EVENTS = choices(BatchEvent)
WEBHOOK_EVENTS = EVENTS
VALIDATION_STATES = choices(ValidationState)
JOB_STATES = choices(BenchmarkState)
"""Imports have the same."""
CHANGES = choices(Change)
RULE_MODES = choices(RuleMode)
SHIFT_KINDS = choices(ShiftKind)
OVERRIDE_KINDS = choices(OverrideKind)
EVACUATION_MODES = choices(EvacuationMode)
RATE_KINDS = KINDS_OF_RATES
FIGURE_SOURCES = SOURCES
SINK_KINDS = choices(SinkKind)
