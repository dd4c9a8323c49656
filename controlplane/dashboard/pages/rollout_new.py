"""Starting a rollout from the browser: what it would do, stage by stage, and only then the start. One form and one
service; nothing is decided here."""

from dataclasses import dataclass
from typing import Any

from django.http import HttpRequest, HttpResponse, QueryDict
from django.shortcuts import redirect, render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods

from accounts.models import Approval
from fleet.models import Deployment
from fleet.planning.rollout.preview import PreviewStage, preview_seconds, preview_stages
from fleet.services.rollout_actions import Proposal, rollout_propose
from fleet.services.rollout_request import rollout_ask
from kernel import clock
from kernel.access import Role, needs
from kernel.refusals import Refusal
from models_registry.models import ModelVersion
from models_registry.planning.lifecycle import VersionState

LONGEST_TEXT = 200
VERSIONS_OFFERED = 200


@dataclass(frozen=True, slots=True)
class _Preview:
    """What stands in the form's second half: nothing without a `proposal`."""

    proposal: Proposal
    stages: tuple[PreviewStage, ...]

    @property
    def at_least_s(self) -> float:
        return preview_seconds(self.proposal.policy, self.stages)


def _deployment_asked(request: HttpRequest) -> str:
    return _asked(request)["deployment"]


@never_cache
@needs(Role.OPERATOR, deployment=_deployment_asked)
@require_http_methods(["GET", "HEAD", "POST"])
def rollout_new(request: HttpRequest) -> HttpResponse:
    """Show what the rollout would do; asked by POST, start it, or ask for the second person that it takes."""
    asked, refused, preview = _asked(request), "", None
    try:
        if asked["deployment"] and asked["version"]:
            preview = _preview(asked)
        if preview and request.method == "POST":
            actor = request.user.get_username()[:64]
            begun = rollout_ask(proposal=preview.proposal, actor=actor, now=clock.now(), why=asked["why"])
            return redirect("approvals") if isinstance(begun, Approval) else redirect("rollout", key=str(begun.pk))
    except Refusal as error:
        refused = str(error)
    context = {"asked": asked, "refused": refused, "preview": preview, **_choices()}
    return render(request, "dashboard/rollouts/new.html", context, status=409 if refused else 200)


def _preview(asked: dict[str, str]) -> _Preview:
    version = asked["version"]
    proposal = rollout_propose(
        deployment=asked["deployment"], version=version, policy={}, allow_unreleased=asked["unreleased"] == "yes"
    )
    return _Preview(proposal, preview_stages(proposal.policy, proposal.wanted, proposal.regions))


def _choices() -> dict[str, Any]:
    """What may be chosen: every deployment, and the youngest versions that are no drafts and not retired."""
    states = [VersionState.RELEASED.value, VersionState.VALIDATED.value]
    versions = ModelVersion.objects.filter(state__in=states).order_by("-id").only("model_id", "version")
    return {
        "deployments": Deployment.objects.order_by("name").values_list("name", flat=True),
        "versions": [version.reference for version in versions[:VERSIONS_OFFERED]],
    }


def _asked(request: HttpRequest) -> dict[str, str]:
    form: QueryDict = request.POST if request.method == "POST" else request.GET
    return {
        name: str(form.get(name, "")).replace("\x00", "\ufffd")[:LONGEST_TEXT].strip()
        for name in ("deployment", "version", "unreleased", "why")
    }
