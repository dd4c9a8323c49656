"""Example bodies of the API's documentation: one small fleet, the same throughout."""

from typing import Any

LOAD: dict[str, Any] = {
    "in_flight": 3,
    "queued": 0,
    "tokens_per_s": 412.5,
    "ttft_p50_ms": 48.1,
    "ttft_p99_ms": 131.0,
    "itl_p50_ms": 6.2,
    "itl_p99_ms": 9.8,
    "batch": {
        "running": 6,
        "waiting": 1,
        "window": 24,
        "is_alone": False,
        "is_over_budget": False,
        "baseline_ttft_ms": 168.0,
        "baseline_itl_ms": 24.0,
        "recent_ttft_ms": 181.0,
        "recent_itl_ms": 65.0,
    },
    "cache": {
        "is_known": True,
        "blocks": 18_204,
        "block_tokens": 16,
        "prefixes": 2_911,
        "asked_tokens_total": 48_211_904,
        "predicted_tokens_total": 16_902_331,
        "found_tokens_total": 17_120_288,
        "other_tokens_total": 3_110_020,
        "other_found_tokens_total": 201_344,
    },
    "handovers": None,
    "speculation": None,
    "reported_at": "2026-11-21T12:00:01Z",
}

CELL: dict[str, Any] = {
    "id": "sim-70b-us-east-1-1",
    "deployment": "sim-70b",
    "region": "us-east-1",
    "instance_type": "trn1.32xlarge",
    "model_version": "sim-70b@1",
    "serving_class": "realtime",
    "role": "mixed",
    "state": "ready",
    "reason": "all 2 ranks are ready",
    "tone": "ok",
    "generation": 1,
    "restarts": 0,
    "nodes": [
        {"id": "n-0a1b2c3d", "rank": 0, "role": "leader", "state": "ready"},
        {"id": "n-4e5f6a7b", "rank": 1, "role": "follower", "state": "ready"},
    ],
    "fingerprints": {"groups": [{"digest": "5f0b1c2d3e4f", "nodes": ["n-0a1b2c3d", "n-4e5f6a7b"]}], "differing": []},
    "load": LOAD,
    "unrouted_at": None,
    "state_since": "2026-11-21T11:58:40Z",
    "created_at": "2026-11-21T11:58:12Z",
}

CELL_THAT_CANNOT_FORM: dict[str, Any] = {
    **CELL,
    "state": "failed",
    "reason": (
        "fingerprint mismatch: rank 1 (n-4e5f6a7b) differs from rank 0 (n-0a1b2c3d): "
        "neuron_driver is 2.26.5.0 instead of 2.27.4.0"
    ),
    "tone": "bad",
    "fingerprints": {
        "groups": [
            {"digest": "5f0b1c2d3e4f", "nodes": ["n-0a1b2c3d"]},
            {"digest": "9a8b7c6d5e4f", "nodes": ["n-4e5f6a7b"]},
        ],
        "differing": [
            {"field": "neuron_driver", "values": {"n-0a1b2c3d": "2.27.4.0", "n-4e5f6a7b": "2.26.5.0"}},
        ],
    },
    "load": {
        "in_flight": 0,
        "queued": 0,
        "tokens_per_s": 0.0,
        "ttft_p50_ms": None,
        "ttft_p99_ms": None,
        "itl_p50_ms": None,
        "itl_p99_ms": None,
        "batch": None,
        "cache": None,
        "handovers": None,
        "speculation": None,
        "reported_at": None,
    },
}

NODE: dict[str, Any] = {
    "id": "n-0a1b2c3d",
    "region": "us-east-1",
    "instance_type": "local.sim",
    "state": "ready",
    "reason": "its agent reports",
    "tone": "ok",
    "cordoned": False,
    "cell": "sim-70b-us-east-1-1",
    "deployment": "sim-70b",
    "rank": 0,
    "role": "leader",
    "address": "127.0.0.1",
    "port_base": 21000,
    "topology": ["local", "us-east-1", "rack-1"],
    "fingerprint": {"agent": "0.1.0", "kernel": "6.8.0", "sim.engine": "sim 0.1.0", "sim.python": "3.11.7"},
    "accelerators": ["neuron 0: trainium2, 4 cores"],
    "connected": True,
    "last_seen_at": "2026-11-21T12:00:01Z",
    "agent_version": "0.1.0",
    "engine": {"state": "ready", "reason": "", "pid": 4242, "generation": 1},
    "checks": {
        "request": "joining",
        "began_at": 1795262221.0,
        "ended_at": 1795262233.9,
        "results": [{"check": "memory", "ok": True, "found": "256 MiB held 5 of 5 patterns", "seconds": 0.6}],
    },
    "state_since": "2026-11-21T11:57:02Z",
    "created_at": "2026-11-21T11:57:00Z",
}

DEPLOYMENT: dict[str, Any] = {
    "name": "sim-70b",
    "model_version": "sim-70b@1",
    "serving_class": "realtime",
    "instance_types": ["trn1.32xlarge", "inf2.48xlarge"],
    "drain_deadline_s": 60.0,
    "update_policy": {"canary_bake_s": 60.0},
    "slo": {"ttft_ms": 1500.0},
    "scaling": {"mode": "act"},
    "markets": [],
    "team": "search",
    "priority": None,
    "preemptible": None,
    "preempts": "min",
    "regions": [
        {
            "region": "us-east-1",
            "cells": 4,
            "range": {"min": 2, "max": 8},
            "pools": None,
            "role_plan": None,
            "by_type": {"inf2.48xlarge": 1},
            "types": {"trn1.32xlarge": 2, "inf2.48xlarge": 1},
            "ready": 3,
            "granted": 3,
            "grant_reason": (
                "team search has 4 of 4 trn1.32xlarge and borrows 2; nothing more can be borrowed: ads has 4 of 6"
            ),
        },
        {
            "region": "us-west-2",
            "cells": 2,
            "range": None,
            "pools": None,
            "role_plan": None,
            "by_type": {},
            "types": {"trn1.32xlarge": 2},
            "ready": 1,
            "granted": None,
            "grant_reason": "",
        },
    ],
    "created_at": "2026-11-21T11:57:00Z",
}

NEW_DEPLOYMENT: dict[str, Any] = {
    "name": "sim-70b",
    "model_version": "sim-70b@1",
    "instance_types": ["trn1.32xlarge", "inf2.48xlarge"],
    "regions": [{"region": "us-east-1", "cells": 2}, {"region": "us-west-2", "cells": 2}],
    "update_policy": {"canary_bake_s": 60.0},
}

CHANGE_DEPLOYMENT: dict[str, Any] = {"drain_deadline_s": 120.0, "update_policy": {"waves_percent": [5, 25, 100]}}

CHANGE_TYPES: dict[str, Any] = {
    "instance_types": ["trn1.32xlarge", "inf2.48xlarge", "p5.48xlarge"],
    "by_type": {"us-west-2": {"p5.48xlarge": 1}},
}

SCALE: dict[str, Any] = {"regions": [{"region": "us-west-2", "cells": 3}]}

SCALE_BY_ROLE: dict[str, Any] = {"regions": [{"region": "us-west-2", "cells": {"prefill": 1, "decode": 3}}]}
SCALE_BY_LOAD: dict[str, Any] = {
    "regions": [{"region": "us-west-2", "cells": {"min": 2, "max": 8}}],
    "scaling": {
        "mode": "act",
        "target_utilisation": 0.6,
        "schedule": [{"cron": "30 7 * * MON-FRI", "time_zone": "America/Los_Angeles", "for_s": 36000, "cells": 4}],
    },
}

QUOTA: dict[str, Any] = {
    "name": "search:local.sim",
    "team": "search",
    "instance_type": "local.sim",
    "region": "",
    "machines": 4,
    "borrow_most": None,
    "wanted": 8,
    "used": 6,
    "borrowed": 2,
    "idle": 0,
    "deployments": ["sim-70b"],
    "changed_by": "operator",
    "changed_at": "2026-11-21T12:00:00Z",
}

NEW_QUOTA: dict[str, Any] = {"team": "search", "instance_type": "local.sim", "machines": 4}

SCALING_LOAD: dict[str, Any] = {
    "per_cell": 16.0,
    "start_up_s": 94.0,
    "in_flight": 41.2,
    "queued": 0.0,
    "offered": 41.2,
    "service_s": 6.4,
    "autopilot": 40.8,
    "forecast": None,
    "late_burn": 0.4,
    "itl_p95_ms": 31.5,
}

SCALING_PLACE: dict[str, Any] = {
    "id": 3,
    "deployment": "sim-70b",
    "region": "us-east-1",
    "min": 2,
    "max": 8,
    "cells": 4,
    "mode": "act",
    "acting": True,
    "wanted": 4,
    "needed": 4,
    "rule": "utilisation",
    "reason": "41.2 requests at once take 4 cells at 70% of 16 each",
    "load": SCALING_LOAD,
    "looked_at": "2026-11-21T12:00:05Z",
}

SCALING_DECISION: dict[str, Any] = {
    "id": 17,
    "deployment": "sim-70b",
    "region": "us-east-1",
    "at": "2026-11-21T11:48:10Z",
    "was": 2,
    "wanted": 4,
    "acted": True,
    "rule": "utilisation",
    "reason": "41.2 requests at once take 4 cells at 70% of 16 each",
    "load": SCALING_LOAD,
    "observed_s": 715.0,
    "too_few_cell_s": 0.0,
    "too_many_cell_s": 120.0,
    "in_force_cell_s": 2860.0,
}

SCALING_SWITCH: dict[str, Any] = {
    "paused": True,
    "why": "a load test",
    "actor": "operator",
    "changed_at": "2026-11-21T12:00:00Z",
}

REGION: dict[str, Any] = {
    "name": "us-east-1",
    "provider": "local",
    "position": 0,
    "ingress_url": "http://127.0.0.1:8080",
    "spares": {"local.sim": 1},
    "repair_only": {"local.sim": 0},
    "plain_http": "serve",
    "cheapest_first": False,
    "cloud": None,
    "nodes": {"joining": 0, "ready": 6, "suspect": 0, "faulty": 0, "lost": 0},
    "cells": {"pending": 0, "starting": 1, "ready": 2, "draining": 0, "failed": 0, "lost": 0},
}

NEW_REGION: dict[str, Any] = {
    "name": "eu-west-1",
    "position": 2,
    "ingress_url": "http://127.0.0.1:8082",
    "spares": {"local.sim": {"warm": 2, "repair_only": 1}},
}

CHANGE_REGION: dict[str, Any] = {"spares": {"local.sim": 3}}

INSTANCE_TYPE: dict[str, Any] = {
    "name": "local.sim",
    "accelerator": "simulated",
    "chips": 0,
    "cores": 1,
    "memory_gib": 1.0,
    "price_per_hour": 0.0,
    "watts": 0.0,
    "tensor_parallel_degree": 1,
}

INCIDENT: dict[str, Any] = {
    "id": 7,
    "kind": "node-lost",
    "subject": "n-4e5f6a7b",
    "state": "open",
    "tone": "bad",
    "summary": "Node n-4e5f6a7b lost: its machine is gone",
    "resolution": "",
    "region": "us-east-1",
    "deployment": "sim-70b",
    "cell": "sim-70b-us-east-1-1",
    "node": "n-4e5f6a7b",
    "evidence": {"reason": "its machine is gone"},
    "cohort": "",
    "shadow": False,
    "seen_at": "2026-11-21T12:01:00Z",
    "opened_at": "2026-11-21T12:01:00Z",
    "closed_at": None,
    "closed_by": "",
    "replacements": [
        {
            "id": 3,
            "node": "n-4e5f6a7b",
            "cell": "sim-70b-us-east-1-1",
            "rule": "silence",
            "reason": "its machine is gone",
            "actor": "switchyard",
            "opened_at": "2026-11-21T12:01:00Z",
            "begun_at": "2026-11-21T12:01:00Z",
            "closed_at": None,
            "resolution": "",
        }
    ],
}


POLICY: dict[str, Any] = {
    "strategy": "in_place",
    "max_unavailable": 1,
    "surge": 0,
    "canary": True,
    "waves_percent": [10, 25, 50, 100],
    "canary_bake_s": 300.0,
    "bake_s": 300.0,
    "min_healthy_s": 60.0,
    "max_failed_cells": 2,
    "auto_rollback": True,
    "progress_deadline_s": 600.0,
    "gate": {
        "error_ratio": 2.0,
        "latency_ratio": 1.25,
        "min_samples": 50,
        "significance": 0.01,
        "goodput_ratio": 0.0,
        "goodput_missing": "pause",
    },
}


START: dict[str, Any] = {
    "deployment": "sim-70b",
    "version": "sim-70b@2",
    "policy": {"bake_s": 120},
    "why": "faster prefill",
}


ROLLOUT: dict[str, Any] = {
    "id": 7,
    "deployment": "sim-70b",
    "from_version": "sim-70b@1",
    "to_version": "sim-70b@2",
    "state": "running",
    "tone": "moving",
    "reason": "us-east-1 100 %: 1 of 2 updated and healthy; sim-70b-us-east-1-2 is starting",
    "why": "faster prefill",
    "stage": 4,
    "stage_label": "us-east-1 100 %",
    "region_order": ["us-east-1", "us-west-2"],
    "policy": POLICY,
    "failed": [],
    "verdict": {
        "finding": "passed",
        "reason": "no worse than the old version over 412 requests",
        "numbers": {"requests": 412, "errors": 0, "control_requests": 398, "control_errors": 0},
    },
    "actor": "operator",
    "created_at": "2026-11-21T11:50:00Z",
    "state_since": "2026-11-21T11:58:12Z",
    "ended_at": None,
}


PREVIEW: dict[str, Any] = {
    "deployment": "sim-70b",
    "from_version": "sim-70b@1",
    "to_version": "sim-70b@2",
    "policy": POLICY,
    "region_order": ["us-east-1", "us-west-2"],
    "stages": [
        {"index": 0, "name": "us-east-1 canary", "region": "us-east-1", "cells": 1, "of": 2, "bake_s": 300.0},
        {"index": 4, "name": "us-east-1 100 %", "region": "us-east-1", "cells": 2, "of": 2, "bake_s": 300.0},
        {"index": 5, "name": "us-west-2 10 %", "region": "us-west-2", "cells": 1, "of": 2, "bake_s": 300.0},
        {"index": 8, "name": "us-west-2 100 %", "region": "us-west-2", "cells": 2, "of": 2, "bake_s": 300.0},
    ],
    "at_least_s": 1440.0,
}

MACHINE: dict[str, Any] = {
    "id": "m-7c1d9e02",
    "provider": "machines",
    "provider_id": "m-7c1d9e02",
    "address": "10.20.0.7",
    "region": "eu-west-1",
    "role": "node",
    "instance_type": "p5.48xlarge",
    "state": "taken",
    "reason": "it is n-0a1b2c3d",
    "tone": "ok",
    "node": "n-0a1b2c3d",
    "connected": True,
    "agent_version": "0.1.0",
    "what": "8 x NVIDIA H100 80GB HBM3, 192 cores, 2015 GiB",
    "zone": "",
    "market": "",
    "reservation": "",
    "image": "",
    "price_per_hour": None,
    "cloud_state": "",
    "network_nodes": ["spine-2", "rack-7"],
    "notices": [],
    "state_since": "2026-11-21T11:58:40Z",
    "created_at": "2026-11-21T11:58:31Z",
}

INVITATION: dict[str, Any] = {
    "prefix": "5e6f7a8b",
    "region": "eu-west-1",
    "role": "node",
    "instance_type": None,
    "count": 3,
    "left": 3,
    "state": "open",
    "created_by": "ada",
    "created_at": "2026-11-21T12:00:00Z",
    "expires_at": "2026-11-21T13:00:00Z",
}

NEW_INVITATION: dict[str, Any] = {
    **INVITATION,
    "line": (
        "curl -fsSLk --pinnedpubkey 'sha256//7HIpactkIAq2Y49orFOOQKurWxmmSFZhBCoQYcRhJ3Y=' "
        "https://control.example.com:8443/join | sh -s -- sw_5e6f7a8b_0f1e2d3c4b5a69788796a5b4c3d2e1f00f1e2d3c4b5a6978"
    ),
    "notices": [],
}

INVITE: dict[str, Any] = {"region": "eu-west-1", "count": 3, "expires_in_s": 3600}

CERTIFICATE: dict[str, Any] = {
    "name": "api",
    "region": None,
    "names": ["api.example.com", "*.models.example.com"],
    "issuer": "CN=Example CA 3,O=Example",
    "key_kind": "P-256",
    "fingerprint": 32 * "5f",
    "not_before": "2026-11-20T00:00:00Z",
    "not_after": "2027-02-18T00:00:00Z",
    "actor": "operator",
    "created_at": "2026-11-21T12:00:00Z",
    "changed_at": "2026-11-21T12:00:00Z",
}

NEW_CERTIFICATE: dict[str, Any] = {
    "name": "api",
    "certificate": "-----BEGIN CERTIFICATE-----\n…\n-----END CERTIFICATE-----\n",
    "private_key": "(PEM of the private key)",
}

AGENT_RELEASE: dict[str, Any] = {
    "id": "3fa9c0de81b2745a",
    "version": "0.1.0",
    "protocol": 2,
    "is_current": True,
    "archives": {"cp311-x86_64": {"digest": "9e0c" * 16, "size_bytes": 16141322}},
    "agents": ["i-us-east-1", "n-0a1b2c3d"],
    "created_at": "2026-11-21T12:00:00Z",
}

AGENT_ROLLOUT: dict[str, Any] = {
    "id": 7,
    "from_release": "8e83b4e031e30dde",
    "to_release": "3fa9c0de81b2745a",
    "state": "rolled_back",
    "tone": "idle",
    "reason": "n-0a1b2c3d was not well with 3fa9c0de81b2745a within 60 s: it is not connected; all run as before",
    "why": "security fix",
    "ring": 0,
    "rings": 3,
    "soak_s": 15.0,
    "actor": "ada",
    "moves": [
        {
            "agent": "n-0a1b2c3d",
            "ring": 0,
            "release": "8e83b4e031e30dde",
            "moved_at": "2026-11-21T12:01:04Z",
            "settled_at": None,
            "trouble": "",
        }
    ],
    "created_at": "2026-11-21T12:00:00Z",
    "ring_since": "2026-11-21T12:00:00Z",
    "ended_at": "2026-11-21T12:01:10Z",
}

CAPACITY_POOL: dict[str, Any] = {
    "id": 12,
    "region": "us-east-1",
    "instance_type": "trn1.32xlarge",
    "position": 2,
    "market": "spot",
    "zone": "us-east-1a",
    "zone_id": "use1-az1",
    "subnet": "subnet-0a1b2c3d4e5f60718",
    "image": "ami-0a1b2c3d4e5f60718",
    "reservation": "",
    "placement_group": "",
    "network_nodes": [],
    "max_price": 9.5,
    "price_per_hour": 6.45,
    "price_at": "2026-11-21T11:30:00Z",
    "ends_at": None,
    "free": None,
    "enabled": True,
    "origin": "person",
    "declared_by": "ada",
    "state": "resting",
    "tone": "warn",
    "paused_until": "2026-11-21T12:03:00Z",
    "pause_reason": "InsufficientInstanceCapacity: there is none",
    "failures": 1,
}

CHANGE_POOL: dict[str, Any] = {"enabled": False, "why": "the zone has trouble"}

DECLARE_POOL: dict[str, Any] = {
    "region": "us-east-1",
    "instance_type": "trn1.32xlarge",
    "market": "spot",
    "zone": "us-east-1a",
    "max_price": 9.5,
}
RATE: dict[str, Any] = {
    "id": 4,
    "kind": "machine_price",
    "subject": "p5.48xlarge",
    "region": "",
    "market": "",
    "value": "31.464000",
    "valid_from": "2026-12-01T00:00:00Z",
    "in_force": False,
    "actor": "ada",
    "created_at": "2026-11-21T12:00:00Z",
}
NEW_RATE: dict[str, Any] = {"kind": "machine_price", "subject": "p5.48xlarge", "value": "31.464"}

CAPACITY_PLAN = {
    "at": "2026-11-26T12:00:00Z",
    "made_at": "2026-11-26T12:00:21Z",
    "slot_s": 900,
    "solver": "whole",
    "why": "",
    "took_s": 0.31,
    "shifts": 1,
    "total": 64.5,
    "dollars": [21.5, 43.0],
    "places": [
        {
            "deployment": "sim-70b",
            "region": "us-west-2",
            "cells": [2, 3],
            "by_type": {"trn1.32xlarge": [2, 3]},
            "expected": [40.2, 41.0],
            "cover": [52.8, 53.1],
            "budget": [46.2, 88.6],
            "due": [46.2, 80.0],
        }
    ],
    "machines": [
        {"region": "us-west-2", "instance_type": "trn1.32xlarge", "pool": "on_demand in usw2-az1", "machines": [2, 3]}
    ],
    "warm": [
        {
            "region": "us-west-2",
            "instance_type": "trn1.32xlarge",
            "machines": 1,
            "reason": "from 12:15 UTC on its cells take 1 machine more (+1 of sim-70b)",
        }
    ],
    "orders": [
        {
            "at_s": 660.0,
            "kind": "start",
            "deployment": "sim-70b",
            "region": "us-west-2",
            "instance_type": "trn1.32xlarge",
            "count": 1,
            "dollars": 22.93,
            "reason": "41.0 requests at once are expected, and batches that are due take the rest of 3 cells",
            "taken_from": "",
        }
    ],
    "lacks": [],
}
