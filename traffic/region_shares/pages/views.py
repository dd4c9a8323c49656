"""Views of the traffic pages: shares, overrides, ingresses and tables, and the forms that evacuate a region or fix
shares after a preview."""

from collections.abc import Callable
from dataclasses import replace

from django.shortcuts import get_object_or_404
from django.urls import reverse

from accounts.models import Approval
from controlplane.dashboard.actions import (
    REQUIRED_WHY,
    Action,
    ActionPage,
    Field,
    Submission,
    Target,
    action_page_view,
    action_view,
    page_target,
    refuse_newer,
)
from controlplane.dashboard.events import marked
from controlplane.dashboard.fragments import Context, Fragment, Page, PageRequest
from controlplane.stored_what_ifs import WhatIfPanel, what_if_panel
from controlplane.stress import what_if
from fleet.deployments.models import Deployment
from fleet.regions.models import Region
from kernel.refusals import InvalidInput
from traffic.region_shares.models import TrafficOverride
from traffic.region_shares.pages.data import (
    OVERRIDE_LIST,
    SHIFT_LIST,
    SharesForm,
    effect_tables,
    matrix_tables,
    share_charts,
    shares_form,
)
from traffic.region_shares.planning.policy import EvacuationMode
from traffic.region_shares.selectors.traffic import evacuation_of, override_effects, shares_fixed
from traffic.region_shares.services.overrides import (
    Terms,
    describe_override,
    evacuation_override,
    evacuation_request,
    override_end,
    shares_override,
    shares_request,
)
from traffic.routing.pages import (
    CERTIFICATE_LIST,
    INGRESS_LIST,
    TABLE_LIST,
    entry_rows,
)

PREVIEWED_S = 3600
"""A prediction does not depend on the override's duration."""
MAX_MINUTES_DIGITS = 6
SHARE = "share-"
"""Field names have this prefix before the region; the value is its share in per cent."""


def _fragment(name: str, title: str, template: str, load: Callable[[PageRequest], object]) -> Fragment:
    return Fragment(name, title, ("traffic",), template, load)


TRAFFIC = Page(
    section="traffic",
    title="Traffic",
    charts=True,
    fragments=(
        _fragment("shares", "Shares by region", "traffic/region_shares/shares.html", lambda _: matrix_tables()),
        _fragment(
            "overrides",
            "Overrides in force",
            "traffic/region_shares/overrides.html",
            OVERRIDE_LIST.page,
        ),
        _fragment(
            "history",
            "Shares over time",
            "dashboard/charts/several.html",
            lambda request: marked(share_charts(request.now)),
        ),
        _fragment("entry", "Entry of all clients", "traffic/routing/entry.html", lambda _: entry_rows()),
        _fragment(
            "ingresses",
            "Ingresses",
            "traffic/routing/ingresses.html",
            INGRESS_LIST.page,
        ),
        _fragment(
            "certificates", "Certificates for applications", "traffic/routing/certificates.html", CERTIFICATE_LIST.page
        ),
        _fragment("shifts", "Changes of shares", "traffic/region_shares/shifts.html", SHIFT_LIST.page),
        _fragment("tables", "Published routing tables", "traffic/routing/tables.html", TABLE_LIST.page),
    ),
    lists=(OVERRIDE_LIST, INGRESS_LIST, CERTIFICATE_LIST, SHIFT_LIST, TABLE_LIST),
)


def _what_if(request: PageRequest) -> WhatIfPanel:
    return what_if_panel(
        request.filters,
        name="present",
        user=request.caller.user.get_username(),
        now=request.now,
        compute=lambda question, has_time: what_if(question, now=request.now, has_time=has_time),
    )


WHAT_IF = Page(
    section="what-if",
    title="What if",
    # Without topics: the numbers change only with the form.
    fragments=(
        Fragment(
            "what-if",
            "",
            (),
            "traffic/region_shares/what_if.html",
            _what_if,
        ),
    ),
)


def _override_terms(form: Submission) -> Terms:
    minutes = form.text("minutes")
    is_number = minutes.isdecimal() and len(minutes) <= MAX_MINUTES_DIGITS
    return Terms(60 * int(minutes) if is_number else 0, form.text("why"), form.actor, form.now)


def _preview_terms(form: Submission) -> Terms:
    return Terms(PREVIEWED_S, "preview", form.actor, form.now)


def _terms_fields(form: Submission) -> tuple[Field, ...]:
    minutes = form.text("minutes", "60")
    return (
        Field("minutes", "Expires after, minutes", "number", minutes, required=True, least=1, most=10080),
        replace(REQUIRED_WHY, value=form.text("why")),
    )


def _start_evacuation(form: Submission, region: Region) -> TrafficOverride | Approval:
    if (begun := evacuation_of(region.name, form.text("deployment"), form.now)) is not None:
        whose = form.text("deployment") or "all deployments"
        sent = f"mode {form.text('mode', EvacuationMode.DRILL.value)}, {whose}, for {form.text('minutes')} minutes"
        refuse_newer(form, begun.created_at, f"{describe_override(begun)} was begun by {begun.actor}", sent)
    return evacuation_request(
        region=region.name,
        mode=form.text("mode", EvacuationMode.DRILL.value),
        deployment=form.text("deployment"),
        confirm=form.text("confirm"),
        terms=_override_terms(form),
    )


def _evacuation_form(form: Submission, region: Region) -> Context:
    return {
        "region": region.name,
        "mode": form.text("mode", EvacuationMode.DRILL.value),
        "deployment": form.text("deployment"),
        "deployments": Deployment.objects.values_list("name", flat=True),
    }


def _evacuation_effect(form: Submission, region: Region) -> Context:
    mode, deployment = form.text("mode", EvacuationMode.DRILL.value), form.text("deployment")
    terms = _preview_terms(form)
    order = evacuation_override(region=region.name, mode=mode, deployment=deployment, terms=terms)
    hidden = (
        Field("mode", kind="hidden", value=mode),
        Field("deployment", kind="hidden", value=deployment),
        Field("opened", kind="hidden", value=form.now.isoformat()),
    )
    url = reverse("evacuate", args=(region.name,))
    confirmation = EVACUATE.confirmation(region, url, "", (*hidden, *_terms_fields(form)))
    if mode != EvacuationMode.REAL:
        confirmation = replace(confirmation, submit="Start the drill")
    return {"tables": effect_tables(override_effects(order, terms.now)), "confirmation": confirmation}


EVACUATE = Action(
    target=Target(
        noun="region",
        find=lambda region: get_object_or_404(Region, name=region),
        name=lambda region: region.name,
        url=lambda region: reverse("traffic"),
        action_url=lambda region, name: reverse(name, args=(region.name,)),
    ),
    name="evacuate",
    label="Evacuate",
    run=_start_evacuation,
    typed=lambda region: region.name,
)
evacuate_page = action_page_view(
    ActionPage(
        action=EVACUATE,
        template="traffic/region_shares/evacuate.html",
        context=_evacuation_form,
        predict=_evacuation_effect,
        deployment=lambda form: form.text("deployment"),
    )
)


def _shares_form(form: Submission) -> SharesForm:
    percents = {name.removeprefix(SHARE): form.text(name) for name in form.fields if name.startswith(SHARE)}
    return shares_form(form.text("deployment"), form.text("origin"), percents)


def _share_fractions(shares: SharesForm) -> dict[str, float]:
    percents: dict[str, float] = {}
    for field in shares.fields:
        try:
            percents[field.region] = float(field.percent or 0)
        except ValueError:
            message = f"the share of {field.region} is {field.percent!r}, which is not a number"
            raise InvalidInput(field="shares", rule="number", message=message) from None
    total = sum(percents.values())
    if not abs(total - 100) <= 0.1:
        raise InvalidInput(field="shares", rule="sum", message=f"the shares sum to {total:g} %; they must sum to 100 %")
    return {region: percent / total for region, percent in percents.items()}


def _fix_shares(form: Submission, thing: None) -> object:
    shares = _shares_form(form)
    if fixed := shares_fixed(shares.deployment, shares.origin, form.now):
        sent = ", ".join(f"{field.region} {field.percent} %" for field in shares.fields)
        refuse_newer(form, fixed.created_at, f"{describe_override(fixed)} were begun by {fixed.actor}", sent)
    return shares_request(
        deployment=shares.deployment, origin=shares.origin, shares=_share_fractions(shares), terms=_override_terms(form)
    )


def _shares_effect(form: Submission, thing: None) -> Context:
    shares = _shares_form(form)
    if not shares.fields:
        return {}
    terms = _preview_terms(form)
    order = shares_override(
        deployment=shares.deployment, origin=shares.origin, shares=_share_fractions(shares), terms=terms
    )
    hidden = (
        Field("deployment", kind="hidden", value=shares.deployment),
        Field("origin", kind="hidden", value=shares.origin),
        Field("opened", kind="hidden", value=form.now.isoformat()),
        *(Field(f"{SHARE}{field.region}", kind="hidden", value=field.percent) for field in shares.fields),
    )
    confirmation = FIX_SHARES.confirmation(None, reverse("traffic-shares"), "", (*hidden, *_terms_fields(form)))
    return {"tables": effect_tables(override_effects(order, terms.now)), "confirmation": confirmation}


TRAFFIC_PAGE: Target[None] = page_target("traffic", "traffic")
FIX_SHARES = Action(target=TRAFFIC_PAGE, name="fix", label="Fix shares", submit="Fix these shares", run=_fix_shares)
traffic_shares_page = action_page_view(
    ActionPage(
        action=FIX_SHARES,
        template="traffic/region_shares/fix_shares.html",
        context=lambda form, thing: {"shares": _shares_form(form)},
        predict=_shares_effect,
        deployment=lambda form: form.text("deployment"),
    )
)


def _end_override(form: Submission, override: TrafficOverride) -> None:
    override_end(override_id=override.pk, actor=form.actor, now=form.now)


override_end_action = action_view(
    Action(
        target=Target(
            noun="override",
            find=lambda override_id: get_object_or_404(TrafficOverride, pk=override_id),
            name=lambda override: "traffic",
            url=lambda override: reverse("traffic"),
            deployment=lambda override: override.deployment_id or "",
        ),
        name="end",
        run=_end_override,
    )
)
