"""Hop marks as one ingress gives them to another's, for tests of who is believed."""

import hashlib
import hmac
import time

REQUEST_ID = "request-1"


def marked(secret: str, region: str = "us-west-2", *, age_s: int = 0, request_id: str = REQUEST_ID) -> dict[str, str]:
    """The headers of a request that a region's ingress sent, signed with this secret."""
    claim = f"{region}|{int(time.time()) - age_s}"
    proof = hmac.new(secret.encode(), f"{claim}|{request_id}".encode(), hashlib.sha256).hexdigest().upper()
    return {"X-Request-Id": request_id, "X-Switchyard-Hop": f"{claim}|{proof}"}
