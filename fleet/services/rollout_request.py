"""Rollouts of a deployment over all of its regions, where a rule asks for two people: the request of one, carried out
when another approved it."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from accounts.models import Approval
from accounts.services.approval import ApprovalRequest, FleetAction, approval_request, requires_approval
from fleet.models import Rollout
from fleet.planning.policy import policy_as_json
from fleet.services.rollout_actions import Proposal, rollout_propose, rollout_start


def rollout_ask(*, proposal: Proposal, actor: str, now: datetime, why: str = "") -> Rollout | Approval:
    """Start a rollout, or, where it takes two people, ask for the second. In a single region it takes one.

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
    asked = dict(arguments)
    why = str(asked.pop("why"))
    rollout = rollout_start(proposal=rollout_propose(**asked), actor=actor, now=now, why=why)
    return f"rollout {rollout.pk} started"


ROLL_OUT = FleetAction("roll-out-everywhere", "Roll a deployment out in all of its regions", _perform)
