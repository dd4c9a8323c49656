"""Example bodies of what the API shows of shares, policies and orders."""

from typing import Any

SHARES: dict[str, Any] = {
    "us-east-1": {"us-east-1": 0.63, "us-west-2": 0.37},
    "us-west-2": {"us-west-2": 1.0},
}

MATRIX: dict[str, Any] = {
    "deployment": "sim-70b",
    "revision": 42,
    "shares": SHARES,
    "moved_at": "2026-11-21T12:00:02Z",
    "looked_at": "2026-11-21T12:00:04Z",
    "held": "",
    "held_since": None,
    "utilisation_cap": 0.8,
    "regions": [
        {"region": "us-east-1", "demand": 24.1, "load": 15.2, "capacity": 20.0, "capacity_now": 20.0},
        {"region": "us-west-2", "demand": 18.0, "load": 26.9, "capacity": 60.0, "capacity_now": 60.0},
    ],
    "unplaced": {},
}

SHIFT: dict[str, Any] = {
    "id": 311,
    "deployment": "sim-70b",
    "revision": 42,
    "kind": "relief",
    "moved": 0.2118,
    "reason": (
        "us-east-1 has 24.1 requests at once and was tested for 20, of which 80% are used: "
        "us-east-1 -> us-east-1 63.0%, us-west-2 37.0%"
    ),
    "shares": SHARES,
    "at": "2026-11-21T12:00:02Z",
}

POLICY: dict[str, Any] = {
    "deployment": "sim-70b",
    "residency": {"eu-central-1": ["eu-central-1", "eu-west-1"]},
    "cost": {"us-east-1": 1.0, "us-west-2": 0.8},
    "cost_utilisation": 0.6,
    "cost_latency_ms": 50.0,
    "utilisation_cap": 0.8,
    "tested_concurrency": None,
    "load_bound": 1.25,
    "split": {"sim-70b": 95, "sim-70b-next": 5},
    "split_sticky": True,
    "revision": 3,
    "actor": "ada",
    "changed_at": "2026-11-20T09:12:00Z",
}

POLICY_CHANGE: dict[str, Any] = {"cost": {"us-west-2": 0.8}, "utilisation_cap": 0.75}

FIX: dict[str, Any] = {
    "deployment": "sim-70b",
    "origin": "us-east-1",
    "shares": {"us-east-1": 0.5, "us-west-2": 0.5},
    "duration_s": 3600,
    "why": "load test of us-west-2",
}

EVACUATE: dict[str, Any] = {
    "region": "us-east-1",
    "mode": "real",
    "duration_s": 7200,
    "why": "cooling fails",
    "confirm": "us-east-1",
}

OVERRIDE: dict[str, Any] = {
    "id": 12,
    "kind": "shares",
    "deployment": "sim-70b",
    "region": "us-east-1",
    "shares": {"us-east-1": 0.5, "us-west-2": 0.5},
    "mode": "",
    "why": "load test of us-west-2",
    "actor": "ada",
    "created_at": "2026-11-21T12:00:00Z",
    "expires_at": "2026-11-21T13:00:00Z",
    "ended_at": None,
    "end_reason": "",
    "active": True,
}

EVACUATION: dict[str, Any] = {
    **OVERRIDE,
    "id": 13,
    "kind": "evacuation",
    "deployment": None,
    "shares": {},
    "mode": "real",
    "why": "cooling fails",
}

EFFECTS: dict[str, Any] = {
    "effects": [
        {
            "deployment": "sim-70b",
            "shares": {"us-east-1": {"us-west-2": 1.0}, "us-west-2": {"us-west-2": 1.0}},
            "regions": [
                {
                    "region": "us-east-1",
                    "capacity": 60.0,
                    "load_before": 24.1,
                    "load_after": 0.0,
                    "receives": -24.1,
                    "utilisation_before": 0.4017,
                    "utilisation_after": 0.0,
                },
                {
                    "region": "us-west-2",
                    "capacity": 60.0,
                    "load_before": 18.0,
                    "load_after": 42.1,
                    "receives": 24.1,
                    "utilisation_before": 0.3,
                    "utilisation_after": 0.7017,
                },
            ],
            "unplaced": {},
            "over_cap": [],
        }
    ]
}
