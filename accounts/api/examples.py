"""What accounts look like over HTTP, for the OpenAPI document."""

from typing import Any

AT = "2026-11-21T12:00:00Z"
LATER = "2027-02-19T12:00:00Z"

USER: dict[str, Any] = {
    "username": "ada",
    "email": "ada@example.com",
    "active": True,
    "role": "operator",
    "groups": ["on-call"],
    "superuser": False,
    "has_password": True,
    "second_factor": True,
    "providers": ["https://login.example.com"],
    "last_login": AT,
    "created_at": AT,
}
SERVICE_ACCOUNT: dict[str, Any] = {
    "name": "deploy-bot",
    "description": "Rolls out from CI",
    "active": True,
    "role": "operator",
    "groups": ["on-call"],
    "created_by": "ada",
    "created_at": AT,
}
GROUP: dict[str, Any] = {"name": "on-call", "role": "operator", "claim": "sre-oncall", "members": 4}
GRANT: dict[str, Any] = {
    "id": 3,
    "deployment": "sim-70b",
    "role": "operator",
    "user": "ada",
    "group": None,
    "created_by": "grace",
    "created_at": AT,
}
TOKEN: dict[str, Any] = {
    "prefix": "1a2b3c4d",
    "name": "laptop",
    "user": "ada",
    "scope": "write",
    "state": "active",
    "tone": "ok",
    "created_by": "ada",
    "created_at": AT,
    "last_used_at": AT,
    "expires_at": LATER,
    "revoked_at": None,
}
NEW_TOKEN = {**TOKEN, "last_used_at": None, "token": "sw_1a2b3c4d_" + 48 * "5"}
SESSION: dict[str, Any] = {
    "id": 12,
    "user": "ada",
    "method": "password",
    "address": "10.0.0.7",
    "browser": "Mozilla/5.0",
    "current": True,
    "created_at": AT,
    "seen_at": AT,
    "expires_at": LATER,
}
APPROVAL: dict[str, Any] = {
    "id": 7,
    "action": "evacuate-region",
    "summary": "evacuation of us-east-1 (all deployments)",
    "arguments": {"region": "us-east-1", "deployment": "", "duration_s": 3600, "why": "fire"},
    "deployment": "",
    "region": "us-east-1",
    "why": "fire",
    "state": "pending",
    "tone": "moving",
    "requested_by": "ada",
    "requested_at": AT,
    "expires_at": "2026-11-22T12:00:00Z",
    "decided_by": "",
    "decided_at": None,
    "outcome": "",
}
RULE: dict[str, Any] = {
    "action": "evacuate-region",
    "title": "Evacuate a region for real",
    "required": True,
    "actor": "ada",
    "changed_at": AT,
}
ME: dict[str, Any] = {
    "username": "ada",
    "email": "ada@example.com",
    "role": "operator",
    "scope": "write",
    "groups": ["on-call"],
    "grants": {"sim-70b": "operator"},
    "service_account": False,
    "token": "1a2b3c4d",
}
