"""Login by an OpenID provider: the authorization code flow with PKCE, state and nonce, by Authlib.

The provider is known by its discovery document, whose issuer must be the configured one. ID tokens are accepted only
with an asymmetric signature by the provider's current keys, for this client and this login. Nothing of a token is
stored."""

from dataclasses import dataclass
from functools import cache
from typing import Any

from authlib.common.errors import AuthlibBaseError
from authlib.integrations.django_client import OAuth
from django.conf import settings
from django.http import HttpRequest, HttpResponse
from joserfc.errors import JoseError
from requests import RequestException

RESPONSE_TIMEOUT_S = 5.0
"""A reachable provider answers in tens of milliseconds, and a user waits for it."""
LEEWAY_S = 60
"""How far the provider's clock may be off."""
SIGNED_BY = frozenset({"RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"})
CALLBACK_FAULTS = (AuthlibBaseError, JoseError, RequestException, RuntimeError, ValueError, KeyError, TypeError)
"""Errors of a provider that is unreachable, refuses or sends an invalid answer."""


class ProviderFault(Exception):
    """The login failed; the text has the reason, for the log."""


@dataclass(frozen=True, slots=True)
class Provider:
    issuer: str
    client_id: str
    client_secret: str
    title: str
    scopes: str
    groups_claim: str


@dataclass(frozen=True, slots=True)
class Claims:
    issuer: str
    subject: str
    username: str
    email: str
    groups: frozenset[str]


def provider() -> Provider | None:
    """The provider in the settings, or None."""
    if not settings.OIDC_ISSUER:
        return None
    return Provider(
        issuer=settings.OIDC_ISSUER,
        client_id=settings.OIDC_CLIENT_ID,
        client_secret=settings.OIDC_CLIENT_SECRET,
        title=settings.OIDC_TITLE,
        scopes=settings.OIDC_SCOPES,
        groups_claim=settings.OIDC_GROUPS_CLAIM,
    )


def login_begin(request: HttpRequest, known: Provider, back: str) -> HttpResponse:
    """Redirect the browser to the provider, which sends it back to the absolute URL `back`. Raises ProviderFault if the
    provider cannot be reached or is not the configured one."""
    try:
        client = _client(known)
        _check_issuer(client, known)
        response: HttpResponse = client.authorize_redirect(request, back)
    except CALLBACK_FAULTS as error:
        raise ProviderFault(_callback_reason(error)) from error
    return response


def login_finish(request: HttpRequest, known: Provider) -> Claims:
    """Returns the user whom the provider sent back. Raises ProviderFault if this browser started no such login, the
    provider refused it, or its token is invalid."""
    try:
        client = _client(known)
        _check_issuer(client, known)
        options = {
            "iss": {"essential": True, "values": [known.issuer]},
            "aud": {"essential": True, "values": [known.client_id]},
        }
        token = client.authorize_access_token(request, claims_options=options, leeway=LEEWAY_S)
        return _claims(client, known, token)
    except CALLBACK_FAULTS as error:
        raise ProviderFault(_callback_reason(error)) from error


@cache
def _client(known: Provider) -> Any:
    """Authlib's client. It caches the discovery document and the keys, and fetches rotated keys again."""
    return OAuth().register(
        "oidc",
        client_id=known.client_id,
        client_secret=known.client_secret,
        server_metadata_url=known.issuer.rstrip("/") + "/.well-known/openid-configuration",
        client_kwargs={
            "scope": known.scopes,
            "code_challenge_method": "S256",
            "default_timeout": RESPONSE_TIMEOUT_S,
        },
    )


def _check_issuer(client: Any, known: Provider) -> None:
    metadata = client.load_server_metadata()
    if metadata.get("issuer") != known.issuer:
        issuer = metadata.get("issuer")
        _client.cache_clear()
        raise ValueError(f"the provider calls itself {issuer!r}; SWITCHYARD_OIDC_ISSUER is {known.issuer!r}")
    offered = set(metadata.get("id_token_signing_alg_values_supported") or ["RS256"])
    metadata["id_token_signing_alg_values_supported"] = sorted(offered & SIGNED_BY)


def _claims(client: Any, known: Provider, token: dict[str, Any]) -> Claims:
    userinfo = token.get("userinfo")
    if userinfo is None:
        raise ValueError("the provider sent no ID token; does it know the scope openid?")
    if known.groups_claim not in userinfo and "userinfo_endpoint" in client.server_metadata:
        more = client.userinfo(token=token)
        if more.get("sub") != userinfo["sub"]:
            raise ValueError("the provider's user info is about another user than its ID token")
        userinfo = {**more, **userinfo}
    email = str(userinfo.get("email") or "")
    groups = userinfo.get(known.groups_claim) or ()
    return Claims(
        issuer=known.issuer,
        subject=str(userinfo["sub"])[:255],
        username=str(userinfo.get("preferred_username") or email or userinfo["sub"]),
        email=email,
        groups=frozenset([groups] if isinstance(groups, str) else map(str, groups)),
    )


def _callback_reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
