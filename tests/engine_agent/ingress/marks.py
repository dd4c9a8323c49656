"""Hop marks, as an ingress makes them, for tests of their proof."""

import hashlib
import hmac
import time
from urllib.parse import quote

REQUEST_ID = "request-1"
PATH = "/v1/chat/completions"


def marked(
    secret: str,
    region: str = "us-west-2",
    *,
    age_s: int = 0,
    request_id: str = REQUEST_ID,
    body: bytes = b'{"model": "demo"}',
    method: str = "POST",
    path: str = PATH,
    tenant: str = "",
    priority: str = "",
    pool: str = "",
) -> dict[str, str]:
    """The headers of a request from a region's ingress, signed with this secret."""
    digest = hashlib.sha256(body).hexdigest().upper()
    claim = f"{region}|{int(time.time()) - age_s}|{digest}"
    request = "|".join([claim, request_id, method, quote(tenant, safe=""), priority, pool, path])
    proof = hmac.new(secret.encode(), request.encode(), hashlib.sha256).hexdigest().upper()
    own = {"X-Switchyard-Tenant": tenant, "X-Switchyard-Class": priority, "X-Switchyard-Pool": pool}
    stated = {name: value for name, value in own.items() if value}
    return {"X-Request-Id": request_id, "X-Switchyard-Hop": f"{claim}|{proof}", **stated}
