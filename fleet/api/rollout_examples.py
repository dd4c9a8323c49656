"""Example bodies of rollouts for the API's documentation."""

from typing import Any

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
    "gate": {"error_ratio": 2.0, "latency_ratio": 1.25, "min_samples": 50, "significance": 0.01},
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
