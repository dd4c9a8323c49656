"""Reads and writes files of declarative documents, and keeps the file and line of each value for errors. Written
documents change nothing when applied. Values are read as in YAML 1.2: `on`, `off`, `yes` and `no` are strings."""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from controlplane.cli.errors import Failure
from controlplane.cli.exit_codes import ExitCode

if TYPE_CHECKING:
    import yaml

STANDARD_INPUT = "-"
SUFFIXES = (".yaml", ".yml", ".json")
API_VERSION = "switchyard/v1"
VERSION_FIELDS = (
    "engine", "engine_build", "artifact_uri", "artifact_digest", "context_length", "max_concurrency", "ready_timeout_s",
    "parallelism", "engine_options", "engine_env", "golden_prompts", "golden_waiver", "attention_heads", "kv_heads",
    "layers", "speculation", "quantization", "adapters", "roles", "by_type", "modalities",
)  # fmt: skip
POLICY_META = frozenset({"deployment", "revision", "actor", "changed_at"})
SCHEDULE_META = frozenset({"name", "tenant", "when", "next_at", "problem", "actor", "created_at", "changed_at"})
TYPE_META = frozenset({"name", "origin", "changed_by", "changed_at"})

Row = Mapping[str, Any]
Spec = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Written:
    """Documents in file order. `places`: dotted path of a value, as in problems -> `file:line`."""

    documents: tuple[dict[str, Any], ...]
    places: Mapping[str, str]


def read_documents(names: list[str]) -> Written:
    """All documents of these files, folders (their YAML and JSON files, by name) or `-` for standard input, separated
    by `---` or in a list. Raises Failure if a file cannot be read, is not YAML, or has other content."""
    written = parse_documents(_texts(names))
    if not written.documents:
        raise Failure(f"no document in {', '.join(names)}", ExitCode.NOT_ACCEPTED)
    return written


def parse_documents(texts: Iterable[tuple[str, str]]) -> Written:
    """All documents of these texts with their names. Raises Failure if one is not YAML or has other content."""
    documents: list[dict[str, Any]] = []
    places: dict[str, str] = {}
    for name, text in texts:
        for node in _nodes(name, text):
            value = _value(node, name)
            if value is None:
                continue
            if not isinstance(value, dict):
                where = f"{name}:{node.start_mark.line + 1}"
                raise Failure(f"{where}: a document must be an object with kind and metadata", ExitCode.NOT_ACCEPTED)
            _remember(node, f"documents.{len(documents)}", name, places)
            documents.append(value)
    return Written(tuple(documents), places)


def _texts(names: list[str]) -> Iterator[tuple[str, str]]:
    for name in names:
        if name == STANDARD_INPUT:
            yield "standard input", sys.stdin.read()
            continue
        path = Path(name)
        files = sorted(one for one in path.iterdir() if one.suffix in SUFFIXES) if path.is_dir() else [path]
        for one in files:
            try:
                yield str(one), one.read_text()
            except (OSError, UnicodeDecodeError) as error:
                why = getattr(error, "strerror", None) or error
                raise Failure(f"cannot read {one}: {why}", ExitCode.USAGE) from None


def _nodes(name: str, text: str) -> "Iterator[yaml.Node]":
    import yaml

    try:
        for node in yaml.compose_all(text, Loader=_loader()):
            yield from node.value if isinstance(node, yaml.SequenceNode) else [node]
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise Failure(f"{name}:{line}: {error.problem or error}", ExitCode.NOT_ACCEPTED) from None
    except yaml.YAMLError as error:
        raise Failure(f"{name}: {error}", ExitCode.NOT_ACCEPTED) from None


def _loader() -> "type[yaml.SafeLoader]":
    """YAML's loader with the booleans and numbers of YAML 1.2, without dates and merge keys."""
    import re

    import yaml

    class Loader(yaml.SafeLoader):
        yaml_implicit_resolvers: dict[str, Any] = {}

    for tag, pattern, first in (
        ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
        ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
        ("int", r"[-+]?(0|[1-9][0-9]*)|0x[0-9a-fA-F]+", "-+0123456789"),
        ("float", r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+", "-+.0123456789"),
    ):
        Loader.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", re.compile(f"^(?:{pattern})$"), list(first))
    return Loader


def _value(node: "yaml.Node", name: str) -> Any:
    """The value of a node. Raises Failure for a duplicate key, or a value without a JSON type."""
    import yaml

    if isinstance(node, yaml.MappingNode):
        mapping: dict[str, Any] = {}
        for key, part in node.value:
            key_text = str(key.value)
            if key_text in mapping:
                message = f"{name}:{key.start_mark.line + 1}: {key_text} is a duplicate"
                raise Failure(message, ExitCode.NOT_ACCEPTED)
            mapping[key_text] = _value(part, name)
        return mapping
    if isinstance(node, yaml.SequenceNode):
        return [_value(part, name) for part in node.value]
    try:
        return _loader()("").construct_object(node)
    except (yaml.YAMLError, ValueError) as error:
        message = f"{name}:{node.start_mark.line + 1}: {error}".splitlines()[0]
        raise Failure(message, ExitCode.NOT_ACCEPTED) from None


def _remember(node: "yaml.Node", path: str, name: str, places: dict[str, str]) -> None:
    import yaml

    places[path] = f"{name}:{node.start_mark.line + 1}"
    if isinstance(node, yaml.MappingNode):
        for key, part in node.value:
            below = f"{path}.{key.value}"
            _remember(part, below, name, places)
            places[below] = f"{name}:{key.start_mark.line + 1}"
    elif isinstance(node, yaml.SequenceNode):
        for index, part in enumerate(node.value):
            _remember(part, f"{path}.{index}", name, places)


def _instance_type(row: Row) -> Spec:
    return {field: value for field, value in row.items() if field not in TYPE_META}


def _region(row: Row) -> Spec:
    spares = {
        kind: {"warm": warm, "repair_only": row["repair_only"][kind]} if row["repair_only"].get(kind) else warm
        for kind, warm in row["spares"].items()
    }
    cloud = row["cloud"] or {}
    return {
        "provider": row["provider"],
        **{field: cloud[field] for field in ("stack", "aws_region") if cloud},
        "position": row["position"],
        "ingress_url": row["ingress_url"],
        "spares": spares,
        "plain_http": row["plain_http"],
        "cheapest_first": row["cheapest_first"],
        "grpc": row["grpc"],
        **({"alarms": row["alarms"]} if row["alarms"] else {}),
    }


def _quota(row: Row) -> Spec:
    return {"machines": row["machines"], "borrow_most": row["borrow_most"]}


def _model(row: Row) -> Spec:
    return {"description": row["description"]}


def _version(row: Row) -> Spec:
    return {field: row[field] for field in VERSION_FIELDS}


def _deployment(row: Row) -> Spec:
    plain = [field for field in row if field not in {"name", "regions", "created_at"}]
    plans_roles = row["scaling"].get("roles") == "planned"
    regions = [{"region": place["region"], "cells": _cells(place, plans_roles)} for place in row["regions"]]
    by_type = {place["region"]: place["by_type"] for place in row["regions"] if place["by_type"]}
    return {**{field: row[field] for field in plain}, "regions": regions, **({"by_type": by_type} if by_type else {})}


def _cells(place: Row, plans_roles: bool) -> Any:
    """Stated cells; planned roles are left out."""
    return place["range"] or (None if plans_roles else place["pools"]) or place["cells"]


def _traffic_policy(row: Row) -> Spec:
    return {field: value for field, value in row.items() if field not in POLICY_META}


def _batch_schedule(row: Row) -> Spec:
    return {field: value for field, value in row.items() if field not in SCHEDULE_META}


def _fault_rule(row: Row) -> Spec:
    return {"mode": row["mode"]}


DESCRIBED: Mapping[str, tuple[str, Callable[[Row], Spec]]] = {
    "instance-types": ("InstanceType", _instance_type),
    "regions": ("Region", _region),
    "quotas": ("Quota", _quota),
    "models": ("Model", _model),
    "model-versions": ("ModelVersion", _version),
    "deployments": ("Deployment", _deployment),
    "traffic-policies": ("TrafficPolicy", _traffic_policy),
    "batch-schedules": ("BatchSchedule", _batch_schedule),
    "fault-rules": ("FaultRule", _fault_rule),
}
"""Name of a resource -> kind of its documents, and how to write them, in order of dependency."""


def document_of(resource: str, name: str, row: Row) -> dict[str, Any]:
    """The document of a resource's row; empty or unknown fields are left out."""
    kind, spec_of = DESCRIBED[resource]
    spec = {field: value for field, value in spec_of(row).items() if value not in (None, "", {}, [])}
    return {"apiVersion": API_VERSION, "kind": kind, "metadata": {"name": name}, "spec": spec}
