"""Example bodies of the API's documentation."""

from typing import Any

import msgspec

from engine_agent.protocol.request_limits import RequestLimits

KEY: dict[str, Any] = {
    "prefix": "0a1b2c3d",
    "name": "search",
    "tenant": "rufus",
    "deployments": ["sim-70b"],
    "serving_class": "realtime",
    "requests_per_min": 600,
    "tokens_per_min": 200000,
    "max_concurrent": 32,
    "allowed_origins": ["https://app.example"],
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
KEY_POLICY: dict[str, Any] = {
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
    "tested_by_type": {"trn1.32xlarge": 16, "inf2.48xlarge": 8},
    "load_bound": 1.25,
    "routing": "exact",
    "shared_caches": False,
    "split": {"sim-70b": 95, "sim-70b-next": 5},
    "split_sticky": True,
    "batch_at_risk": None,
    "request_limits": msgspec.to_builtins(RequestLimits(stops=32)),
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


INGRESS: dict[str, Any] = {
    "id": "i-us-east-1",
    "region": "us-east-1",
    "address": "127.0.0.1",
    "port": 8080,
    "connected": True,
    "last_seen_at": "2026-11-21T12:00:01Z",
    "agent_version": "0.1.0+3fa9c0de81b2745a",
    "revision": 12,
    "wanted_revision": 12,
    "haproxy_pid": 4711,
    "reason": "",
    "cells": {"sim-70b-us-east-1-1": "up", "sim-70b-us-east-1-2": "drain"},
    "created_at": "2026-11-21T11:57:00Z",
}

ROUTING_TABLE: dict[str, Any] = {
    "id": "us-east-1@12",
    "region": "us-east-1",
    "revision": 12,
    "current": True,
    "reason": "sim-70b-us-east-1-2 drains",
    "created_at": "2026-11-21T12:00:00Z",
}

ROUTING_TABLE_WITH_BODY: dict[str, Any] = {
    **ROUTING_TABLE,
    "body": {
        "type": "routing_table",
        "revision": 12,
        "region": "us-east-1",
        "pools": [
            {
                "name": "sim-70b",
                "models": ["sim-70b"],
                "serving_class": "realtime",
                "cells": [
                    {
                        "cell": "sim-70b-us-east-1-1",
                        "generation": 1,
                        "address": "127.0.0.1",
                        "port": 21000,
                        "max_connections": 16,
                        "drain": False,
                    }
                ],
                "spill": [{"region": "us-west-2", "address": "127.0.0.1", "port": 8081}],
                "fractions": {"us-east-1": 1.0},
            }
        ],
        "max_body_bytes": 4194304,
        "retry_after_s": 5,
    },
}

ENTRY: dict[str, Any] = {
    "name": "llm.example.com",
    "shares": {"us-east-1": 3.0},
    "revision": 2,
    "actor": "ada",
    "changed_at": "2026-11-23T12:00:00Z",
    "weights": {"eu-west-1": 64, "us-east-1": 191},
    "published": 7,
    "state": "in_force",
    "held": "",
    "held_since": None,
    "seen": "5c0c8bd8a1b1f1d2",
    "seen_weights": {"eu-west-1": 64, "us-east-1": 191},
    "looked_at": "2026-11-23T12:04:40Z",
}

ENTRY_CHANGE: dict[str, Any] = {"shares": {"us-east-1": 3.0}}

ENTRY_ADOPT: dict[str, Any] = {"seen": "5c0c8bd8a1b1f1d2"}

ENTRY_REVISION: dict[str, Any] = {
    "id": 12,
    "entry": "llm.example.com",
    "revision": 7,
    "state": "in_force",
    "weights": {"eu-west-1": 64, "us-east-1": 191},
    "reason": "shares as planned",
    "trouble": "",
    "change_id": "/change/C2682N5HXP0BZ4",
    "at": "2026-11-23T12:00:05Z",
    "settled_at": "2026-11-23T12:01:02Z",
}
FORECAST: dict[str, Any] = {
    "id": 3,
    "deployment": "sim-70b",
    "origin": "us-east-1",
    "serving_class": "realtime",
    "made_at": "2026-11-26T12:05:00Z",
    "slot_s": 900,
    "p50": [41.2, 42.8],
    "p90": [48.9, 52.4],
    "p99": [55.0, 61.3],
    "methods": ["last", "blend"],
    "is_judged": True,
    "horizons": [
        {
            "horizon_s": 900,
            "method": "last",
            "judged": 336,
            "wape": 0.084,
            "p90_held": 0.91,
            "chosen": True,
        }
    ],
}
