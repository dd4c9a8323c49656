"""Example bodies of what-if, for the API's documentation."""

from typing import Any

ROLLOUT: dict[str, Any] = {"rollout": {"deployment": "sim-70b", "version": "sim-70b@2", "policy": {"bake_s": 120}}}
SCALE: dict[str, Any] = {"scale": {"deployment": "sim-70b", "regions": [{"region": "us-west-2", "cells": 3}]}}
LOSE_REGION: dict[str, Any] = {"lose_region": "us-east-1"}
FORECAST: dict[str, Any] = {
    "from": "2026-11-21T12:00:00Z",
    "took_s": 41.6,
    "looked_s": 105.0,
    "steps": [
        {
            "at_s": 0.5,
            "at": "2026-11-21T12:00:00.500000Z",
            "kind": "cell.pending",
            "subject": "sim-70b-us-west-2-5",
            "text": "3 cells wanted, 2 there",
        },
        {
            "at_s": 41.6,
            "at": "2026-11-21T12:00:41.600000Z",
            "kind": "cell.ready",
            "subject": "sim-70b-us-west-2-5",
            "text": "all 2 ranks are ready",
        },
    ],
    "places": [
        {
            "deployment": "sim-70b",
            "region": "us-west-2",
            "wanted": 3,
            "ready_now": 2,
            "ready_least": 2,
            "ready_then": 3,
        }
    ],
    "machines_launched": 1,
    "refusals": [],
    "warnings": ["1 machines would be launched"],
}
