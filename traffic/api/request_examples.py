"""What the documentation shows of requests that are kept, queued or sent in files, and of where answers go."""

from typing import Any

KEPT_RESPONSES: dict[str, Any] = {
    "responses": 412,
    "bytes": 9_120_456,
    "most_responses_of_tenant": 20_000,
    "most_bytes_of_tenant": 1_073_741_824,
    "days": 30.0,
    "tenants": [
        {"tenant": "rufus", "responses": 412, "bytes": 9_120_456, "oldest_at": "2026-11-14T12:00:00Z"},
    ],
    "truncated": False,
}

TENANT_GRANT: dict[str, Any] = {
    "id": 3,
    "tenant": "acme",
    "use": "read",
    "target": "s3://acme-batches/in",
    "region": "us-east-1",
    "actor": "admin",
    "created_at": "2026-11-23T12:00:00Z",
}

NEW_TENANT_GRANT: dict[str, Any] = {name: TENANT_GRANT[name] for name in ("tenant", "use", "target")}

TENANT_WEBHOOK: dict[str, Any] = {
    "id": 4,
    "tenant": "acme",
    "url": "https://app.acme.example/…",
    "events": ["batch.completed", "batch.failed"],
    "former_until": None,
    "actor": "operator",
    "created_at": "2026-11-23T12:00:00Z",
}

NEW_TENANT_WEBHOOK: dict[str, Any] = {
    "tenant": "acme",
    "url": "https://app.acme.example/batches",
    "events": ["batch.completed", "batch.failed"],
}

TENANT_WEBHOOK_SECRET: dict[str, Any] = TENANT_WEBHOOK | {
    "secret": "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSwMfKQ9r8GKYo="
}

REQUEST_QUEUE: dict[str, Any] = {
    "id": 1,
    "url": "https://sqs.us-east-1.amazonaws.com/123456789012/sw-0123456789ab-requests-orders",
    "name": "sw-0123456789ab-requests-orders",
    "key": "3f9c1a2b",
    "tenant": "acme",
    "actor": "admin",
    "created_at": "2026-11-23T12:00:00Z",
    "state": "reading",
    "reason": "",
    "read_at": "2026-11-23T12:30:00Z",
    "waiting": 0,
    "refused": [
        {
            "message": "5fea7756-0ea4-451a-a703-a558b933e274",
            "reason": "the field `model` must name a model",
            "at": "2026-11-23T12:20:00Z",
        }
    ],
}

NEW_REQUEST_QUEUE: dict[str, Any] = {name: REQUEST_QUEUE[name] for name in ("url", "key")}

BATCH: dict[str, Any] = {
    "id": "batch_6f1d0f0d2c3b4a5968778695a4b3c2d1",
    "tenant": "acme",
    "key": "3f9c1a2b",
    "region": "us-east-1",
    "input_uri": "",
    "output_uri": "s3://acme-batches/out",
    "endpoint": "/v1/chat/completions",
    "model": "sim-70b",
    "state": "in_progress",
    "tone": "moving",
    "priority": 5,
    "window": "24h",
    "lines": 20000,
    "completed": 5120,
    "failed": 3,
    "lines_per_s": 4.2,
    "estimated_end_at": "2026-11-23T13:19:02Z",
    "errors": [],
    "input_tokens": 0,
    "output_tokens": 0,
    "created_at": "2026-11-23T12:00:00Z",
    "in_progress_at": "2026-11-23T12:00:02Z",
    "finalizing_at": None,
    "expires_at": "2026-11-24T12:00:00Z",
    "at_risk_at": None,
    "raised_at": None,
    "cells_asked_at": None,
}

BATCH_CANCEL: dict[str, Any] = {"why": "its model is retired tonight"}
