"""Example bodies of documents and plans, for the API's documentation."""

from typing import Any

from controlplane.api import what_if

DEPLOYMENT: dict[str, Any] = {
    "apiVersion": "switchyard/v1",
    "kind": "Deployment",
    "metadata": {"name": "sim-70b"},
    "spec": {"regions": [{"region": "us-west-2", "cells": 3}]},
}
PREVIEW: dict[str, Any] = {"documents": [DEPLOYMENT]}
APPLY: dict[str, Any] = {"documents": [DEPLOYMENT], "revision": "5d41402abc4b2a76", "why": "a campaign in the west"}
STEP: dict[str, Any] = {
    "document": 0,
    "kind": "Deployment",
    "name": "sim-70b",
    "action": "scale",
    "reason": "sim-70b should have 3 cells in us-west-2, not 2",
    "changes": [{"field": "regions.us-west-2.cells", "before": 2, "after": 3}],
}
PLAN: dict[str, Any] = {
    "applied": False,
    "revision": "5d41402abc4b2a76",
    "steps": [STEP],
    "unchanged": [],
    "effects": [{"deployment": "sim-70b", "forecast": what_if.FORECAST}],
    "not_predicted": [],
    "waiting": [],
}
APPLIED: dict[str, Any] = {**PLAN, "applied": True, "effects": []}
