"""Authentication by bearer tokens, and rules about accounts that depend on the caller, for the API and the pages."""

from datetime import datetime, timedelta

from django.conf import settings
from django.contrib.auth.models import AbstractBaseUser, User
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest
from rest_framework.authentication import BaseAuthentication, get_authorization_header
from rest_framework.exceptions import AuthenticationFailed
from rest_framework.request import Request

from accounts.models import ApiToken, Approval, LoginSession, ServiceAccount
from accounts.selectors import has_second_factor, token_by_text
from accounts.services.session import BEGAN, FACTOR
from accounts.services.token import token_used
from kernel import clock
from kernel.access import Role, access_of, require
from kernel.refusals import InvalidInput

FRESH = timedelta(minutes=10)
"""Maximum age of a second factor that counts as fresh."""


class FactorNeeded(PermissionDenied):
    """The request needs a fresh second factor; pages ask for one."""


def require_human(request: HttpRequest | Request) -> None:
    """Only people may approve. Raises PermissionDenied if the caller is a service account."""
    if ServiceAccount.objects.filter(user_id=request.user.pk or 0).exists():
        raise PermissionDenied("A service account cannot approve; a person must.")


def require_may_reject(request: HttpRequest | Request, approval: Approval) -> None:
    """The requester may withdraw; only admins may reject. Raises PermissionDenied otherwise."""
    if approval.requested_by != request.user.get_username()[:64]:
        require(request, Role.ADMIN)


def require_fresh_factor(request: HttpRequest | Request, now: datetime) -> None:
    """Requires a second factor shown within `FRESH` from users who have one. Requests with tokens never have one.
    Raises FactorNeeded without a fresh second factor."""
    if has_second_factor(request.user) and not _is_factor_fresh(request, now):
        raise FactorNeeded("This takes a second factor shown in this browser within the last 10 minutes.")


def require_fresh_login(request: HttpRequest, now: datetime) -> None:
    """Requires a fresh second factor to change second factors, and a login within `FRESH` to add the first one. Raises
    FactorNeeded otherwise."""
    require_fresh_factor(request, now)
    began_s = float(request.session.get(BEGAN, 0.0))
    if not has_second_factor(request.user) and now.timestamp() - began_s > FRESH.total_seconds():
        raise FactorNeeded("This takes a login within the last 10 minutes.")


def must_enrol(request: HttpRequest) -> bool:
    """Whether this user has to add a second factor first (settings.REQUIRE_SECOND_FACTOR). Users without a password are
    exempt, because their identity provider authenticates them."""
    user, rule = request.user, settings.REQUIRE_SECOND_FACTOR
    if rule == "off" or not isinstance(user, User) or request.session.get(FACTOR) or not user.has_usable_password():
        return False
    return (rule == "all" or access_of(request).administer) and not has_second_factor(user)


def _is_factor_fresh(request: HttpRequest | Request, now: datetime) -> bool:
    if getattr(request, "auth", None) is not None:
        return False
    sessions = LoginSession.objects.filter(session_key=request.session.session_key or "", user_id=request.user.pk or 0)
    return sessions.filter(factor_at__gt=now - FRESH).exists()


def token_owner(request: HttpRequest | Request, service_account: str) -> User:
    """Returns the user of a new token: the caller, or a service account, which requires an admin. Raises
    PermissionDenied if a service account was named by another user. Raises InvalidInput if there is no such service
    account."""
    if not service_account:
        return User.objects.get(pk=request.user.pk or 0)
    require(request, Role.ADMIN)
    account = ServiceAccount.objects.select_related("user").filter(user__username=service_account).first()
    if account is None:
        message = f"there is no service account {service_account!r}"
        raise InvalidInput(field="service_account", rule="exists", message=message)
    return account.user


SCHEME = "Bearer"
FORM = "Authorization must read 'Bearer sw_<prefix>_<secret>'"


class BearerTokenAuthentication(BaseAuthentication):
    """Authenticates as the user of an API token; `request.auth` is the token."""

    def authenticate(self, request: Request) -> tuple[AbstractBaseUser, ApiToken] | None:
        """The token's user and the token, or None if the request shows no bearer token. Raises AuthenticationFailed for
        a malformed, unknown, revoked or expired token, or a deactivated user (401)."""
        scheme, _, text = get_authorization_header(request).decode("latin-1").partition(" ")
        if scheme.casefold() != SCHEME.casefold():
            return None
        text = text.strip()
        if not text or " " in text:
            raise AuthenticationFailed(FORM)
        token = token_by_text(text)
        if token is None:
            raise AuthenticationFailed(f"unknown API token; {FORM} with the text shown when it was created")
        now = clock.now()
        refusal = token.refusal(now)
        if refusal is not None:
            raise AuthenticationFailed(refusal)
        token_used(token=token, now=now)
        return token.user, token

    def authenticate_header(self, request: Request) -> str:
        """Makes DRF answer 401 with `WWW-Authenticate: Bearer` instead of 403."""
        return SCHEME
