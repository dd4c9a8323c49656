"""What an operator asks of a rollout from its page: one form, one service, and back to the page. It decides nothing."""

from collections.abc import Callable

from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_POST

from fleet.models import Rollout
from fleet.services.rollout_actions import (
    rollout_abort,
    rollout_pause,
    rollout_resume,
    rollout_roll_back,
    rollout_skip_bake,
)
from kernel import clock
from kernel.access import Role, needs
from kernel.refusals import Refusal

LONGEST_WHY = 200

SERVICES: dict[str, Callable[..., None]] = {
    "pause": rollout_pause,
    "resume": rollout_resume,
    "skip-bake": rollout_skip_bake,
    "roll-back": rollout_roll_back,
    "abort": rollout_abort,
}


def _deployment(request: HttpRequest, rollout_id: int, action: str) -> str:
    return Rollout.objects.filter(pk=rollout_id).values_list("deployment_id", flat=True).first() or ""


@never_cache
@needs(Role.OPERATOR, deployment=_deployment)
@require_POST
def rollout_action(request: HttpRequest, rollout_id: int, action: str) -> HttpResponse:
    """Ask, and show the page again; what was refused is said on a page of its own."""
    service = SERVICES.get(action)
    if service is None or not Rollout.objects.filter(pk=rollout_id).exists():
        raise Http404(f"There is no {action!r} for rollout {rollout_id}.")
    why = str(request.POST.get("why", "")).replace("\x00", "\ufffd")[:LONGEST_WHY]
    try:
        service(rollout_id=rollout_id, actor=request.user.get_username()[:64], now=clock.now(), why=why)
    except Refusal as refused:
        context = {"rollout_id": rollout_id, "refused": str(refused)}
        return render(request, "dashboard/rollouts/refused.html", context, status=409)
    return redirect("rollout", key=str(rollout_id))
