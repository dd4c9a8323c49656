"""What the documentation shows of quotas, scaling, pools, rates and the plan."""

from typing import Any

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
