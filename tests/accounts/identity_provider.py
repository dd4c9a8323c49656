"""A small OpenID provider on loopback: discovery, authorization code with PKCE, signed ID tokens, user info.

Every user is logged in immediately with `claims`; `spoil` changes the ID tokens.
"""

import base64
import hashlib
import json
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

from joserfc import jwt
from joserfc.jwk import RSAKey

CLIENT, SECRET = "switchyard", "a secret of the client"
_KEY_BITS = 2048


@cache
def signing_key(name: str) -> RSAKey:
    """The key of this id, the same in all tests: making one takes a tenth of a second."""
    return RSAKey.generate_key(_KEY_BITS, {"kid": name})


@dataclass
class IdentityProvider:
    """`claims`: those of the user who logs in. `in_id_token`: whether groups are there or in the user info only."""

    url: str
    claims: dict[str, Any] = field(default_factory=dict)
    in_id_token: bool = True
    spoil: Callable[[dict[str, Any]], dict[str, Any]] = lambda token: token
    issuer: str = ""
    key: RSAKey = field(default_factory=lambda: signing_key("first"))
    signs_with: RSAKey | None = None
    codes: dict[str, dict[str, str]] = field(default_factory=dict)

    def rotate(self) -> None:
        """Sign with another key from now on, under another id."""
        self.key = signing_key("second")

    def discovery(self) -> dict[str, Any]:
        return {
            "issuer": self.issuer or self.url,
            "authorization_endpoint": f"{self.url}/authorize",
            "token_endpoint": f"{self.url}/token",
            "userinfo_endpoint": f"{self.url}/userinfo",
            "jwks_uri": f"{self.url}/keys",
            "id_token_signing_alg_values_supported": ["RS256", "HS256", "none"],
        }

    def authorize(self, query: dict[str, str]) -> str:
        """Where the browser is sent back to."""
        assert query["client_id"] == CLIENT
        assert query["response_type"] == "code"
        assert query["code_challenge_method"] == "S256"
        code = secrets.token_urlsafe(12)
        self.codes[code] = query
        return f"{query['redirect_uri']}?{urlencode({'code': code, 'state': query['state']})}"

    def token(self, form: dict[str, str], authorization: str) -> dict[str, Any] | None:
        """Tokens for a code, once, to the client that knows its secret and the browser's verifier."""
        query = self.codes.pop(form.get("code", ""), None)
        basic = "Basic " + base64.b64encode(f"{CLIENT}:{SECRET.replace(' ', '+')}".encode()).decode()
        plain = "Basic " + base64.b64encode(f"{CLIENT}:{SECRET}".encode()).decode()
        digest = hashlib.sha256(form.get("code_verifier", "").encode()).digest()
        challenge = base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
        if query is None or authorization not in {basic, plain} or challenge != query["code_challenge"]:
            return None
        now = int(time.time())
        own = {"iss": self.url, "aud": CLIENT, "iat": now, "exp": now + 300, "nonce": query["nonce"]}
        known = self.claims if self.in_id_token else {"sub": self.claims["sub"]}
        key = self.signs_with or self.key
        signed = jwt.encode({"alg": "RS256", "kid": key.kid}, self.spoil({**own, **known}), key)
        return {"access_token": "opaque", "token_type": "Bearer", "expires_in": 300, "id_token": signed}


class _Handler(BaseHTTPRequestHandler):
    known: IdentityProvider

    def do_GET(self) -> None:
        at = urlsplit(self.path)
        if at.path == "/authorize":
            self.send_response(302)
            self.send_header("Location", self.known.authorize(_flat(at.query)))
            self.end_headers()
            return
        answers: dict[str, Callable[[], Any]] = {
            "/.well-known/openid-configuration": self.known.discovery,
            "/keys": lambda: {"keys": [self.known.key.as_dict(private=False)]},
            "/userinfo": lambda: self.known.claims,
        }
        self._answer(200, answers[at.path]())

    def do_POST(self) -> None:
        form = _flat(self.rfile.read(int(self.headers["Content-Length"])).decode())
        tokens = self.known.token(form, self.headers.get("Authorization", ""))
        self._answer(200 if tokens else 400, tokens or {"error": "invalid_grant"})

    def _answer(self, status: int, body: Any) -> None:
        encoded = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(encoded)))
        self.end_headers()
        self.wfile.write(encoded)

    def log_message(self, *_: Any) -> None:
        """Silent, because the tests report errors."""


def _flat(query: str) -> dict[str, str]:
    return {name: values[0] for name, values in parse_qs(query).items()}


@contextmanager
def identity_provider() -> Iterator[IdentityProvider]:
    """Runs a provider in a separate thread."""
    handler = type("_Own", (_Handler,), {})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    known = IdentityProvider(f"http://127.0.0.1:{server.server_address[1]}")
    handler.known = known  # type: ignore[attr-defined] # of the class that was just made
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield known
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)
