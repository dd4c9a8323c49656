"""Fixing where one origin's requests are served: the shares, their predicted effect, and only then the order. One form
and one service; nothing is decided here."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from django.http import HttpRequest, HttpResponse, QueryDict
from django.shortcuts import redirect, render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods

from controlplane.dashboard.selectors.shares import SharesForm, shares_form
from controlplane.dashboard.selectors.steering import EffectTable, effect_tables
from kernel import clock
from kernel.access import Role, needs
from kernel.refusals import InvalidInput, Refusal
from traffic.selectors.steering import effects_of
from traffic.services.override import Terms, shares_fix, shares_order

PREVIEWED_S = 3600
"""A prediction does not depend on how long the order is to hold."""
LONGEST_MINUTES_TEXT = 6
LONGEST_TEXT = 200
SHARE = "share-"
"""Before a region's name: the field with its share in per cent."""


@dataclass(frozen=True, slots=True)
class _Asked:
    deployment: str
    origin: str
    percents: Mapping[str, str]
    minutes: str
    why: str


def _deployment_asked(request: HttpRequest) -> str:
    return _asked(request).deployment


@never_cache
@needs(Role.OPERATOR, deployment=_deployment_asked)
@require_http_methods(["GET", "HEAD", "POST"])
def traffic_shares(request: HttpRequest) -> HttpResponse:
    """Show what fixed shares would do; asked by POST, fix them."""
    asked = _asked(request)
    form = shares_form(asked.deployment, asked.origin, asked.percents)
    refused = ""
    if request.method == "POST":
        try:
            _fix(form, asked, _actor(request))
        except Refusal as error:
            refused = str(error)
        else:
            return redirect("traffic")
    tables: tuple[EffectTable, ...] = ()
    try:
        tables = tuple(_effect(form))
    except Refusal as error:
        refused = refused or str(error)
    context = {"form": form, "asked": asked, "refused": refused, "tables": tables}
    return render(request, "dashboard/traffic/fix_shares.html", context, status=409 if refused else 200)


def _fix(form: SharesForm, asked: _Asked, actor: str) -> None:
    is_whole = asked.minutes.isdecimal() and len(asked.minutes) <= LONGEST_MINUTES_TEXT
    terms = Terms(60 * int(asked.minutes) if is_whole else 0, asked.why, actor, clock.now())
    shares_fix(deployment=form.deployment, origin=form.origin, shares=_shares(form), terms=terms)


def _effect(form: SharesForm) -> Iterable[EffectTable]:
    if not form.fields:
        return ()
    terms = Terms(PREVIEWED_S, "preview", "preview", clock.now())
    order = shares_order(deployment=form.deployment, origin=form.origin, shares=_shares(form), terms=terms)
    return effect_tables(effects_of(order, terms.now))


def _shares(form: SharesForm) -> dict[str, float]:
    """Fractions that sum to 1.

    Raises:
        InvalidInput: a field is no number, or the shares do not sum to 100 %.
    """
    percents: dict[str, float] = {}
    for field in form.fields:
        try:
            percents[field.region] = float(field.percent or 0)
        except ValueError:
            message = f"the share of {field.region} is {field.percent!r}; it must be a number of per cent"
            raise InvalidInput(field="shares", rule="number", message=message) from None
    total = sum(percents.values())
    if not abs(total - 100) <= 0.1:
        raise InvalidInput(field="shares", rule="sum", message=f"the shares sum to {total:g} %; they must sum to 100 %")
    return {region: percent / total for region, percent in percents.items()}


def _asked(request: HttpRequest) -> _Asked:
    form: QueryDict = request.POST if request.method == "POST" else request.GET

    def word(name: str, default: str = "") -> str:
        return str(form.get(name, default)).replace("\x00", "\ufffd")[:LONGEST_TEXT].strip()

    percents = {name.removeprefix(SHARE): word(name) for name in form if name.startswith(SHARE)}
    return _Asked(word("deployment"), word("origin"), percents, word("minutes", "60"), word("why"))


def _actor(request: HttpRequest) -> str:
    return request.user.get_username()[:64]
