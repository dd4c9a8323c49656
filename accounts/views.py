"""Login by password or identity provider, then by a second factor if the user has one. Passwords are checked before the
view (accounts.middleware)."""

import logging
import math
import secrets
from dataclasses import astuple, dataclass
from datetime import datetime, timedelta
from typing import Any

from django.conf import settings
from django.contrib.auth import login
from django.contrib.auth.forms import AuthenticationForm
from django.contrib.auth.models import User
from django.contrib.auth.signals import user_login_failed
from django.contrib.auth.views import LoginView
from django.core import signing
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render, resolve_url
from django.urls import reverse
from django.utils.crypto import constant_time_compare
from django.utils.http import url_has_allowed_host_and_scheme
from django.views.decorators.cache import never_cache
from django.views.decorators.debug import sensitive_post_parameters
from django.views.decorators.http import require_GET, require_http_methods

from accounts.models import FactorKind, name_refusal
from accounts.oidc import Claims, Provider, ProviderFault, login_begin, login_finish, provider
from accounts.security_keys import GET, site_of
from accounts.selectors import has_second_factor
from accounts.services.identity_provider import tenants_of_groups
from accounts.services.login import FactorAttempt, LoginLimited, NotAdmitted, NotMapped, identity_login
from accounts.services.second_factor import Shown, factor_check, key_ceremony
from accounts.services.session import FACTOR, METHOD, TenantLogin, tenant_session_begin
from kernel import clock

REMEMBERED = timedelta(days=180)
_SALT = "accounts.device"


def device_of(request: HttpRequest, username: str) -> str:
    """Returns the number of a browser that has logged in as this user, or ""."""
    try:
        name, number = signing.loads(
            request.COOKIES.get(settings.DEVICE_COOKIE_NAME, ""), salt=_SALT, max_age=REMEMBERED
        )
    except (signing.BadSignature, ValueError, TypeError):
        return ""
    return str(number) if name == username.casefold() else ""


def device_remember(response: HttpResponse, username: str) -> None:
    response.set_cookie(
        settings.DEVICE_COOKIE_NAME,
        signing.dumps([username.casefold(), secrets.token_hex(16)], salt=_SALT),
        max_age=REMEMBERED,
        httponly=True,
        samesite="Lax",
        secure=settings.SESSION_COOKIE_SECURE,
    )


NEXT = "_oidc_next"

log = logging.getLogger(__name__)


class CheckedForm(AuthenticationForm):
    """The login form. The password was checked before the view's transaction."""

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
        user = form.get_user()
        assert isinstance(user, User)  # noqa: S101 - it was found by its name and password
        return admit(self.request, user, "password", self.get_success_url())


def admit(request: HttpRequest, user: User, method: str, wanted: str) -> HttpResponse:
    """Log in a user who was authenticated by `method`, or first ask for the second factor."""
    if has_second_factor(user):
        response = redirect("login-second")
        pending_begin(response, user, method, wanted, clock.now())
        return response
    return _log_in(request, user, method, wanted)


@never_cache
@sensitive_post_parameters("one_time_code", "credential")
@require_http_methods(["GET", "HEAD", "POST"])
def login_second(request: HttpRequest) -> HttpResponse:
    """The form of the second factor after a right password; without that, back to the login."""
    now = clock.now()
    pending = pending_of(request, now)
    if pending is None or not has_second_factor(pending[0]):
        return redirect("login")
    user, login = pending
    refused = ""
    if request.method == "POST":
        try:
            if check_factor(request, user, now):
                request.session[FACTOR] = True
                response = _log_in(request, user, login.method, login.wanted)
                pending_end(response)
                return response
            user_login_failed.send(
                __name__, credentials={"username": user.get_username(), "second_factor": True}, request=request
            )
            refused = "That is wrong, or it was used before."
        except LoginLimited as limited:
            return _limited(request, limited)
    return render(request, "accounts/second_factor.html", {"refused": refused, **factor_form(request, user)})


def check_factor(request: HttpRequest, user: User, now: datetime) -> bool:
    """Whether the form has a valid second factor of the user. Raises LoginLimited after too many wrong attempts."""
    shown = Shown(request.POST.get("one_time_code", ""), request.POST.get("credential", ""))
    attempt = FactorAttempt(user.pk, device_of(request, user.get_username()))
    return factor_check(user=user, site=site_of(request), shown=shown, attempt=attempt, now=now)


def factor_form(request: HttpRequest, user: User) -> dict[str, Any]:
    kinds = set(user.second_factors.values_list("kind", flat=True))
    site = site_of(request)
    options = ""
    if FactorKind.KEY in kinds and site.has_keys:
        options = key_ceremony(user=user, site=site, ceremony=GET, now=clock.now()).options
    return {"has_app": FactorKind.APP in kinds, "has_key": FactorKind.KEY in kinds, "key_options": options}


def _log_in(request: HttpRequest, user: User, method: str, wanted: str) -> HttpResponse:
    request.session[METHOD] = method
    login(request, user, backend="django.contrib.auth.backends.ModelBackend")
    response = redirect(wanted or resolve_url(settings.LOGIN_REDIRECT_URL))
    if method == "password":
        device_remember(response, user.get_username())
    return response


def _limited(request: HttpRequest, limited: LoginLimited) -> HttpResponse:
    context = {"refused": str(limited), "wait_min": math.ceil(limited.wait_s / 60)}
    response = render(request, "accounts/refused.html", context, status=429)
    response.headers["Retry-After"] = str(math.ceil(limited.wait_s))
    return response


@never_cache
@require_GET
def oidc_begin(request: HttpRequest) -> HttpResponse:
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
    """The redirect from the provider: logs in, or shows the error page."""
    known = _provider()
    now = clock.now()
    try:
        claims = login_finish(request, known)
        tenants = tenants_of_groups(claims.groups)
        try:
            user = identity_login(claims=claims, admit_all=known.admit_all and not tenants, now=now)
        except NotMapped:
            if not tenants:
                raise
            login = TenantLogin(claims.issuer, _shown_name(claims), tuple(tenants), now.timestamp())
            tenant_session_begin(request=request, login=login, tenants=sorted(set(tenants.values())), now=now)
            return redirect("tenant")
    except ProviderFault as fault:
        return _refused(request, known, fault)
    except NotAdmitted as refused:
        return render(request, "accounts/refused.html", {"refused": str(refused)}, status=403)
    wanted = request.session.pop(NEXT, "")
    return admit(request, user, "oidc", wanted)


def _shown_name(claims: Claims) -> str:
    """A name from the provider, unless it could be mistaken for the fleet's own or has unusual characters."""
    return claims.username if not name_refusal(claims.username) else "a user"


def _provider() -> Provider:
    known = provider()
    if known is None:
        raise Http404("No identity provider is configured.")
    return known


def _is_ours(request: HttpRequest, url: str) -> bool:
    return url_has_allowed_host_and_scheme(url, {request.get_host()}, require_https=request.is_secure())


def _refused(request: HttpRequest, known: Provider, fault: ProviderFault) -> HttpResponse:
    log.warning("login by %s failed: %s", known.issuer, fault)
    message = f"{known.title} did not confirm your login. Try again; the log of Switchyard has details."
    return render(request, "accounts/refused.html", {"refused": message}, status=502)


# A login with a right password whose second factor is still missing, in a signed cookie for that page alone. It is not
# a session; it ends after five minutes or with a new password.

PENDING_LASTS_S = 300
_COOKIE_SALT = "accounts.pending_login"


@dataclass(frozen=True, slots=True)
class PendingLogin:
    """`proof`: of the right password. `method`: of the login, as sessions name it. `wanted`: the page after the
    login."""

    user_id: int
    proof: str
    method: str
    wanted: str
    began_s: float


def pending_begin(response: HttpResponse, user: User, method: str, wanted: str, now: datetime) -> None:
    pending = PendingLogin(user.pk, user.get_session_auth_hash(), method, wanted, now.timestamp())
    response.set_cookie(
        settings.PENDING_COOKIE_NAME,
        signing.dumps(astuple(pending), salt=_COOKIE_SALT),
        max_age=PENDING_LASTS_S,
        path=reverse("login-second"),
        httponly=True,
        samesite="Lax",
        secure=settings.SESSION_COOKIE_SECURE,
    )


def pending_end(response: HttpResponse) -> None:
    response.delete_cookie(settings.PENDING_COOKIE_NAME, path=reverse("login-second"), samesite="Lax")


def pending_of(request: HttpRequest, now: datetime) -> tuple[User, PendingLogin] | None:
    """Returns the user whose password was right in this browser moments ago, or None."""
    try:
        pending = PendingLogin(*signing.loads(request.COOKIES.get(settings.PENDING_COOKIE_NAME, ""), salt=_COOKIE_SALT))
    except (signing.BadSignature, ValueError, TypeError):
        return None
    user = User.objects.filter(pk=pending.user_id, is_active=True).first()
    if user is None or not 0 <= now.timestamp() - pending.began_s <= PENDING_LASTS_S:
        return None
    return (user, pending) if constant_time_compare(user.get_session_auth_hash(), pending.proof) else None
