"""A client of the REST API that fails the test if a response contradicts the OpenAPI document."""

import functools
import json
import re
from typing import Any

import jsonschema
from django.contrib.auth.models import User
from rest_framework.test import APIClient

from accounts.models import ApiToken
from controlplane.api.schema import api_document
from kernel import clock
from kernel.secrets import secret_issue
from tests.fleet.rows import NOW

V1 = "/api/v1"
BELOW = frozenset({"machines/invitations", "autoscaling/places", "autoscaling/decisions"})
WITH_BODY = frozenset({"POST", "PUT", "PATCH", "DELETE"})


@functools.cache
def document() -> dict[str, Any]:
    return dict(json.loads(json.dumps(api_document())))


@functools.cache
def lists() -> tuple[str, ...]:
    """Paths that respond with a page of results."""
    return tuple(path for path, found in document()["paths"].items() if "{" not in path and _is_page(found.get("get")))


def _is_page(operation: dict[str, Any] | None) -> bool:
    if operation is None:
        return False
    return "results" in resolved(operation["responses"]["200"]["content"]["application/json"]["schema"])["properties"]


def noun(path: str) -> str:
    """The noun of a path, with the prefix of traffic, machines, agents or the autoscaler."""
    parts = path.removeprefix(f"{V1}/").split("/")
    is_below = parts[0] in {"traffic", "agents"} or "/".join(parts[:2]) in BELOW
    return "/".join(parts[:2]) if is_below else parts[0]


def assert_valid(instance: Any, schema: dict[str, Any]) -> None:
    """Check against a schema of the document, including references."""
    whole = {**schema, "components": document()["components"]}
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    jsonschema.Draft202012Validator(whole, format_checker=checker).validate(instance)


def resolved(part: dict[str, Any]) -> dict[str, Any]:
    if "$ref" not in part:
        return part
    found: Any = document()
    for name in part["$ref"].removeprefix("#/").split("/"):
        found = found[name]
    return dict(found)


class DescribedClient(APIClient):
    """Compares every response below /api/v1/ with the document: status, content type and body."""

    def request(self, **kwargs: Any) -> Any:
        response = super().request(**kwargs)
        operation = _operation(kwargs["PATH_INFO"], kwargs["REQUEST_METHOD"])
        if operation is not None:
            assert_described(response, operation)
        return response


def assert_described(response: Any, operation: dict[str, Any]) -> None:
    promised = operation["responses"].get(str(response.status_code))
    assert promised is not None, f"{response.status_code} is not documented: {response.content!r}"
    content = resolved(promised).get("content")
    if content is None:
        assert response.content == b""
        return
    if response.streaming:  # a table, which its own test reads
        assert response["Content-Type"].partition(";")[0] in content
        return
    assert response["Content-Type"] in content
    assert_valid(response.json(), content[response["Content-Type"]]["schema"])


def _operation(path: str, method: str) -> dict[str, Any] | None:
    for pattern, operations in _routes():
        if pattern.fullmatch(path.rstrip("/")):
            found: dict[str, Any] | None = operations.get(method.lower())
            return found
    return None


@functools.cache
def _routes() -> list[tuple[re.Pattern[str], dict[str, Any]]]:
    by_fewest_parameters = sorted(document()["paths"].items(), key=lambda one: one[0].count("{"))
    return [(re.compile(re.sub(r"{\w+}", "[^/]+", path)), operations) for path, operations in by_fewest_parameters]


def anonymous() -> DescribedClient:
    return DescribedClient()


def bearer(username: str = "operator") -> DescribedClient:
    issued = secret_issue()
    ApiToken.objects.create(
        prefix=issued.prefix,
        digest=issued.digest,
        name="test",
        user=_user(username),
        created_at=NOW,
        last_used_at=clock.now(),  # as in the minute after another use
    )
    client = DescribedClient()
    client.credentials(HTTP_AUTHORIZATION=f"Bearer {issued.text}")
    return client


def browser(username: str = "operator") -> DescribedClient:
    """A client with a session, checked for CSRF tokens like browsers."""
    client = DescribedClient(enforce_csrf_checks=True)
    client.force_login(_user(username))
    return client


def _user(username: str) -> User:
    return User.objects.get_or_create(username=username, defaults={"is_superuser": True})[0]


def rules(response: Any) -> dict[str, str]:
    """For a 400: field -> broken rule."""
    assert response.status_code == 400, response.content
    return {error["field"]: error["rule"] for error in response.json()["errors"]}
