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
