"""The OpenAPI document and its page: public, complete, and true to its own examples."""

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import drf_spectacular.validation
import jsonschema
import pytest
from django.core.management import call_command
from django.test import Client
from jsonschema import ValidationError
from referencing import Registry, Resource

from tests.controlplane.api.client import assert_valid, document, noun, resolved

SPECIFICATION = Path(drf_spectacular.validation.__file__).with_name("openapi_3_1_schema.json")
METHODS = {"get", "post", "put", "patch", "delete"}


def operations() -> list[tuple[str, dict[str, Any]]]:
    return [
        (f"{method} {path}", operation)
        for path, found in document()["paths"].items()
        for method, operation in found.items()
        if method in METHODS
    ]


def examples(content: dict[str, Any]) -> list[Any]:
    named = [example["value"] for example in content.get("examples", {}).values()]
    return named + ([content["example"]] if "example" in content else [])


@pytest.mark.slow
def test_the_document_is_valid_and_generated_without_a_warning() -> None:
    call_command("spectacular", "--fail-on-warn", "--format", "openapi-json", stdout=(output := io.StringIO()))
    specification = json.loads(SPECIFICATION.read_text())
    # `--validate` looks for the specification's anchors at each reference anew, which takes most of its time.
    registry: Registry[Any] = (
        Registry().with_resource(specification["$id"], Resource.from_contents(specification)).crawl()
    )
    jsonschema.Draft202012Validator(specification, registry=registry).validate(json.loads(output.getvalue()))


def test_it_is_openapi_3_1() -> None:
    assert document()["openapi"].startswith("3.1.")


def test_it_shows_every_resource() -> None:
    nouns = {noun(path) for path in document()["paths"]}
    assert nouns == {
        "machines", "machines/invitations", "agents/releases", "agents/rollouts",
        "autoscaling", "autoscaling/places", "autoscaling/decisions",
        "regions", "capacity-pools", "capacity-plan", "image-moves", "instance-types", "nodes", "cells", "deployments",
        "models", "model-imports", "model-versions",
        "incidents", "engine-allowances", "engine-builds", "engine-build-uploads", "compile-caches", "tenant-grants",
        "requests", "tenant-webhooks",
        "request-queues", "rollouts", "plan", "drafts", "what-if", "why", "replay", "operations", "fault-rules",
        "webhooks",
        "webhook-deliveries", "certificates", "audit", "events", "apply", "routing-tables", "ingresses", "keys",
        "key-rings", "batches", "batch-schedules", "batch-runs", "batch-sinks", "batch-deliveries",
        "benchmarks", "configuration-searches",
        "usage", "forecasts", "budgets", "costs", "rates", "quotas",
        "traffic/matrices", "traffic/losses", "traffic/history", "traffic/policies", "traffic/overrides",
        "traffic/evacuations",
        "entry", "entry-revisions",
        "me", "users", "service-accounts", "groups", "grants", "tokens", "sessions", "approvals", "approval-rules",
    }  # fmt: skip


def contents(operation: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Of its responses and its request."""
    for response in operation["responses"].values():
        yield from resolved(response).get("content", {}).values()
    yield from operation.get("requestBody", {}).get("content", {}).values()


def test_examples_are_what_their_schemas_say() -> None:
    wrong = []
    for name, operation in operations():
        for content in contents(operation):
            for example in examples(content):
                try:
                    assert_valid(example, content["schema"])
                except ValidationError as error:
                    wrong.append(f"{name}: {error.message} at {error.json_path}")
    assert wrong == []


def test_every_operation_says_what_it_does_and_shows_an_answer() -> None:
    def is_described(operation: dict[str, Any]) -> bool:
        shown = examples(operation["responses"]["200"]["content"]["application/json"])
        return bool(operation["description"] and shown)

    assert [name for name, operation in operations() if not is_described(operation)] == []


def test_every_operation_has_a_summary_of_one_plain_line() -> None:
    found = [operation.get("summary", "") for path in document()["paths"].values() for operation in path.values()]
    assert [line for line in found if not re.fullmatch(r"[A-Z][A-Za-z, ]{5,59}[a-z]", line)] == []
    assert sorted(found) == sorted(set(found))
    assert {"Drain a cell", "List routing tables", "Create an engine allowance", "Roll back a rollout"} <= set(found)


def test_a_cell_has_the_promised_fields() -> None:
    schemas = document()["components"]["schemas"]
    promised = {"id", "deployment", "region", "state", "reason", "generation", "model_version", "nodes", "load"}
    assert promised <= set(schemas["Cell"]["required"])
    assert {"id", "rank", "role", "state"} <= set(schemas["Member"]["required"])
    assert {"in_flight", "queued", "tokens_per_s", "ttft_p50_ms", "ttft_p99_ms"} <= set(schemas["Load"]["required"])
    assert {"name", "ingress_url"} <= set(schemas["Region"]["required"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("accept", "query", "kind"),
    [
        ("*/*", "", "application/vnd.oai.openapi"),
        ("application/json", "", "application/json"),
        ("*/*", "?format=json", "application/vnd.oai.openapi+json"),
    ],
)
def test_anybody_may_read_the_document(client: Client, accept: str, query: str, kind: str) -> None:
    response = client.get(f"/api/schema/{query}", headers={"accept": accept})
    assert response.status_code == 200
    assert response["Content-Type"].startswith(kind)
    assert "no-cache" in response["Cache-Control"], "browsers ask for it each time"


@pytest.mark.slow
def test_a_bad_token_does_not_hide_the_document(client: Client) -> None:
    assert client.get("/api/schema/", headers={"authorization": "Bearer nonsense"}).status_code == 200


def test_the_page_loads_nothing_from_elsewhere_and_runs_no_inline_script(client: Client) -> None:
    response = client.get("/api/docs/")
    assert response.status_code == 200
    page = response.content.decode()
    loaded = re.findall(r'(?:src|href)="([^"]+)"', page)
    assert loaded
    assert all(address.startswith("/") and not address.startswith("//") for address in loaded)
    assert "<script>" not in page
    assert "<style" not in page
    assert response["Content-Security-Policy"] == client.get("/api/v1/cells")["Content-Security-Policy"]


def test_everything_that_the_page_loads_is_there(client: Client) -> None:
    page = client.get("/api/docs/").content.decode()
    for address in re.findall(r'(?:src|href)="([^"]+)"', page):
        response = client.get(address.replace("&amp;", "&"))
        assert response.status_code == 200, address
        assert response.getvalue(), address  # reading to the end closes the file
