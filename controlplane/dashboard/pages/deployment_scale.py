"""Changing a deployment's number of cells from the browser: what would happen, and only then the change. One form and
one service; nothing is decided here but whether the deployment was named."""

from dataclasses import dataclass

from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods

from controlplane.what_if import plan_scale
from fleet.models import Deployment, DeploymentRegion, Region
from fleet.services.deployment import CELLS_PER_REGION_MAX, deployment_scale
from kernel import clock
from kernel.access import Role, needs
from kernel.refusals import InvalidInput, Refusal

MOST_DIGITS = 5


@dataclass(frozen=True, slots=True)
class Place:
    """A region: how many cells it should have now, and how many are asked for."""

    region: str
    wanted: int
    asked: int


def _deployment(request: HttpRequest, name: str) -> str:
    return name


@never_cache
@needs(Role.OPERATOR, deployment=_deployment)
@require_http_methods(["GET", "HEAD", "POST"])
def scale(request: HttpRequest, name: str) -> HttpResponse:
    """Show what other numbers of cells would do; asked by POST, with the deployment's name typed once more, do it."""
    deployment = get_object_or_404(Deployment, pk=name.replace("\x00", "\ufffd"))
    places: tuple[Place, ...] = ()
    changed: dict[str, int] = {}
    refused, forecast = "", None
    try:
        places = _places(request, deployment)
        changed = {place.region: place.asked for place in places if place.asked != place.wanted}
        if request.method == "POST":
            _named(request, deployment)
            deployment_scale(name=deployment.pk, cells=changed, actor=_actor(request), now=clock.now())
            return redirect("deployment", key=deployment.pk)
        if changed:
            forecast = plan_scale(deployment=deployment.pk, cells=changed, now=clock.now())
    except Refusal as error:
        refused, changed = str(error), {}
    context = {
        "deployment": deployment,
        "places": places or _places(None, deployment),
        "refused": refused,
        "forecast": forecast,
        "changed": changed,
    }
    return render(request, "dashboard/deployments/scale.html", context, status=409 if refused else 200)


def _places(request: HttpRequest | None, deployment: Deployment) -> tuple[Place, ...]:
    wanted = dict(DeploymentRegion.objects.filter(deployment=deployment).values_list("region_id", "cells"))
    form = None if request is None else request.POST if request.method == "POST" else request.GET
    found = []
    for region in Region.objects.values_list("name", flat=True):
        there = wanted.get(region, 0)
        text = str(form.get(f"cells-{region}", there)).strip() if form is not None else str(there)
        found.append(Place(region, there, _number(region, text)))
    return tuple(found)


def _number(region: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= MOST_DIGITS and int(text) <= CELLS_PER_REGION_MAX):
        message = f"{text[:20]!r} cells in {region}; the number must be from 0 to {CELLS_PER_REGION_MAX}"
        raise InvalidInput(field="regions", rule="range", message=message)
    return int(text)


def _named(request: HttpRequest, deployment: Deployment) -> None:
    typed = str(request.POST.get("confirm", "")).strip()[:200]
    if typed != deployment.pk:
        message = f"type {deployment.pk} to confirm; {typed!r} was typed"
        raise InvalidInput(field="confirm", rule="named", message=message)


def _actor(request: HttpRequest) -> str:
    return request.user.get_username()[:64]
