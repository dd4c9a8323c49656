"""Turns what the API shows into documents that describe it: applying them again changes nothing. Pure."""

from collections.abc import Callable, Mapping
from typing import Any

API_VERSION = "switchyard/v1"

Row = Mapping[str, Any]
Spec = dict[str, Any]

VERSION_FIELDS = (
    "engine", "artifact_uri", "artifact_digest", "context_length", "max_concurrency", "ready_timeout_s", "parallelism",
    "engine_options", "engine_env", "golden_prompts", "golden_waiver", "attention_heads", "kv_heads", "layers",
    "speculation", "quantization",
)  # fmt: skip
POLICY_META = frozenset({"deployment", "revision", "actor", "changed_at"})


def _region(row: Row) -> Spec:
    spares = {
        kind: {"warm": warm, "repair_only": row["repair_only"][kind]} if row["repair_only"].get(kind) else warm
        for kind, warm in row["spares"].items()
    }
    return {
        "provider": row["provider"],
        "position": row["position"],
        "ingress_url": row["ingress_url"],
        "spares": spares,
    }


def _model(row: Row) -> Spec:
    return {"description": row["description"]}


def _version(row: Row) -> Spec:
    return {field: row[field] for field in VERSION_FIELDS}


def _deployment(row: Row) -> Spec:
    plain = ("model_version", "instance_type", "serving_class", "drain_deadline_s", "update_policy", "slo")
    regions = [{"region": place["region"], "cells": place["cells"]} for place in row["regions"]]
    return {**{field: row[field] for field in plain}, "regions": regions}


def _traffic_policy(row: Row) -> Spec:
    return {field: value for field, value in row.items() if field not in POLICY_META}


def _fault_rule(row: Row) -> Spec:
    return {"mode": row["mode"]}


DESCRIBED: Mapping[str, tuple[str, Callable[[Row], Spec]]] = {
    "regions": ("Region", _region),
    "models": ("Model", _model),
    "model-versions": ("ModelVersion", _version),
    "deployments": ("Deployment", _deployment),
    "traffic-policies": ("TrafficPolicy", _traffic_policy),
    "fault-rules": ("FaultRule", _fault_rule),
}
"""Name of a resource -> the kind of its documents, and what they say. In the order in which they are needed."""


def document_of(resource: str, name: str, row: Row) -> dict[str, Any]:
    """The document that describes a row of a resource; nothing that is empty or unknown is said."""
    kind, spec_of = DESCRIBED[resource]
    spec = {field: value for field, value in spec_of(row).items() if value not in (None, "", {}, [])}
    return {"apiVersion": API_VERSION, "kind": kind, "metadata": {"name": name}, "spec": spec}
