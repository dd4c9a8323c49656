"""Every page and form by every kind of caller. A URL without a row here fails: state who may open it."""

import pytest
from django.contrib.auth.models import User
from django.test import Client

from kernel.access import Role
from tests.controlplane.access.callers import granted, make_user
from tests.controlplane.access.endpoints import Operation, pages

pytestmark = pytest.mark.django_db

ANYBODY = {"login", "login-second", "logout", "oidc-begin", "oidc-back", "tenant"}
KNOWS_THE_OLD_ONE = {"password-change"}
"""Every logged-in user; refused without the old password (tests of the settings)."""
VIEWER = {
    "overview", "deployments", "deployment", "rollouts", "rollout", "cells", "cell", "nodes", "node", "region",
    "machines", "regions", "benchmarks", "benchmark", "benchmark-comparison",
    "invitation",
    "traffic", "what-if", "playground", "playground-code", "keys", "key", "models", "model", "version", "version-diff",
    "incidents", "incident", "incident-report", "runbook", "engine-build", "engine-build-uploads", "machine",
    "why", "cell-logs", "cell-log-download",
    "costs", "instance-types", "instance-type",
    "day-plan",
    "search", "events", "usage", "settings", "approvals", "settings-webhooks", "settings-rules", "settings-allowances",
    "token-new", "batches-page", "batch-page", "imports", "import",
    "token-revoke", "session-end", "approval-reject", "factors", "factor-app", "factor-key", "factor-confirm",
    "factor-recovery", "factor-remove",
}  # fmt: skip
OPERATOR = {
    "quota-new", "deployment-autoscaling", "deployment-updates", "deployment-traffic",
    "deployment-scale", "cell-action", "rollout-new", "rollout-action", "traffic-shares", "evacuate", "override-end",
    "node-action", "incident-action", "machine-add", "machine-action", "invitation-withdraw", "instance-type-new",
    "instance-type-action",
    "pool-add", "pool-action", "image-move", "image-back", "agents-upgrade", "agents-cancel",
    "key-new", "key-action", "tenant-webhook-new", "tenant-webhook-rotate", "tenant-webhook-remove",
    "batch-action", "draft-edit", "model-new", "version-new", "deployment-new", "import-action",
    "region-new", "benchmark-new", "benchmark-action", "batch-new", "batch-download",
    "plan-drafts", "plan-draft-new", "plan-draft", "plan-draft-edit", "plan-draft-download", "plan-draft-action",
    "version-action", "webhook-test", "playground-say", "audit",
}  # fmt: skip
ADMIN = {
    "keys-require", "settings-users", "settings-groups", "user-new", "user-change", "program-new", "group-new",
    "group-change", "group-delete", "grant-new", "grant-take", "approval-approve", "approval-rule", "webhook-new",
    "webhook-switch", "webhook-delete", "fault-rule", "tenant-grant-new", "tenant-grant-withdraw",
    "allowance-new", "engine-build-new", "engine-build-action", "engine-build-upload-action", "compile-cache-delete",
    "allowance-withdraw", "budget-set", "budget-remove",
    "rate-set", "rate-withdraw",
}  # fmt: skip
ASKED = {"playground-say": '{"deployment": "x", "region": "x", "messages": [{"role": "user", "content": "Hello"}]}'}
"""Form values that the check needs, because it depends on the deployment."""


def test_every_url_has_a_row() -> None:
    assert {_name(page) for page in pages()} == ANYBODY | KNOWS_THE_OLD_ONE | VIEWER | OPERATOR | ADMIN


def test_strangers_see_the_login_and_change_nothing() -> None:
    client = Client()
    for page in pages():
        if _name(page) not in ANYBODY:
            response = client.generic(page.method, page.path)
            led = response.headers.get("Location", "").startswith("/login/?next=")
            assert led or response.status_code in {401, 405}, page.name


@pytest.mark.slow
def test_a_viewer_sees_every_page_and_asks_for_nothing() -> None:
    assert _refused(make_user("viewer"), OPERATOR | ADMIN | VIEWER) == OPERATOR | ADMIN


@pytest.mark.slow
def test_an_operator_runs_the_fleet() -> None:
    assert _refused(make_user("operator", Role.OPERATOR), OPERATOR | ADMIN) == ADMIN


@pytest.mark.slow
def test_an_admin_may_everything() -> None:
    assert _refused(make_user("admin", Role.ADMIN), OPERATOR | ADMIN) == set()


@pytest.mark.slow
def test_a_grant_opens_no_page_of_its_own() -> None:
    assert _refused(granted("ada", "chat"), OPERATOR | ADMIN) == OPERATOR | ADMIN


def _refused(user: User, names: set[str]) -> set[str]:
    """The URLs that refuse this user by GET and by POST. Objects need not exist."""
    client = Client(raise_request_exception=False)
    client.force_login(user)
    refused: dict[str, set[bool]] = {}
    for page in pages():
        if _name(page) in names:
            body = ASKED.get(_name(page), "")
            response = client.generic(page.method, page.path, body, content_type="application/json")
            assert response.status_code < 500, (page.name, response.content)
            assert response.status_code != 302 or "/login/" not in response.headers["Location"], page.name
            if response.status_code != 405:
                refused.setdefault(_name(page), set()).add(response.status_code == 403)
    assert {name for name, answers in refused.items() if len(answers) > 1} == set()
    return {name for name, answers in refused.items() if answers == {True}}


def _name(page: Operation) -> str:
    return page.name.partition(" ")[2]
