"""Reads the resources of the API from the server's OpenAPI document, so that a new resource needs no change here. A
copy in the user's cache is valid for an hour, so that commands start fast. Without a server it uses an older copy, else
the document of this checkout, so that help works offline."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from controlplane.cli.errors import Failure
from controlplane.cli.resources import Field, Resource, column_of
from controlplane.cli.server_target import CHECKOUT

if TYPE_CHECKING:
    from controlplane.cli.session import Session

Document = dict[str, Any]
Entry = dict[str, Any]
"""The cached form of a resource: plain values, read within a millisecond."""

LISTING = "x-switchyard-list"
JSON = "application/json"
PREFIX = "/api/v1/"
FRESH_S = 3600.0
KEPT_VERSION = 1
"""Increases with every change of the cached form."""


def resources_known(run: "Session", *, anew: bool = False) -> tuple[Resource, ...]:
    """The resources of this session's server. `anew`: ignore a fresh copy, because something is missing in it."""
    path = _cache_folder(run.environ) / f"{sha256(run.target.server.encode()).hexdigest()[:16]}-{KEPT_VERSION}.json"
    kept = None if anew else _read(path, FRESH_S)
    entries = kept or _fetched(run) or _read(path) or _of_this_checkout()
    if kept is None:
        _keep(path, entries)
    return tuple(resource_of(entry) for entry in entries)


def _cache_folder(environ: Mapping[str, str]) -> Path:
    return Path(environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME", "~")).expanduser() / ".cache") / "switchyard"


def _read(path: Path, age_s: float = float("inf")) -> list[Entry] | None:
    """The cached copy, if it is not older than this."""
    try:
        if time.time() - path.stat().st_mtime <= age_s:
            return list(json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        pass
    return None


def _keep(path: Path, entries: list[Entry]) -> None:
    """Write a copy atomically, for parallel commands. Does nothing in a read-only home."""
    part = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(entries))
        part.replace(path)
    except OSError:
        pass


def _fetched(run: "Session") -> list[Entry] | None:
    try:
        return entries_of(run.connect(run.target, tries=1).get("/api/schema/", {"format": "json"}))
    except (Failure, KeyError, TypeError):
        return None


def _of_this_checkout() -> list[Entry]:
    command = [sys.executable, "manage.py", "spectacular", "--format", "openapi-json"]
    made = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=False)
    return entries_of(json.loads(made.stdout)) if made.returncode == 0 else []


def entries_of(document: Document) -> list[Entry]:
    schemas = document["components"]["schemas"]
    return [
        _entry(path, operations, document["paths"], schemas)
        for path, operations in document["paths"].items()
        if LISTING in operations.get("get", {})
    ]


def _entry(path: str, operations: Document, paths: Document, schemas: Document) -> Entry:
    listed, made = operations["get"], operations.get("post")
    page = _resolved(listed["responses"]["200"]["content"][JSON]["schema"], schemas)
    row = page["properties"]["results"]["items"]
    stated = [column for column in listed[LISTING]["columns"].split(", ") if column]
    entry = {
        "path": path.removeprefix(PREFIX),
        "names": listed[LISTING]["names"],
        "key": listed[LISTING]["key"],
        "columns": [[column, _is_number(_path_of(column), row, schemas)] for column in stated],
        "ends": any(parameter["name"] == "include" for parameter in listed.get("parameters", ())),
    }
    if made is None:
        return entry
    shown = _resolved(made["responses"]["200"]["content"][JSON]["schema"], schemas)["properties"]
    usual = _resolved(row, schemas)["properties"]
    body = _resolved(made["requestBody"]["content"][JSON]["schema"], schemas)
    required = body.get("required", ())
    fields = [_field(name, part, name in required, schemas) for name, part in body["properties"].items()]
    secrets = [name for name in shown if name not in usual]
    return entry | {"fields": fields, "summary": made["summary"], "secrets": secrets}


def _field(name: str, schema: Document, required: bool, schemas: Document) -> Entry:
    known = _resolved(schema, schemas)
    many = _kind(known) == "array"
    item = _resolved(known["items"], schemas) if many else known
    return {
        "name": name,
        "kind": _kind(item),
        "help": schema.get("description") or known.get("description", ""),
        "required": required,
        "many": many,
        "choices": [str(choice) for choice in item.get("enum", ()) if choice not in ("", None)],
        "default": schema.get("default"),
    }


def _path_of(column: str) -> str:
    """The field of a column without formatting; empty if it has any."""
    title, sign, source = column.partition("=")
    path, _, how = (source if sign else title.lower().replace(" ", "_")).partition(":")
    return "" if how else path


def _is_number(path: str, row: Document, schemas: Document) -> bool:
    for name in path.split("."):
        known = _resolved(row, schemas)
        row = _resolved(known.get("items", known), schemas).get("properties", {}).get(name, {})
    known = _resolved(row, schemas)
    return _kind(known) in {"integer", "number"} or known.get("format") == "decimal"


def _resolved(schema: Document, schemas: Document) -> Document:
    """Resolves a reference; the first of alternatives."""
    while True:
        choices = next((schema[name] for name in ("allOf", "oneOf", "anyOf") if name in schema), None)
        if "$ref" in schema:
            schema = schemas[schema["$ref"].rpartition("/")[2]]
        elif choices:
            schema = choices[0]
        else:
            return schema


def _kind(schema: Document) -> str:
    kind = schema.get("type", "object")
    return str(kind[0] if isinstance(kind, list) else kind)


def resource_of(entry: Entry) -> Resource:
    return Resource(
        path=entry["path"],
        key=entry["key"],
        names=tuple(entry["names"]),
        columns=tuple(column_of(stated, is_number=number) for stated, number in entry["columns"]),
        ends=entry["ends"],
        fields=tuple(Field(**{**field, "choices": tuple(field["choices"])}) for field in entry.get("fields", ())),
        summary=entry.get("summary", ""),
        secrets=tuple(entry.get("secrets", ())),
    )
