"""Login by password or by the identity provider. Passwords were checked before (accounts.middleware)."""

import logging
from typing import Any

from django.conf import settings
from django.contrib.auth import login
from django.contrib.auth.forms import AuthenticationForm
from django.contrib.auth.views import LoginView
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render, resolve_url
from django.urls import reverse
from django.utils.http import url_has_allowed_host_and_scheme
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_GET

from accounts.devices import device_remember
from accounts.oidc import Provider, ProviderFault, login_begin, login_finish, provider
from accounts.services.login import NotAdmitted, identity_login
from accounts.services.session import METHOD
from kernel import clock

NEXT = "_oidc_next"

log = logging.getLogger(__name__)


class CheckedForm(AuthenticationForm):
    """The login's form; who it is was found out before the view's transaction."""

    def clean(self) -> dict[str, Any]:
        self.user_cache = getattr(self.request, "password_user", None)
        if self.user_cache is None:
            raise self.get_invalid_login_error()
        return self.cleaned_data


class Login(LoginView):
    template_name = "accounts/login.html"
    form_class = CheckedForm
    redirect_authenticated_user = True

    def get_context_data(self, **kwargs: Any) -> dict[str, Any]:
        return {**super().get_context_data(**kwargs), "provider": provider()}

    def form_valid(self, form: AuthenticationForm) -> HttpResponse:
        response = super().form_valid(form)
        device_remember(response, form.get_user().get_username())
        return response


@never_cache
@require_GET
def oidc_begin(request: HttpRequest) -> HttpResponse:
    """Off to the identity provider."""
    known = _provider()
    wanted = request.GET.get("next", "")
    request.session[NEXT] = wanted if _is_ours(request, wanted) else ""
    try:
        return login_begin(request, known, request.build_absolute_uri(reverse("oidc-back")))
    except ProviderFault as fault:
        return _refused(request, known, fault)


@never_cache
@require_GET
def oidc_back(request: HttpRequest) -> HttpResponse:
    """Back from it: logged in, or the error page."""
    known = _provider()
    try:
        claims = login_finish(request, known)
        user = identity_login(claims=claims, admit_all=settings.OIDC_ADMIT_ALL, now=clock.now())
    except ProviderFault as fault:
        return _refused(request, known, fault)
    except NotAdmitted as refused:
        return render(request, "accounts/refused.html", {"refused": str(refused)}, status=403)
    wanted = request.session.pop(NEXT, "")
    request.session[METHOD] = "oidc"
    login(request, user, backend="django.contrib.auth.backends.ModelBackend")
    return redirect(wanted or resolve_url(settings.LOGIN_REDIRECT_URL))


def _provider() -> Provider:
    known = provider()
    if known is None:
        raise Http404("No identity provider is configured.")
    return known


def _is_ours(request: HttpRequest, url: str) -> bool:
    return url_has_allowed_host_and_scheme(url, {request.get_host()}, require_https=request.is_secure())


def _refused(request: HttpRequest, known: Provider, fault: ProviderFault) -> HttpResponse:
    log.warning("login by %s failed: %s", known.issuer, fault)
    message = f"{known.title} did not vouch for you. Try again; the log of Switchyard says more."
    return render(request, "accounts/refused.html", {"refused": message}, status=502)
