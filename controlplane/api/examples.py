"""Builds the examples of the OpenAPI document from the schemas of requests and responses, so that new fields appear in
them. Values come from the field (enum, default, format, bounds), else from `COMMON`. A serializer may state better ones
in `Meta.examples`."""

from collections.abc import Mapping
from typing import Any

JsonObject = dict[str, Any]

STATED = "x-examples"
"""Carries `Meta.examples` of a serializer to the hook below, which removes it from the document."""
JSON = "application/json"
AT = "2026-11-21T12:00:00Z"
LATER = "2027-02-19T12:00:00Z"
FORMATS: Mapping[str, Any] = {
    "date": AT[:10],
    "date-time": AT,
    "decimal": "1.500000",
    "email": "ada@example.com",
    "uri": "https://switchyard.example.com",
    "uuid": "0f1e2d3c-4b5a-4978-8796-a5b4c3d2e1f0",
}
NUMBERS: Mapping[str, float] = {"integer": 3, "number": 0.5}
UNITS: Mapping[str, float] = {
    "_bytes": 16_384,
    "_ms": 48,
    "_per_s": 412,
    "_percent": 53,
    "_s": 60,
    "_tokens": 1_204,
    "_usd": 30,
    "port": 8080,
}
"""Suffix of a number's name -> its example; the first match wins."""
AMOUNTS = ("_usd", "_j", "_g", "_hours", "_money", "_cost", "charged")
"""Suffixes of names of decimal numbers that are sent as text."""
COMMON: Mapping[str, Any] = {
    "accelerator": "simulated",
    "action": "evacuate-region",
    "active": True,
    "actor": "ada",
    "address": "10.0.0.7",
    "agent_version": "0.1.0",
    "allowed_origin": "https://app.example",
    "artifact_digest": "sha256:" + 32 * "5f",
    "artifact_uri": "s3://switchyard-artifacts/sim-70b",
    "asked_by": "ada",
    "aws_region": "us-east-1",
    "browser": "Mozilla/5.0",
    "by_type": {"inf2.48xlarge": 1},
    "cell": "sim-70b-us-east-1-1",
    "changed_by": "ada",
    "class": "realtime",
    "closed_at": None,
    "connected": True,
    "created_by": "ada",
    "decided_at": None,
    "decided_by": "",
    "deployment": "sim-70b",
    "description": "70 billion parameters, simulated",
    "digest": "5f0b1c2d3e4f",
    "email": "ada@example.com",
    "enabled": True,
    "end_reason": "",
    "ended_at": None,
    "engine": "sim",
    "engine_env": {},
    "engine_options": {"max_num_seqs": 32},
    "entry": "llm.example.com",
    "expires_at": LATER,
    "fingerprint": "5f0b1c2d3e4f",
    "from_version": "sim-70b@1",
    "generation": 1,
    "group": "on-call",
    "held": "",
    "held_since": None,
    "host": "app.acme.example",
    "image": "ami-0f9e8d7c6b5a43210",
    "in_force": True,
    "ingress": "i-us-east-1",
    "ingress_url": "http://127.0.0.1:8080",
    "instance_type": "trn1.32xlarge",
    "instance_types": ["trn1.32xlarge", "inf2.48xlarge"],
    "key": "0a1b2c3d4e5f60",
    "lines": ["loading weights", "ready"],
    "market": "on_demand",
    "markets": [],
    "may_read": True,
    "model": "sim-70b",
    "model_version": "sim-70b@1",
    "name": "sim-70b",
    "node": "n-0a1b2c3d",
    "not_after": LATER,
    "notices": [],
    "origin": "us-east-1",
    "outcome": "",
    "parallelism": {"tensor": 32},
    "password": "correct horse battery staple",
    "policy": {"bake_s": 120},
    "port_base": 21000,
    "prefix": "0a1b2c3d4e5f60",
    "provider": "local",
    "quantization": "",
    "queued": 0,
    "rank": 0,
    "reason": "as asked",
    "region": "us-east-1",
    "region_order": ["us-east-1", "us-west-2"],
    "release": "3fa9c0de81b2745a",
    "requested_by": "ada",
    "reservation": "",
    "residency": {"eu-central-1": ["eu-central-1", "eu-west-1"]},
    "resolution": "",
    "restarts": 0,
    "revoked_at": None,
    "roles": {},
    "scaling": {"mode": "act"},
    "secret": 64 * "5",
    "seen": "5c0c8bd8a1b1f1d2",
    "serving_class": "realtime",
    "shares": {"us-east-1": 0.63, "us-west-2": 0.37},
    "slo": "ttft=1000,itl=60",
    "spares": {"trn1.32xlarge": 1},
    "speculation": {},
    "stack": "switchyard-us-east-1",
    "state": "ready",
    "stopped_at": None,
    "team": "search",
    "tenant": "rufus",
    "to_version": "sim-70b@2",
    "token": "sw_0a1b2c3d4e5f60_…",
    "tone": "ok",
    "trouble": "",
    "type": "trn1.32xlarge",
    "unplaced": {},
    "unrouted_at": None,
    "update_policy": {"canary_bake_s": 60.0},
    "uri": "s3://acme-batches/in",
    "url": "https://app.acme.example/hooks",
    "user": "ada",
    "username": "ada",
    "version": "sim-70b@2",
    "weights": {"us-east-1": 191, "us-west-2": 64},
    "why": "a load test",
    "with_nodes": ["n-4e5f6a7b"],
    "workload": "1000+150",
    "zone": "us-east-1a",
}
"""Name of a field -> its example if its schema allows it: one consistent small fleet."""


def with_examples(result: JsonObject, generator: Any, request: Any, public: bool) -> JsonObject:
    """Postprocessing hook: adds an example to every JSON body without one."""
    schemas = result["components"]["schemas"]
    for operations in result["paths"].values():
        for operation in operations.values():
            _show(operation["responses"]["200"], schemas)
            _show(operation.get("requestBody", {}), schemas, sent=True)
    for schema in schemas.values():
        schema.pop(STATED, None)
    return result


def _show(body: JsonObject, schemas: JsonObject, *, sent: bool = False) -> None:
    content = body.get("content", {}).get(JSON)
    if content and not content.keys() & {"example", "examples"}:
        content["example"] = example_of(content["schema"], schemas, sent=sent)


def example_of(schema: JsonObject, schemas: JsonObject, *, name: str = "", sent: bool = False) -> Any:
    """A value that the schema allows. `schemas`: targets of references. `sent`: for a request, which has only required
    fields and those with stated examples."""
    if "$ref" in schema:
        return example_of(schemas[schema["$ref"].rpartition("/")[2]], schemas, name=name, sent=sent)
    for choice in ("allOf", "oneOf", "anyOf"):
        if choice in schema:
            return example_of(schema[choice][0], schemas, name=name, sent=sent)
    if name in COMMON and _allows(schema, COMMON[name]):
        return COMMON[name]
    if stated := next((one for one in (*schema.get("enum", ()), schema.get("default")) if one), None):
        return stated
    match _kinds(schema)[0]:
        case "array":
            return [example_of(schema["items"], schemas, name=name.removesuffix("s"), sent=sent)]
        case "object":
            return _object(schema, schemas, name=name, sent=sent)
        case kind:
            return _scalar(schema, kind, name)


def _scalar(schema: JsonObject, kind: str, name: str) -> Any:
    if kind in NUMBERS:
        usual = next((value for ending, value in UNITS.items() if name.endswith(ending)), NUMBERS[kind])
        return max(schema.get("minimum", 0), min(usual, schema.get("maximum", usual)))
    form = "decimal" if name.endswith(AMOUNTS) else schema.get("format", "")
    return {"boolean": False, "null": None}.get(kind, FORMATS.get(form, name))


def _object(schema: JsonObject, schemas: JsonObject, *, name: str, sent: bool) -> JsonObject:
    stated = schema.get(STATED, {})
    if "properties" not in schema:
        values = schema.get("additionalProperties")
        return (
            {"us-east-1": example_of(values, schemas, name=name, sent=sent)}
            if isinstance(values, dict) and values
            else {}
        )
    shown = dict.fromkeys(schema["properties"])
    if sent:
        shown = {field: None for field in shown if field in stated or field in schema.get("required", ())} or shown
    return {
        field: stated[field]
        if field in stated
        else example_of(schema["properties"][field], schemas, name=field, sent=sent)
        for field in shown
    }


def _kinds(schema: JsonObject) -> list[str]:
    kinds = schema.get("type", "object")
    return kinds if isinstance(kinds, list) else [kinds]


def _allows(schema: JsonObject, value: Any) -> bool:
    """Whether a common value matches the types and enum of a field."""
    if not schema:
        return True
    names = {bool: "boolean", int: "integer", str: "string", float: "number", dict: "object", list: "array"}
    if names.get(type(value), "null") not in _kinds(schema) or value not in schema.get("enum", (value,)):
        return False
    if isinstance(value, dict):
        values = schema.get("additionalProperties")
        return "properties" not in schema and (not values or all(_allows(values, one) for one in value.values()))
    return not isinstance(value, list) or all(_allows(schema["items"], one) for one in value)
