"""Example bodies of what the API says of keys and their use."""

from typing import Any

KEY: dict[str, Any] = {
    "prefix": "0a1b2c3d",
    "name": "search",
    "tenant": "rufus",
    "deployments": ["sim-70b"],
    "serving_class": "realtime",
    "requests_per_min": 600,
    "tokens_per_min": 200000,
    "max_concurrent": 32,
    "state": "active",
    "tone": "ok",
    "created_by": "operator",
    "created_at": "2026-11-21T12:00:00Z",
    "expires_at": None,
    "last_used_at": "2026-11-21T12:04:59Z",
    "revoked_at": None,
    "refused_everywhere_at": None,
    "revocation_lag_s": None,
    "requests_24h": 1204,
    "limited_24h": 3,
    "errors_24h": 0,
}
KEY_DETAIL: dict[str, Any] = {
    **KEY,
    "waits_for": [],
    "effect_of_revoking": "Requests with this key are refused with 401 by 2 ingresses, within about 5 s. "
    "It made 1204 requests in the last 24 h, the last one at 2026-11-21 12:04 UTC.",
}
NEW_KEY: dict[str, Any] = {**KEY, "last_used_at": None, "requests_24h": 0, "limited_24h": 0, "key": "sw_0a1b2c3d_…"}
POLICY: dict[str, Any] = {
    "required": True,
    "version": 7,
    "actor": "operator",
    "changed_at": "2026-11-21T12:00:00Z",
}
RING: dict[str, Any] = {
    "ingress": "i-us-east-1",
    "region": "us-east-1",
    "connected": True,
    "version": 7,
    "wanted_version": 7,
}
USAGE: dict[str, Any] = {
    "tenant": "rufus",
    "key": "0a1b2c3d",
    "hour": "2026-11-21T12:00:00Z",
    "requests": 1204,
    "limited": 3,
    "errors": 0,
    "prompt_tokens": 0,
    "completion_tokens": 0,
}
