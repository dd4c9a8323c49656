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
    "queues",
    "approval-reject",
    "approvals",
    "batch-page",
    "batch-schedule",
    "batch-schedules",
    "batch-sinks",
    "batches-page",
    "benchmark",
    "benchmark-comparison",
    "benchmarks",
    "cell",
    "cell-log-download",
    "cell-logs",
    "cells",
    "costs",
    "day-plan",
    "deployment",
    "deployments",
    "engine-build",
    "engine-build-uploads",
    "events",
    "factor-app",
    "factor-confirm",
    "factor-key",
    "factor-recovery",
    "factor-remove",
    "factors",
    "import",
    "imports",
    "incident",
    "incident-report",
    "incidents",
    "instance-type",
    "instance-types",
    "invitation",
    "key",
    "keys",
    "machine",
    "machines",
    "model",
    "models",
    "node",
    "nodes",
    "overview",
    "playground",
    "playground-code",
    "region",
    "requests",
    "regions",
    "rollout",
    "rollouts",
    "runbook",
    "search",
    "session-end",
    "settings",
    "settings-allowances",
    "settings-rules",
    "settings-webhooks",
    "token-new",
    "token-revoke",
    "traffic",
    "usage",
    "version",
    "version-diff",
    "what-if",
    "why",
}
OPERATOR = {
    "agents-cancel",
    "agents-upgrade",
    "audit",
    "batch-action",
    "batch-delivery-retry",
    "batch-download",
    "batch-new",
    "batch-schedule-action",
    "batch-schedule-change",
    "batch-schedule-new",
    "benchmark-action",
    "benchmark-new",
    "cell-action",
    "deployment-autoscaling",
    "deployment-chain",
    "deployment-new",
    "deployment-scale",
    "deployment-traffic",
    "deployment-updates",
    "draft-edit",
    "evacuate",
    "image-back",
    "image-move",
    "import-action",
    "incident-action",
    "instance-type-action",
    "instance-type-new",
    "invitation-withdraw",
    "key-action",
    "key-new",
    "machine-action",
    "machine-add",
    "model-new",
    "node-action",
    "override-end",
    "plan-draft",
    "plan-draft-action",
    "plan-draft-download",
    "plan-draft-edit",
    "plan-draft-new",
    "plan-drafts",
    "playground-say",
    "pool-action",
    "pool-add",
    "quota-new",
    "region-action",
    "region-new",
    "rollout-action",
    "rollout-new",
    "tenant-webhook-new",
    "tenant-webhook-remove",
    "tenant-webhook-rotate",
    "traffic-shares",
    "version-action",
    "version-new",
    "webhook-test",
}
ADMIN = {
    "allowance-new",
    "allowance-withdraw",
    "approval-approve",
    "approval-rule",
    "batch-sink-change",
    "batch-sink-delete",
    "batch-sink-new",
    "budget-remove",
    "budget-set",
    "compile-cache-delete",
    "engine-build-action",
    "engine-build-new",
    "engine-build-upload-action",
    "fault-rule",
    "grant-new",
    "grant-take",
    "group-change",
    "group-delete",
    "group-new",
    "identity-provider-remove",
    "identity-provider-try",
    "keys-require",
    "program-new",
    "rate-set",
    "rate-withdraw",
    "settings-groups",
    "settings-single-sign-on",
    "settings-users",
    "single-sign-on-change",
    "tenant-grant-new",
    "tenant-grant-withdraw",
    "user-change",
    "user-new",
    "webhook-change",
    "webhook-delete",
    "webhook-new",
    "webhook-rotate",
    "webhook-switch",
    "webhook-try",
}
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
