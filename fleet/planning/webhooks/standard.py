"""Messages as Standard Webhooks have them, which OpenAI's client verifies (`client.webhooks.unwrap`): three headers, of
which one signs the message's id, its time and its body, so that none can be sent again as another. Pure.

Source: https://github.com/standard-webhooks/standard-webhooks/blob/main/spec/standard-webhooks.md
"""

import base64
import hmac
from collections.abc import Iterable, Mapping
from typing import Any

SECRET_PREFIX = "whsec_"  # noqa: S105 - the part that is no secret


def standard_headers(message_id: str, timestamp: int, body: bytes, secrets: Iterable[str]) -> dict[str, str]:
    """One signature for each secret, `whsec_` and base64: a receiver needs one of them."""
    signed = f"{message_id}.{timestamp}.".encode() + body
    signatures = [base64.b64encode(hmac.digest(_key(secret), signed, "sha256")).decode() for secret in secrets]
    return {
        "webhook-id": message_id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": " ".join(f"v1,{each}" for each in signatures),
    }


def standard_message(message_id: str, created_at: int, body: Mapping[str, Any]) -> dict[str, Any]:
    """An event in OpenAI's form around its `type` and `data`; the same at every attempt."""
    return {"id": message_id, "object": "event", "created_at": created_at, **body}


def _key(secret: str) -> bytes:
    return base64.b64decode(secret.removeprefix(SECRET_PREFIX), validate=True)
