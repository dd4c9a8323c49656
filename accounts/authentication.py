"""Bearer tokens for the REST API: `Authorization: Bearer sw_<prefix>_<secret>`.

Without that header it leaves the request to the next method (sessions); with a bad one it says what is wrong.
"""

from django.contrib.auth.models import AbstractBaseUser
from rest_framework.authentication import BaseAuthentication, get_authorization_header
from rest_framework.exceptions import AuthenticationFailed
from rest_framework.request import Request

from accounts.models import ApiToken
from accounts.selectors import token_by_text
from accounts.services.token import token_used
from kernel import clock

SCHEME = "Bearer"
FORM = "Authorization must read 'Bearer sw_<prefix>_<secret>'"


class BearerTokenAuthentication(BaseAuthentication):
    """Authenticates as the user of an API token; `request.auth` is the token."""

    def authenticate(self, request: Request) -> tuple[AbstractBaseUser, ApiToken] | None:
        """The token's user and the token, or None if the request shows no bearer token.

        Raises:
            AuthenticationFailed: malformed, unknown, revoked or expired token, or a deactivated user (401).
        """
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
