"""Single sign-on in the settings: which provider is in force and why, its mapping, a test that fetches its discovery
document and keys, and its removal. The form is a wizard (`controlplane.dashboard.settings.wizards`)."""

from dataclasses import dataclass

from django.conf import settings
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render

from accounts.models import GroupRole, IdentityProvider
from accounts.oidc import Finding, Provider, provider, provider_check
from accounts.permissions import require_fresh_factor
from accounts.services.account_change import account_change
from accounts.services.identity_provider import provider_row, unseal_secret
from controlplane.dashboard.actions import Submission, action, page_target
from kernel.access import Role
from kernel.events import event_record
from kernel.outbound import RefusedUrl, check_url, parse_networks
from kernel.outside_transaction import run_outside_transaction

GROUPS_SHOWN = 200


@dataclass(frozen=True, slots=True)
class SignOnView:
    """`in_force`: the provider that logins use; `by_environment`: it is that of the environment, and `stored` has no
    effect. `has_secret`: a readable client secret is stored; `is_unreadable`: it was stored with another key."""

    in_force: Provider | None
    stored: IdentityProvider
    by_environment: bool
    has_secret: bool
    is_unreadable: bool
    groups: tuple[GroupRole, ...]

    @property
    def tenants(self) -> list[tuple[str, str]]:
        return sorted(self.stored.tenants.items())


def sign_on_view() -> SignOnView:
    row = provider_row()
    groups = GroupRole.objects.select_related("group").exclude(claim="").order_by("group__name")[:GROUPS_SHOWN]
    has_secret = bool(unseal_secret(row)) if row.sealed_secret else False
    return SignOnView(
        in_force=provider(),
        stored=row,
        by_environment=bool(settings.OIDC_ISSUER),
        has_secret=has_secret,
        is_unreadable=bool(row.sealed_secret) and not has_secret,
        groups=tuple(groups),
    )


PAGE = page_target("settings-single-sign-on")


@action(PAGE, Role.ADMIN)
def identity_provider_try(form: Submission, _: None) -> HttpResponse:
    """Fetches the discovery document and keys of the typed provider, or without one of the provider in force."""
    known = _typed_provider(form) if "issuer" in form.fields else provider()
    if known is None or not known.issuer:
        return tested(form.request, [Finding("There is no issuer yet.", is_ok=False)], PAGE.url(None))
    if known.is_confined:
        try:
            check_url(known.issuer, parse_networks(settings.WEBHOOK_NETWORKS))
        except RefusedUrl as refusal:
            return tested(form.request, [Finding(f"The issuer {refusal}.", is_ok=False)], PAGE.url(None))
    _record_test(form, known)
    findings = run_outside_transaction(("identity provider", known), lambda: provider_check(known))
    return tested(form.request, findings, PAGE.url(None))


def _record_test(form: Submission, known: Provider) -> None:
    message = f"identity provider {known.issuer[:200]} tested by {form.actor}"
    event_record(kind="identity_provider.tested", message=message, now=form.now, actor=form.actor)


def _typed_provider(form: Submission) -> Provider:
    """Without a secret: a test sends none."""
    return Provider(
        issuer=form.text("issuer"),
        client_id=form.text("client_id"),
        client_secret="",
        title="",
        scopes=form.text("scopes"),
        groups_claim=form.text("groups_claim"),
        is_confined=True,
    )


@action(PAGE, Role.ADMIN)
def identity_provider_remove(form: Submission, _: None) -> object:
    require_fresh_factor(form.request, form.now)
    return account_change("remove identity provider", actor=form.actor, now=form.now)


def tested(request: HttpRequest, findings: list[Finding], back: str) -> HttpResponse:
    """The findings of a test: a part of the form, or a page without scripts."""
    name = "tested" if "HX-Request" in request.headers else "tested_page"
    context = {"findings": findings, "is_ok": all(one.is_ok or not one.is_fatal for one in findings), "back": back}
    return render(request, f"dashboard/wizards/{name}.html", context)
