"""Every operation of the API by every kind of caller. An operation without a row here fails: state who may do it.
Objects need not exist: callers without permission are refused before any lookup.
"""

import pytest

from kernel.access import Role, Scope
from tests.controlplane.access.callers import calls, granted, is_let_in, make_user
from tests.controlplane.access.endpoints import operations

pytestmark = [pytest.mark.django_db, pytest.mark.slow]

RESOURCES = [
    "machines", "machines/invitations", "agents/releases", "agents/rollouts",
    "regions", "capacity-pools", "image-moves", "instance-types", "nodes", "cells", "deployments", "rollouts",
    "incidents", "fault-rules", "webhooks", "webhook-deliveries", "models", "model-versions",
    "ingresses", "routing-tables", "keys", "key-rings",
    "engine-allowances", "engine-builds", "engine-build-uploads", "compile-caches",
    "tenant-grants", "tenant-webhooks", "request-queues",
    "budgets", "rates", "forecasts", "quotas", "batches", "batch-schedules", "batch-runs",
    "batch-sinks", "batch-deliveries",
    "benchmarks", "configuration-searches", "model-imports",
    "traffic/matrices", "traffic/losses", "traffic/history", "traffic/policies", "traffic/overrides",
    "traffic/evacuations", "groups",
    "entry", "entry-revisions", "autoscaling/places", "autoscaling/decisions",
    "grants", "tokens", "sessions", "approvals", "approval-rules", "events", "requests",
]  # fmt: skip
READ = {f"GET {name}{one}" for name in RESOURCES for one in ("", "/{id}")} | {
    "GET usage", "GET costs", "GET usage/responses", "GET autoscaling", "GET capacity-plan", "GET me", "GET operations",
    "GET benchmarks/best", "GET incidents/{id}/report", "GET benchmarks/{id}/histograms",
    "GET model-versions/{id}/diff", "GET model-versions/{id}/calibration", "GET cells/{id}/logs", "GET keys/policy",
    "GET model-versions/{id}/memory", "GET replay/rounds/{id}", "GET replay/incidents/{id}",
    "GET why/cell/{id}", "GET why/node/{id}", "GET why/deployment/{id}", "GET why/rollout/{id}", "GET why/share/{id}",
    "GET cells/{id}/load", "GET deployments/{id}/load", "GET regions/{id}/load", "GET nodes/{id}/use",
    "GET deployments/{id}/chain",
    "GET requests/comparison",
}  # fmt: skip
ASKED_BY_POST = {  # and nothing is changed
    "POST rollouts/preview", "POST traffic/overrides/preview", "POST traffic/evacuations/preview", "POST plan",
    "POST apply/preview", "POST what-if",
}  # fmt: skip
OWN = {  # only the caller's, unless an admin asks
    "POST tokens", "POST tokens/{id}/revoke", "POST sessions/{id}/revoke", "POST approvals/{id}/reject",
}  # fmt: skip
OPERATE = {
    "POST nodes/{id}/check", "POST nodes/{id}/reset", "POST nodes/{id}/reboot",
    "POST nodes/{id}/cordon", "POST nodes/{id}/drain", "POST nodes/{id}/replace", "POST nodes/{id}/revoke",
    "POST ingresses/{id}/revoke", "POST machines/{id}/revoke", "POST nodes/{id}/uncordon",
    "POST agents/rollouts", "POST agents/rollouts/{id}/cancel", "GET certificates", "GET certificates/{id}",
    "POST certificates", "POST certificates/{id}/remove", "GET drafts", "GET drafts/{id}",
    "POST machines/invitations", "POST machines/invitations/{id}/withdraw", "POST machines/{id}/remove",
    "POST machines/{id}/layout", "POST machines/{id}/repaired",
    "POST incidents/{id}/dismiss", "POST incidents/{id}/acknowledge", "POST incidents/{id}/assign",
    "POST incidents/{id}/note", "POST webhooks/{id}/test", "POST models", "PATCH models/{id}",
    "DELETE models/{id}", "POST model-versions",
    "PATCH model-versions/{id}", "DELETE model-versions/{id}", "POST model-versions/{id}/release",
    "POST model-versions/{id}/retire", "POST model-versions/{id}/validate", "POST model-versions/{id}/calibrate",
    "POST keys", "PATCH keys/{id}",
    "POST keys/{id}/revoke", "POST keys/{id}/rotate", "POST apply", "GET audit", "GET audit/{id}",
    "POST capacity-pools", "PATCH capacity-pools/{id}", "POST capacity-pools/{id}/remove",
    "POST capacity-pools/{id}/resume", "POST image-moves", "POST image-moves/{id}/back",
    "POST regions", "PATCH regions/{id}", "DELETE regions/{id}", "POST deployments",
    "POST tenant-webhooks", "POST tenant-webhooks/{id}/rotate", "DELETE tenant-webhooks/{id}",
    "POST autoscaling/pause", "POST autoscaling/resume", "POST batches/{id}/cancel",
    "POST batch-schedules", "PATCH batch-schedules/{id}", "DELETE batch-schedules/{id}",
    "POST batch-schedules/{id}/run", "POST batch-deliveries/{id}/retry",
    "POST quotas", "DELETE quotas/{id}",
    "POST instance-types", "PATCH instance-types/{id}", "DELETE instance-types/{id}",
    "POST configuration-searches", "POST configuration-searches/{id}/cancel",
    "POST model-imports", "POST model-imports/{id}/cancel", "POST model-imports/{id}/retry",
    "POST model-imports/{id}/draft",
}  # fmt: skip
OPERATE_ONE = {  # a grant for the deployment also does
    "POST cells/{id}/drain", "POST cells/{id}/restart", "PATCH deployments/{id}", "DELETE deployments/{id}",
    "POST rollouts", "POST benchmarks", "POST benchmarks/{id}/cancel",
    "POST rollouts/{id}/abort", "POST rollouts/{id}/pause", "POST rollouts/{id}/resume", "POST rollouts/{id}/roll-back",
    "POST rollouts/{id}/skip-bake", "PATCH traffic/policies/{id}", "POST traffic/overrides",
    "POST traffic/overrides/{id}/end", "POST traffic/evacuations",
}  # fmt: skip
ADMINISTER = {
    "PATCH fault-rules/{id}", "POST webhooks", "PATCH webhooks/{id}", "DELETE webhooks/{id}",
    "POST webhooks/{id}/rotate", "POST keys/require",
    "GET users", "GET users/{id}", "POST users", "PATCH users/{id}", "GET service-accounts",
    "GET service-accounts/{id}", "POST service-accounts", "PATCH service-accounts/{id}", "POST groups",
    "PATCH groups/{id}", "DELETE groups/{id}",
    "POST engine-allowances", "DELETE engine-allowances/{id}", "POST engine-builds", "DELETE engine-builds/{id}",
    "POST engine-build-uploads", "PUT engine-build-uploads/{id}/part", "POST engine-build-uploads/{id}/finish",
    "DELETE engine-build-uploads/{id}", "DELETE compile-caches/{id}",
    "POST tenant-grants", "DELETE tenant-grants/{id}",
    "POST batch-sinks", "PATCH batch-sinks/{id}", "DELETE batch-sinks/{id}",
    "POST request-queues", "DELETE request-queues/{id}",
    "POST rates", "DELETE rates/{id}",
    "POST budgets", "PATCH budgets/{id}", "DELETE budgets/{id}",
    "PATCH entry/{id}", "POST entry/{id}/adopt",
    "POST grants", "DELETE grants/{id}", "POST approvals/{id}/approve", "PATCH approval-rules/{id}",
}  # fmt: skip
VIEWER_MAY = READ | ASKED_BY_POST | OWN
OPERATOR_MAY = VIEWER_MAY | OPERATE | OPERATE_ONE
EVERYTHING = OPERATOR_MAY | ADMINISTER


def test_every_operation_has_a_row() -> None:
    assert {operation.name for operation in operations()} == EVERYTHING


@pytest.mark.parametrize(
    ("username", "role", "scope", "may"),
    [
        ("viewer", Role.VIEWER, Scope.ADMIN, VIEWER_MAY),
        ("operator", Role.OPERATOR, Scope.ADMIN, OPERATOR_MAY),
        ("admin", Role.ADMIN, Scope.ADMIN, EVERYTHING),
        ("reader", Role.ADMIN, Scope.READ, READ | ASKED_BY_POST),
        ("writer", Role.ADMIN, Scope.WRITE, OPERATOR_MAY),
        ("modest writer", Role.VIEWER, Scope.WRITE, VIEWER_MAY),
    ],
)
def test_each_may_exactly_what_its_row_says(username: str, role: Role, scope: Scope, may: set[str]) -> None:
    user = make_user(username, role)
    assert {operation.name for operation in operations() if is_let_in(user, scope, operation)} == may


def test_an_anonymous_request_may_nothing() -> None:
    client = calls(None)
    for operation in operations():
        response = client.generic(operation.method, operation.path, "{}", content_type="application/json")
        assert response.status_code == 401, operation.name
        assert response["WWW-Authenticate"] == "Bearer", operation.name
        assert response["Content-Type"] == "application/problem+json", operation.name


def test_the_answers_say_so_too() -> None:
    """Through the whole stack: callers outside the rows get 403, and no request fails."""
    client = calls(make_user("viewer"))
    for operation in operations():
        response = client.generic(operation.method, operation.path, "{}", content_type="application/json")
        assert response.status_code < 500, (operation.name, response.content)
        assert (response.status_code != 403) == (operation.name in VIEWER_MAY), (operation.name, response.content)


def test_a_grant_opens_nothing_that_is_not_of_its_deployment() -> None:
    """An object that does not exist is not found; one of another deployment is refused (test_grants)."""
    user, client = granted("ada", "chat"), calls(granted("eve", "chat"))
    for operation in operations():
        if operation.name in OPERATE_ONE and "{id}" in operation.name:
            assert client.generic(operation.method, operation.path).status_code == 404, operation.name
        else:
            assert is_let_in(user, Scope.ADMIN, operation) == (operation.name in VIEWER_MAY), operation.name
