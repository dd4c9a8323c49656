"""Login by an OpenID provider: the authorization code flow with PKCE, state and nonce, by Authlib.

The provider is known by its discovery document, whose issuer must be the configured one. ID tokens are accepted only
with an asymmetric signature by the provider's current keys, for this client and this login. Nothing of a token is
stored.

The provider is that of the environment, or the one that an admin has set. An admin's may be called only at public
addresses by https, or in the networks that the installation allows to webhooks: each connection checks its address."""

import json
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from authlib.common.errors import AuthlibBaseError
from authlib.integrations.django_client import DjangoOAuth2App, OAuth
from authlib.integrations.requests_client import OAuth2Session
from django.conf import settings
from django.http import HttpRequest, HttpResponse
from joserfc.errors import JoseError
from joserfc.jwk import KeySet
from requests import RequestException, Response, Session
from requests.adapters import HTTPAdapter
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool

from accounts.services.identity_provider import provider_row, unseal_secret
from kernel.decoding import decode_json
from kernel.outbound import RefusedUrl, Target, choose_address, parse_networks, parse_url

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
    admit_all: bool = False
    is_confined: bool = False
    """Whether its addresses are checked: it was set by an admin, not by the environment."""


@dataclass(frozen=True, slots=True)
class Claims:
    issuer: str
    subject: str
    username: str
    email: str
    groups: frozenset[str]


def provider() -> Provider | None:
    """The provider of the environment, else the one that an admin has set, or None."""
    if settings.OIDC_ISSUER:
        return Provider(
            issuer=settings.OIDC_ISSUER,
            client_id=settings.OIDC_CLIENT_ID,
            client_secret=settings.OIDC_CLIENT_SECRET,
            title=settings.OIDC_TITLE,
            scopes=settings.OIDC_SCOPES,
            groups_claim=settings.OIDC_GROUPS_CLAIM,
            admit_all=settings.OIDC_ADMIT_ALL,
        )
    row = provider_row()
    if not row.issuer:
        return None
    return Provider(
        issuer=row.issuer,
        client_id=row.client_id,
        client_secret=unseal_secret(row),
        title=row.title,
        scopes=row.scopes,
        groups_claim=row.groups_claim,
        admit_all=row.admit_all,
        is_confined=True,
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


@lru_cache(maxsize=4)
def _client(known: Provider) -> Any:
    """Authlib's client. It caches the discovery document and the keys, and fetches rotated keys again."""
    return OAuth().register(
        "oidc",
        **({"client_cls": _ConfinedApp} if known.is_confined else {}),
        client_id=known.client_id,
        client_secret=known.client_secret,
        server_metadata_url=discovery_url(known.issuer),
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
        raise ValueError(f"the provider calls itself {issuer!r}; the issuer here is {known.issuer!r}")
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


def discovery_url(issuer: str) -> str:
    return issuer.rstrip("/") + "/.well-known/openid-configuration"


class _ConfinedConnection(HTTPConnection):
    """Connects only to allowed addresses: those of the name before, and that of the peer after the connection."""

    url_scheme = "http"

    def _new_conn(self) -> socket.socket:
        allowed = parse_networks(settings.WEBHOOK_NETWORKS)
        target = Target(self.url_scheme, self.host, self.port or 0, "/")
        found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        choose_address(target, [str(entry[4][0]) for entry in found], allowed)
        connected = super()._new_conn()
        try:
            choose_address(target, [str(connected.getpeername()[0])], allowed)
        except (RefusedUrl, OSError):
            connected.close()
            raise
        return connected


class _ConfinedTlsConnection(_ConfinedConnection, HTTPSConnection):
    url_scheme = "https"


class _ConfinedPool(HTTPConnectionPool):
    ConnectionCls = _ConfinedConnection


class _ConfinedTlsPool(HTTPSConnectionPool):
    ConnectionCls = _ConfinedTlsConnection


class _ConfinedAdapter(HTTPAdapter):
    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        super().init_poolmanager(*args, **kwargs)
        self.poolmanager.pool_classes_by_scheme = {"http": _ConfinedPool, "https": _ConfinedTlsPool}


def _confine(session: Session) -> None:
    """Also redirects connect through these adapters; a proxy of the environment would hide the address."""
    session.trust_env = False
    session.mount("http://", _ConfinedAdapter())
    session.mount("https://", _ConfinedAdapter())


class _ConfinedSession(OAuth2Session):  # type: ignore[misc]  # Authlib has no types
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _confine(self)


class _ConfinedApp(DjangoOAuth2App):  # type: ignore[misc]  # Authlib has no types
    client_cls = _ConfinedSession


MAX_DOCUMENT = 1 << 20
"""Bytes of a discovery document or key set; real ones have a few kilobytes."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One check of a provider. `is_fatal`: logins fail because of it."""

    text: str
    is_ok: bool
    is_fatal: bool = True


def provider_check(known: Provider) -> list[Finding]:
    """Fetches the discovery document and the keys as a login does, and checks issuer, endpoints, signatures and scopes.
    Sends no secret."""
    return list(_findings(known))


def _findings(known: Provider) -> Iterator[Finding]:
    url = discovery_url(known.issuer)
    try:
        metadata = _fetched(url, known)
    except CALLBACK_FAULTS as error:
        yield Finding(f"The discovery document {url} cannot be read: {_short(error)}", is_ok=False)
        return
    yield Finding(f"The discovery document {url} is valid JSON.", is_ok=True)
    issuer = metadata.get("issuer")
    yield Finding(f"The provider calls itself {str(issuer)[:200]!r}.", is_ok=issuer == known.issuer)
    for name in ("authorization_endpoint", "token_endpoint", "jwks_uri"):
        yield _endpoint(name, metadata.get(name), known)
    offered = set(_texts(metadata.get("id_token_signing_alg_values_supported")) or ["RS256"])
    usable = ", ".join(sorted(offered & SIGNED_BY))
    yield Finding(f"Usable signatures of ID tokens: {usable or 'none'}.", is_ok=bool(usable))
    scopes = set(_texts(metadata.get("scopes_supported")))
    if missing := sorted(set(known.scopes.split()) - scopes) if scopes else []:
        yield Finding(f"The provider does not list these scopes: {', '.join(missing)}.", is_ok=False, is_fatal=False)
    yield _keys(str(metadata.get("jwks_uri") or ""), known)


def _endpoint(name: str, url: Any, known: Provider) -> Finding:
    try:
        target = parse_url(str(url or ""))
        if target.scheme != "https" and known.is_confined and not settings.WEBHOOK_NETWORKS:
            raise RefusedUrl("must be https")
    except RefusedUrl as refusal:
        return Finding(f"{name} {refusal}.", is_ok=False)
    return Finding(f"{name} is at {target.scheme}://{target.authority[:200]}.", is_ok=True)


def _keys(url: str, known: Provider) -> Finding:
    try:
        found = KeySet.import_key_set({"keys": _key_list(_fetched(url, known))})
    except CALLBACK_FAULTS as error:
        return Finding(f"The provider's keys cannot be read: {_short(error)}", is_ok=False)
    count = len(found.keys)
    return Finding(f"The provider has {count} signing key{'' if count == 1 else 's'}.", is_ok=count > 0)


def _key_list(found: dict[str, Any]) -> list[Any]:
    keys = found.get("keys")
    if not isinstance(keys, list):
        raise ValueError("it has no list of keys")
    return keys


def _fetched(url: str, known: Provider) -> dict[str, Any]:
    """The JSON object at this URL. Raises one of CALLBACK_FAULTS."""
    with Session() as session:
        if known.is_confined:
            _confine(session)
        with session.get(url, timeout=RESPONSE_TIMEOUT_S, stream=True) as response:
            response.raise_for_status()
            found = decode_json(_body(response))
    if not isinstance(found, dict):
        raise ValueError("it is not a JSON object")
    return found


def _body(response: Response) -> bytes:
    body, ends_at_s = b"", time.monotonic() + RESPONSE_TIMEOUT_S
    while piece := response.raw.read1(MAX_DOCUMENT, decode_content=True):
        body += piece
        if len(body) > MAX_DOCUMENT:
            raise ValueError(f"it has more than {MAX_DOCUMENT >> 20} MiB")
        if time.monotonic() > ends_at_s:
            raise ValueError(f"it was not complete within {RESPONSE_TIMEOUT_S:g} s")
    return body


def _texts(value: Any) -> list[str]:
    return [str(one) for one in value] if isinstance(value, list) else []


def _short(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return "it is not JSON."
    return f"{str(error)[:300] or type(error).__name__}."


def _callback_reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
