"""Pages on which users add, list and remove their second factors. A secret is shown only once."""

from django.contrib.auth.models import User
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.urls import reverse
from django.utils.http import url_has_allowed_host_and_scheme
from django.utils.safestring import mark_safe
from django.views.decorators.cache import never_cache
from django.views.decorators.debug import sensitive_post_parameters
from django.views.decorators.http import require_http_methods, require_safe

from accounts import one_time_codes
from accounts.models import SecondFactor
from accounts.permissions import must_enrol, require_fresh_factor, require_fresh_login
from accounts.security_keys import CREATE, site_of
from accounts.selectors import has_second_factor
from accounts.services.login import LoginLimited
from accounts.services.second_factor import app_enrol, factor_remove, key_ceremony, key_enrol, recovery_codes_issue
from accounts.services.session import session_factor_shown, session_renew
from accounts.views import check_factor, factor_form
from controlplane.dashboard.actions import (
    SECRETS,
    Action,
    ActionPage,
    Submission,
    action,
    action_page_view,
    page_target,
)
from controlplane.dashboard.fragments import Context
from kernel import clock
from kernel.access import Role, needs

OWN = page_target("settings")
LONGEST_CREDENTIAL = 16 * 1024


@never_cache
@require_safe
@needs(Role.VIEWER)
def factors(request: HttpRequest) -> HttpResponse:
    """Lists the kinds of factors; the only page open to a user who must add one first."""
    context = {"must": must_enrol(request), "site": site_of(request)}
    return render(request, "dashboard/settings/factors_new.html", context)


@never_cache
@sensitive_post_parameters(*SECRETS)
@require_http_methods(["GET", "HEAD", "POST"])
@needs(Role.VIEWER)
def factor_confirm(request: HttpRequest) -> HttpResponse:
    """Asks for a second factor, or for another login, before actions that need a recent one."""
    wanted = request.POST.get("next") or request.GET.get("next", "")
    if not url_has_allowed_host_and_scheme(wanted, {request.get_host()}, require_https=request.is_secure()):
        wanted = reverse("settings")
    user, now = _user(request), clock.now()
    if not has_second_factor(user):
        return render(request, "dashboard/settings/factor_confirm.html", {"next": wanted})
    refused, status = "", 200
    if request.method == "POST":
        try:
            if check_factor(request, user, now):
                session_factor_shown(request=request, now=now)
                return redirect(wanted)
            refused, status = "The code is wrong, or it was used before.", 403
        except LoginLimited as limited:
            refused, status = str(limited), 429
    context = {"next": wanted, "refused": refused, "has_factor": True, **factor_form(request, user)}
    return render(request, "dashboard/settings/factor_confirm.html", context, status=status)


def _app_context(form: Submission, _: None) -> Context:
    require_fresh_login(form.request, form.now)
    user = _user(form.request)
    sealed = form.text("secret")
    secret = one_time_codes.decrypted_secret(sealed, user.pk) if one_time_codes.is_recent(sealed, form.now) else ""
    if not secret:
        secret = one_time_codes.app_secret()
        sealed = one_time_codes.encrypted_secret(secret, user.pk, form.now)
    uri = one_time_codes.provisioning_uri(secret, user.get_username(), site_of(form.request).host)
    picture = mark_safe(one_time_codes.qr_code(uri))  # noqa: S308 - generated SVG without user input
    groups = [secret[at : at + 4] for at in range(0, len(secret), 4)]
    return {"sealed": sealed, "picture": picture, "groups": groups, "name": form.text("name")}


def _add_app(form: Submission, _: None) -> HttpResponse:
    require_fresh_login(form.request, form.now)
    user = _user(form.request)
    sealed, code, name = form.text("secret"), form.text("one_time_code"), form.text("name")
    return _factor_added_response(form, user, app_enrol(user=user, sealed=sealed, code=code, name=name, now=form.now))


def _key_context(form: Submission, _: None) -> Context:
    require_fresh_login(form.request, form.now)
    site = site_of(form.request)
    if not site.has_keys:
        return {"site": site}
    ceremony = key_ceremony(user=_user(form.request), site=site, ceremony=CREATE, now=form.now)
    return {"site": site, "options": ceremony.options, "name": form.text("name")}


def _add_key(form: Submission, _: None) -> HttpResponse:
    require_fresh_login(form.request, form.now)
    user, response = _user(form.request), form.text("credential", longest=LONGEST_CREDENTIAL + 1)
    site = site_of(form.request)
    return _factor_added_response(
        form, user, key_enrol(user=user, site=site, response=response, name=form.text("name"), now=form.now)
    )


factor_app = action_page_view(
    ActionPage(
        action=Action(target=OWN, run=_add_app, role=Role.VIEWER),
        template="dashboard/settings/factor_app.html",
        context=_app_context,
    )
)
factor_key = action_page_view(
    ActionPage(
        action=Action(target=OWN, run=_add_key, role=Role.VIEWER),
        template="dashboard/settings/factor_key.html",
        context=_key_context,
    )
)


@action(OWN, Role.VIEWER)
def factor_remove_action(form: Submission, factor_id: int) -> None:
    require_fresh_factor(form.request, form.now)
    user = _user(form.request)
    factor = get_object_or_404(SecondFactor, pk=factor_id, user=user)
    factor_remove(user=user, factor_id=factor.pk, now=form.now)
    session_renew(request=form.request, user=user, has_factor=has_second_factor(user), now=form.now)


@action(OWN, Role.VIEWER)
def recovery_codes_action(form: Submission, _: None) -> HttpResponse | None:
    require_fresh_factor(form.request, form.now)
    user = _user(form.request)
    if not has_second_factor(user):
        return None
    return _codes_shown(form, recovery_codes_issue(user=user, now=form.now))


def _factor_added_response(form: Submission, user: User, codes: tuple[str, ...]) -> HttpResponse:
    session_renew(request=form.request, user=user, has_factor=True, now=form.now)
    return _codes_shown(form, codes) if codes else redirect("settings")


def _codes_shown(form: Submission, codes: tuple[str, ...]) -> HttpResponse:
    return render(form.request, "dashboard/settings/recovery_codes.html", {"codes": codes})


def _user(request: HttpRequest) -> User:
    return get_object_or_404(User, pk=request.user.pk or 0)
