"""What an operator asks of one cell from its page: one form, one service, and back to the page. It decides nothing but
whether the cell was named."""

from collections.abc import Callable

from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_POST

from fleet.models import Cell
from fleet.services.cell_actions import cell_drain, cell_restart
from kernel import clock
from kernel.access import Role, needs
from kernel.refusals import InvalidInput, Refusal

LONGEST_TEXT = 200
SERVICES: dict[str, Callable[..., None]] = {"drain": cell_drain, "restart": cell_restart}


def _deployment(request: HttpRequest, cell_id: str, action: str) -> str:
    return Cell.objects.filter(pk=_storable(cell_id)).values_list("deployment_id", flat=True).first() or ""


@never_cache
@needs(Role.OPERATOR, deployment=_deployment)
@require_POST
def cell_action(request: HttpRequest, cell_id: str, action: str) -> HttpResponse:
    """Ask, and show the page again; what was refused is said on a page of its own."""
    service = SERVICES.get(action)
    if service is None or not Cell.objects.filter(pk=_storable(cell_id)).exists():
        raise Http404(f"There is no {action!r} for the cell {cell_id!r}.")
    said = {name: _storable(str(request.POST.get(name, "")))[:LONGEST_TEXT].strip() for name in ("why", "confirm")}
    try:
        if said["confirm"] != cell_id:
            message = f"type {cell_id} to confirm; {said['confirm']!r} was typed"
            raise InvalidInput(field="confirm", rule="named", message=message)
        service(cell_id=cell_id, actor=request.user.get_username()[:64], now=clock.now(), why=said["why"])
    except Refusal as refused:
        context = {"refused": str(refused), "back": cell_id}
        return render(request, "dashboard/cells/refused.html", context, status=409)
    return redirect("cell", key=cell_id)


def _storable(text: str) -> str:
    return text.replace("\x00", "\ufffd")
