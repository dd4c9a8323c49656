"""Rollouts of a deployment in all of its regions, where a rule requires approval: requested by one user, started when
another one approved it."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from accounts.models import Approval
from accounts.services.approval import ApprovalRequest, FleetAction, approval_request, requires_approval
from fleet.models import Rollout
from fleet.planning.policy import policy_as_json
from fleet.services.rollout_actions import Proposal, rollout_propose, rollout_start


def rollout_start_or_request(*, proposal: Proposal, actor: str, now: datetime, why: str = "") -> Rollout | Approval:
    """Start a rollout or, where it requires approval, request that. In a single region it never does.

    Raises:
        Conflict: as `rollout_start` does.
    """
    if len(proposal.regions) < 2 or not requires_approval(ROLL_OUT.name):
        return rollout_start(proposal=proposal, actor=actor, now=now, why=why)
    name, version = proposal.deployment.name, proposal.version.reference
    arguments = {
        "deployment": name,
        "version": version,
        "policy": policy_as_json(proposal.policy),
        "allow_unreleased": proposal.allow_unreleased,
        "why": why,
    }
    summary = f"roll {name} out to {version} in {', '.join(proposal.regions)}"
    return approval_request(ROLL_OUT.name, ApprovalRequest(summary, arguments, actor, now, why, name))


def _perform(arguments: Mapping[str, Any], actor: str, now: datetime) -> str:
    options = dict(arguments)
    why = str(options.pop("why"))
    rollout = rollout_start(proposal=rollout_propose(**options), actor=actor, now=now, why=why)
    return f"rollout {rollout.pk} started"


ROLL_OUT = FleetAction("roll-out-everywhere", "Roll a deployment out in all of its regions", _perform)
