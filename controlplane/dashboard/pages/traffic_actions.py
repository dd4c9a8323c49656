"""What an operator orders about traffic from its page: evacuate a region after seeing the effect, end an order. Each is
one form and one service; nothing is decided here."""

from collections.abc import Iterable

from django.http import Http404, HttpRequest, HttpResponse, QueryDict
from django.shortcuts import redirect, render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods, require_POST

from accounts.models import Approval
from controlplane.dashboard.selectors.steering import EffectTable, effect_tables
from fleet.models import Deployment, Region
from kernel import clock
from kernel.access import Role, needs
from kernel.refusals import Refusal
from traffic.models import TrafficOverride
from traffic.planning.overrides import EvacuationMode
from traffic.selectors.steering import effects_of
from traffic.services.override import Terms, evacuation_ask, evacuation_order, override_end

PREVIEWED_S = 3600
"""A prediction does not depend on how long the order is to hold."""
LONGEST_MINUTES_TEXT = 6
LONGEST_TEXT = 200


def _deployment_evacuated(request: HttpRequest, region: str) -> str:
    return str((request.POST if request.method == "POST" else request.GET).get("deployment", ""))


def _deployment_of_override(request: HttpRequest, override_id: int) -> str:
    return TrafficOverride.objects.filter(pk=override_id).values_list("deployment_id", flat=True).first() or ""


@never_cache
@needs(Role.OPERATOR, deployment=_deployment_evacuated)
@require_http_methods(["GET", "HEAD", "POST"])
def evacuate(request: HttpRequest, region: str) -> HttpResponse:
    """Show what evacuating a region would do; asked by POST, with the region's name typed once more, do it."""
    if not Region.objects.filter(name=region).exists():
        raise Http404(f"There is no region {region!r}.")
    asked = _asked(request.POST if request.method == "POST" else request.GET)
    if request.method == "POST":
        terms = Terms(_seconds(asked["minutes"]), asked["why"], _actor(request), clock.now())
        try:
            order = evacuation_ask(
                region=region,
                mode=asked["mode"],
                deployment=asked["deployment"],
                confirm=asked["confirm"],
                terms=terms,
            )
        except Refusal as refused:
            return _page(request, region, asked, str(refused), 409)
        return redirect("approvals" if isinstance(order, Approval) else "traffic")
    return _page(request, region, asked, "", 200)


@never_cache
@needs(Role.OPERATOR, deployment=_deployment_of_override)
@require_POST
def override_end_now(request: HttpRequest, override_id: int) -> HttpResponse:
    """End an order before its time; one that has ended already is as asked."""
    if not TrafficOverride.objects.filter(pk=override_id).exists():
        raise Http404(f"There is no override {override_id}.")
    try:
        override_end(override_id=override_id, actor=_actor(request), now=clock.now())
    except Refusal as refused:
        return render(request, "dashboard/traffic/refused.html", {"refused": str(refused)}, status=409)
    return redirect("traffic")


def _page(request: HttpRequest, region: str, asked: dict[str, str], refused: str, status: int) -> HttpResponse:
    tables: Iterable[EffectTable] = ()
    try:
        terms = Terms(PREVIEWED_S, "preview", _actor(request), clock.now())
        order = evacuation_order(region=region, mode=asked["mode"], deployment=asked["deployment"], terms=terms)
        tables = effect_tables(effects_of(order, terms.now))
    except Refusal as impossible:
        refused, status = refused or str(impossible), 409
    context = {
        "region": region,
        "asked": asked,
        "refused": refused,
        "tables": tables,
        "deployments": Deployment.objects.values_list("name", flat=True),
    }
    return render(request, "dashboard/traffic/evacuate.html", context, status=status)


def _asked(form: QueryDict) -> dict[str, str]:
    defaults = {"mode": EvacuationMode.DRILL.value, "deployment": "", "minutes": "60", "why": "", "confirm": ""}
    return {
        name: str(form.get(name, default)).replace("\x00", "\ufffd")[:LONGEST_TEXT]
        for name, default in defaults.items()
    }


def _seconds(minutes: str) -> int:
    return 60 * int(minutes) if minutes.isdecimal() and len(minutes) <= LONGEST_MINUTES_TEXT else 0


def _actor(request: HttpRequest) -> str:
    return request.user.get_username()[:64]
